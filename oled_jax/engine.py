"""The engine: a trunk and a pool on the device, a store in host memory, a manager, and the loop that ties them.

Nothing else knows all parts. One engine runs one generation at a time; what belongs to a run is in `session.py`.
"""

import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from oled_jax.config import DecodingConfig, ModelConfig
from oled_jax.decode.block_diffusion import BlockDiffusion
from oled_jax.decode.events import Event, FinishEvent, Result
from oled_jax.errors import UsageError
from oled_jax.models.kv_cache import KVCache
from oled_jax.models.registry import assemble
from oled_jax.offload.carriers.portable import register
from oled_jax.offload.cpu_experts.registry import make_cpu_experts
from oled_jax.offload.manager import CacheManager
from oled_jax.offload.pool import Pool, empty_pool
from oled_jax.offload.statistics import CacheStatistics
from oled_jax.offload.store import PageStore, aligned_empty, allocate_store
from oled_jax.passes import PassKind
from oled_jax.policies.base import IterationOutcome, PassInfo, Policy
from oled_jax.program import PassInputs, PassSpec, fill_pool, forward_pass, stage_pages
from oled_jax.session import Session

DEFAULT_SPARE = 32


@runtime_checkable
class WeightSource(Protocol):
    """Where weights come from: a checkpoint, or a generator of random ones."""

    def read_trunk(self, dtype: np.dtype) -> dict[tuple[str | int, ...], np.ndarray]:
        """Every trunk tensor by state path."""
        ...

    def read_pages(self, moe_layer: int, gate_up: np.ndarray, down: np.ndarray) -> None:
        """Fills the pages of one MoE layer in place, [E, 2F, D] and [E, D, F]."""
        ...

    def check_finite(self) -> None:
        """Raises UsageError if something that was read is not a finite number."""
        ...


