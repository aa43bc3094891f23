"""The plan of memory: what a run will occupy on device and host, and the largest expert cache that fits.

Arithmetic only, no I/O: the caller says how much is free.
"""

import dataclasses

import jax.numpy as jnp

from oled_jax.config import ModelConfig
from oled_jax.errors import UsageError
from oled_jax.models.kv_cache import kv_bytes
from oled_jax.models.registry import family_named
from oled_jax.ops.grouping import ItemShape

MARGIN = 0.05  # of what is free: program code, fragments, workspaces of matrix libraries
WORTH_A_LINE = 0.01  # activations below this share of the total are left out of the printed plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that a run occupies.

    Attributes:
      num_layers, num_experts: MoE layers L and experts E.
      total_slots: sum of C_l.
      spare: slots beyond it.
      page_bytes: one routed expert.
      resident: every page is resident for good (policy all): no store.
      unified: the device's memory is the host's.
      device_free, host_free: bytes before loading; None: unknown, nothing is refused.
      batch: rows that are decoded together.
    """

    num_layers: int
    num_experts: int
    total_slots: int
    spare: int
    page_bytes: int
    trunk_bytes: int
    kv_bytes: int
    activation_bytes: int
    resident: bool
    unified: bool
    device_free: int | None
    host_free: int | None
    batch: int = 1

    @property
    def capacity(self) -> float:
        """Average resident experts per MoE layer."""
        return self.total_slots / self.num_layers

    @property
    def pool_bytes(self) -> int:
        return (self.total_slots + self.spare) * self.page_bytes

    @property
    def store_bytes(self) -> int:
        return 0 if self.resident else self.num_layers * self.num_experts * self.page_bytes

    @property
    def staging_bytes(self) -> int:
        """Host memory that exists while loading only: one layer on its way to the pool, or the trunk."""
        layer = self.num_experts * self.page_bytes if self.resident else 0
        return max(layer, 0 if self.unified else self.trunk_bytes)

    @property
    def device_bytes(self) -> int:
        return self.trunk_bytes + self.kv_bytes + self.activation_bytes + self.pool_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory, that of the device included where both are one."""
        return self.store_bytes + self.staging_bytes + (self.device_bytes if self.unified else 0)

    @property
    def largest_capacity(self) -> int:
        """The largest whole capacity that fits, at most E; 0 if none does."""
        free = self.host_free if self.unified else self.device_free
        if free is None:
            return self.num_experts
        occupied = (self.host_bytes if self.unified else self.device_bytes) - self.total_slots * self.page_bytes
        slots = int(free * (1 - MARGIN) - occupied) // self.page_bytes
        return max(0, min(self.num_experts, slots // self.num_layers))

    def with_capacity(self, capacity: int) -> "MemoryPlan":
        return dataclasses.replace(self, total_slots=capacity * self.num_layers)

    def require_fit(self) -> None:
        """Raises UsageError if something cannot fit; the message names the largest capacity that does."""
        if not self.unified:
            self._require("device memory", self.device_bytes, self.device_free, self._advice())
        advice = self._advice() if self.unified else self._host_advice()
        self._require("host memory", self.host_bytes, self.host_free, advice)

    def _require(self, where: str, needed: int, free: int | None, advice: str) -> None:
        if free is not None and needed > free * (1 - MARGIN):
            what = "policy all" if self.resident else f"capacity {self.capacity:.4g}"
            raise UsageError(
                f"{what} needs {format_bytes(needed)} of {where}, {format_bytes(free * (1 - MARGIN))} "
                f"can be used ({format_bytes(free)} free less a margin of {MARGIN:.0%}): {advice}"
            )

    def _advice(self) -> str:
        paged = dataclasses.replace(self, resident=False)
        if paged.largest_capacity < 1:
            smaller = " or the batch (--batch-size)" if self.batch > 1 else ""
            return f"not even one expert per layer fits; shorten the text (--gen-length){smaller} or free memory"
        other = " with another policy" if self.resident else ""
        return f"the largest capacity that fits{other} is {paged.largest_capacity} (--expert-cache)"

    def _host_advice(self) -> str:
        if self.resident:
            return "free memory"
        everything = dataclasses.replace(self, resident=True, spare=0).with_capacity(self.num_experts)
        fits = self.device_free is None or everything.device_bytes <= self.device_free * (1 - MARGIN)
        why = "the expert store holds every page at any capacity"
        return f"{why}; all experts fit on the device with --policy all" if fits else why

    def lines(self) -> list[str]:
        """The plan as a user reads it."""
        parts = [f"trunk {format_bytes(self.trunk_bytes)}", f"KV cache {format_bytes(self.kv_bytes)}"]
        slots = f"{self.total_slots} + {self.spare} slots of {format_bytes(self.page_bytes)}"
        parts.append(f"expert pool {format_bytes(self.pool_bytes)} ({slots})")
        if self.activation_bytes > WORTH_A_LINE * self.device_bytes:
            parts.append(f"activations about {format_bytes(self.activation_bytes)}")
        device = f"{', '.join(parts)}: {format_bytes(self.device_bytes)}"
        free = "" if self.device_free is None else f" of {format_bytes(self.device_free)} free"
        host = "no expert store" if self.resident else f"expert store {format_bytes(self.store_bytes)}"
        if self.unified:
            host += f"; with the device's {format_bytes(self.host_bytes)}"
        host_free = "" if self.host_free is None else f" of {format_bytes(self.host_free)} free"
        return [f"memory plan, device: {device}{free}", f"memory plan, host: {host}{host_free}"]


def plan_memory(
    config: ModelConfig,
    *,
    total_slots: int,
    spare: int,
    batch: int,
    kv_positions: int,
    chunk: int,
    block_length: int,
    fold_commits: bool = False,
    resident: bool = False,
    unified: bool = False,
    device_free: int | None = None,
    host_free: int | None = None,
) -> MemoryPlan:
    """The plan for a model and the shape of a run.

    Args:
      config: the model, with the dtype it will have.
      total_slots, spare: of the pool.
      batch: B.
      kv_positions: capacity of the KV cache, 0: there is none.
      chunk: positions of one prefill pass.
      block_length: positions of the other passes.
      fold_commits: some of those go over two blocks.
      resident, unified, device_free, host_free: see `MemoryPlan`.
    """
    widest = max(chunk, (1 + fold_commits) * block_length)
    return MemoryPlan(
        num_layers=config.num_moe_layers,
        num_experts=config.num_experts,
        total_slots=total_slots,
        spare=spare,
        page_bytes=page_bytes(config),
        trunk_bytes=trunk_bytes(config),
        kv_bytes=kv_bytes(config, batch, kv_positions),
        activation_bytes=activation_bytes(config, batch, widest, block_length, kv_positions),
        resident=resident,
        unified=unified,
        device_free=device_free,
        host_free=host_free,
        batch=batch,
    )


def page_bytes(config: ModelConfig) -> int:
    """One routed expert in the model's dtype."""
    return config.page_parameters * jnp.dtype(config.dtype).itemsize


def store_bytes(config: ModelConfig) -> int:
    """All routed experts in the model's dtype."""
    return config.num_moe_layers * config.num_experts * page_bytes(config)


def trunk_bytes(config: ModelConfig) -> int:
    """Everything that is not a routed expert."""
    itemsize = jnp.dtype(config.dtype).itemsize
    total = 0
    for tensor in family_named(config.family).trunk_tensors(config):
        size = 1
        for extent in tensor.shape:
            size *= extent
        total += size * (4 if tensor.float32 else itemsize)
    return total


def activation_bytes(config: ModelConfig, batch: int, chunk: int, block_length: int, kv_positions: int) -> int:
    """An estimate of the temporaries of the widest pass, or of the head over a block if that is more.

    Attention holds scores and weights in float32; the expert layer one row per (token, k) pair in the model's dtype
    and again in float32 for the sum; the head logits, probabilities and a copy. The rows of the work items, in and
    out, live through the whole pass.
    """
    N, D, itemsize = batch * chunk, config.hidden_size, jnp.dtype(config.dtype).itemsize
    items = ItemShape(num_tokens=N, top_k=config.num_experts_per_tok, num_experts=config.num_experts)
    item_rows = items.max_items * items.rows * D * itemsize * (1 if items.direct else 2)
    keys = kv_positions or chunk  # without a KV cache a chunk sees itself
    attention = 2 * 4 * N * config.num_attention_heads * keys
    experts = N * config.num_experts_per_tok * D * (itemsize + 4)
    dense = N * (D + 3 * config.intermediate_size) * itemsize
    head = 3 * 4 * batch * block_length * config.vocab_size
    return max(attention, experts, dense, head) + item_rows + 4 * N * D * itemsize


def format_bytes(count: int | float) -> str:
    """1.2 GB, 340 MB, 12 kB: powers of ten, two significant digits or more."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            value = count / size
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{count:.0f} B"