class Engine:
    """A model ready to generate.

    Args:
      config: the model; its dtype is that of all weights but the router's bias.
      trunk: the NNX state of the trunk, on the device.
      store: pages in host memory; None if the pool holds every page.
      pool: device pages, owned by the engine from now on.
      manager: plans; None if the pool holds every page.
    """

    def __init__(
        self,
        config: ModelConfig,
        trunk: nnx.State[Any, Any],
        *,
        pool: Pool,
        store: PageStore | None = None,
        manager: CacheManager | None = None,
    ) -> None:
        self.config = config
        self.trunk = trunk
        self.store = store
        self.manager = manager
        self.handle = np.int32(register(manager) if manager else 0)
        self.statistics = manager.statistics if manager else _resident_statistics(config)
        self._pool = pool
        self.cpu_experts = manager.cpu_experts if manager else None
        self._running = threading.Lock()
        self._warm: set[Hashable] = set()

    @property
    def pool(self) -> Pool:
        """The device pages. Every pass donates them: do not keep a reference over one."""
        return self._pool

    def generate(self, prompts: Sequence[Sequence[int]], decoding: DecodingConfig) -> list[Result]:
        """Decodes a batch of prompts (token ids). Raises as `stream` does."""
        results: dict[int, Result] = {}
        for event in self.stream(prompts, decoding):
            if isinstance(event, FinishEvent):
                results[event.row] = event.result
        return [results[row] for row in range(len(prompts))]

    def stream(self, prompts: Sequence[Sequence[int]], decoding: DecodingConfig) -> Iterator[Event]:
        """Decodes a batch of prompts and yields what happens as it happens.

        Raises:
          UsageError: a token id lies outside the vocabulary.
          RuntimeError: another run of this engine has not ended, or a pass failed (the engine can be used again).
          Exception: whatever a policy raised, as itself.
        """
        self._check_ids(prompts, decoding)
        with self._alone():
            if self.manager is not None:
                for prompt in prompts:
                    self._stage(self.manager.begin_request(np.asarray(prompt, np.int32)))
            session = Session(self, prompts, decoding)
            yield from BlockDiffusion(session, decoding).run(prompts)

    def close(self) -> None:
        """Ends the threads of the CPU backend. The engine cannot be used afterwards."""
        if self.cpu_experts is not None:
            self.cpu_experts.close()

    def run_pass(
        self, info: PassInfo, inputs: PassInputs, cache: KVCache, block_length: int
    ) -> tuple[KVCache, jax.Array]:
        """One forward pass, complete when this returns.

        Returns:
          the cache, and the hidden states [B, T, D].
        """
        spare = self.manager.spare if self.manager else None
        uses_cpu = self.cpu_experts is not None and info.kind is not PassKind.PREFILL
        if self.manager is not None:
            self.manager.begin_pass(info)
        spec = PassSpec(config=self.config, block_length=block_length, spare=spare, uses_cpu=uses_cpu)
        layers = self.store.layers if self.store else ()
        try:
            self._pool, cache, outputs = forward_pass(spec, self.trunk, layers, self._pool, cache, inputs)
            jax.block_until_ready((self._pool, cache, outputs))
        except BaseException:
            self._rebuild_pool()
            raise
        if self.manager is not None:
            self.manager.raise_failure()
        else:
            self._count_routes(info, outputs.routes)
        return cache, outputs.hidden

    @contextmanager
    def warm_up(self, kind: PassKind, shape: Hashable) -> Iterator[bool]:
        """Passes inside compile programs of this shape and are planned and counted by nobody.

        Yields:
          whether this is the first time for this kind of pass and shape.
        """
        cold = (kind, shape) not in self._warm
        manager, statistics = self.manager, self.statistics
        self.statistics = _resident_statistics(self.config)
        if manager is not None:
            manager.idle = True
        try:
            yield cold
        finally:
            self.statistics = statistics
            if manager is not None:
                manager.idle = False
        self._warm.add((kind, shape))

    def begin_block(self) -> None:
        """Some row enters a new block."""
        if self.manager is not None:
            self._stage(self.manager.begin_block())

    def end_iteration(self, outcome: IterationOutcome) -> None:
        """A pass is over and the decoder has acted."""
        if self.manager is not None:
            self._stage(self.manager.end_iteration(outcome))

    def _stage(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Carries out the manager's staging, layer by layer, in order within a layer."""
        if not moves or self.store is None:
            return
        width = self.config.num_experts
        for layer in sorted({layer for layer, _, _ in moves}):
            mine = [(expert, slot) for at, expert, slot in moves if at == layer]
            table = np.zeros((2, max(width, len(mine))), np.int32)
            table[:, : len(mine)] = np.transpose(mine)
            self._pool = stage_pages(self._pool, self.store.layers[layer], *table, np.int32(len(mine)))

    def _count_routes(self, info: PassInfo, routes: Iterable[jax.Array]) -> None:
        """Every page is resident: each activated expert is a hit."""
        E = self.config.num_experts
        for layer, ids in enumerate(routes):
            used = np.asarray(ids)[info.token_mask]
            activated = int(np.count_nonzero(np.bincount(used.ravel(), minlength=E)))
            self.statistics.add(info.kind, layer, activated=activated, hits=activated, capacity=E)

    def _rebuild_pool(self) -> None:
        """A pass that raised has consumed the donated pool; without a store its pages cannot be had again."""
        if self.manager is None or not any(array.is_deleted() for array in self._pool):
            return
        self.manager.forget()
        slots, hidden = self._pool.gate_up.shape[0], self.config.hidden_size
        self._pool = empty_pool(slots, hidden, self.config.moe_intermediate_size, jnp.dtype(self.config.dtype))

    def _check_ids(self, prompts: Sequence[Sequence[int]], decoding: DecodingConfig) -> None:
        V = self.config.vocab_size
        for row, prompt in enumerate(prompts):
            outside = [token for token in prompt if not 0 <= token < V]
            if outside:
                raise UsageError(f"prompt {row}: token id {outside[0]} is outside the vocabulary of {V}")
        if decoding.mask_id >= V:
            raise UsageError(f"mask_id {decoding.mask_id} is outside the vocabulary of {V}")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._running.acquire(blocking=False):
            raise RuntimeError("this engine is already generating: finish or close that run first, or load another")
        try:
            yield
        finally:
            self._running.release()


def _resident_statistics(config: ModelConfig) -> CacheStatistics:
    return CacheStatistics(num_layers=config.num_moe_layers, num_experts=config.num_experts, page_bytes=0)


def load_resident(config: ModelConfig, source: WeightSource) -> Engine:
    """An engine whose pool holds every page (policy `all`): no store, no manager, no callbacks.

    Args:
      config: the model; its dtype is what the weights are cast to.
      source: the weights.
    """
    trunk = _load_trunk(config, source)
    L, E, D, F = config.num_moe_layers, config.num_experts, config.hidden_size, config.moe_intermediate_size
    dtype = jnp.dtype(config.dtype)
    pool = empty_pool(L * E, D, F, dtype)
    staging = aligned_empty((E, 2 * F, D), dtype), aligned_empty((E, D, F), dtype)
    for layer in range(L):
        source.read_pages(layer, *staging)
        # The staging arrays are filled anew for the next layer, so this copy must be complete before.
        pool = jax.block_until_ready(fill_pool(pool, *staging, np.int32(layer * E)))
    source.check_finite()
    return Engine(config, trunk, pool=pool)


def load_offloaded(
    config: ModelConfig,
    source: WeightSource,
    policy: Policy,
    *,
    spare: int = DEFAULT_SPARE,
    cpu_backend: str | None = None,
    cpu_threads: int | None = None,
) -> Engine:
    """An engine that pages experts between host and device under a policy.

    Args:
      config: the model; its dtype is what the weights are cast to.
      source: the weights.
      policy: built for this model and capacity.
      spare: slots beyond the capacity that transfers land in.
      cpu_backend: what computes the misses that the policy leaves to the CPU, see `make_cpu_experts`.
      cpu_threads: its worker threads; None: the backend's default.
    """
    trunk = _load_trunk(config, source)
    L, E, D, F = config.num_moe_layers, config.num_experts, config.hidden_size, config.moe_intermediate_size
    dtype = jnp.dtype(config.dtype)
    store = allocate_store(L, E, D, F, dtype)
    for layer in range(L):
        source.read_pages(layer, *store.views(layer))
    source.check_finite()
    cpu_experts = None
    if cpu_backend is not None:
        cpu_experts = make_cpu_experts(cpu_backend, [store.views(layer) for layer in range(L)], threads=cpu_threads)
    page_bytes = config.page_parameters * dtype.itemsize
    manager = CacheManager(policy, spare=spare, page_bytes=page_bytes, cpu_experts=cpu_experts)
    pool = empty_pool(manager.residency.num_slots, D, F, dtype)
    return Engine(config, trunk, pool=pool, store=store, manager=manager)


def _load_trunk(config: ModelConfig, source: WeightSource) -> nnx.State[Any, Any]:
    _, state = assemble(config, source.read_trunk(jnp.dtype(config.dtype)))
    return jax.device_put(state, jax.local_devices()[0])
