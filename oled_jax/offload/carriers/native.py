"""The native carrier: the compiled pager does what the portable carrier does by callbacks and in the graph.

The program calls three functions of the extension (csrc/pager.cc). `route` brings the router's result to host memory
on XLA's stream, asks the manager, and puts the plan and the first pages on the way; `land` makes XLA's stream wait for
a round's pages; `collect` adds the CPU's share. Pages move on a stream of their own, beside the arithmetic, and XLA
never sees them arrive: a program's pool is one value from `route` on, and the order of computing is held by `out`.

The calls are not declared to have side effects: what they return is used, so XLA keeps each of them, and a declared
effect would leave a token behind that raises once more, when Python ends, after a failed pass.

On the CPU platform "device" memory is host memory and pages are copied by the CPU.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from oled_jax.native import UNAVAILABLE, extension
from oled_jax.offload.carriers.base import Compute, InPlan, Plan
from oled_jax.offload.carriers.portable import pack
from oled_jax.offload.manager import CacheManager
from oled_jax.offload.plan import PlanLayout
from oled_jax.offload.pool import Pool
from oled_jax.offload.schedule import Move, by_layer
from oled_jax.offload.store import PageStore

# The fields that the pager reads, in the order of PlanOffsets in csrc/pager.h.
PLAN_FIELDS = (
    "num_rounds", "cpu_pairs", "hit_end", "transfer_end", "item_end", "transfer_expert", "transfer_slot", "item_slot",
    "prefetch_count", "prefetch_layer", "prefetch_expert", "prefetch_slot",
)  # fmt: skip

if extension is not None:
    for _platform, _targets in extension.ffi_targets().items():
        for _name, _target in _targets.items():
            jax.ffi.register_ffi_target(_name, _target, platform=_platform)


class NativeCarrier:
    """Carrier of one trace of one program.

    Args:
      uses_cpu: the policy may leave experts to the CPU in this pass. Only then do hidden states go to the host.
    """

    def __init__(self, *, uses_cpu: bool) -> None:
        self.uses_cpu = uses_cpu

    def route(
        self,
        layer: int,
        x: Float[Array, "N D"],
        ids: Int[Array, "N K"],
        gates: Float[Array, "N K"],
        pool: Pool,
        layout: PlanLayout,
    ) -> tuple[Pool, Plan]:
        results = (*map(_like, pool), jax.ShapeDtypeStruct((layout.size,), jnp.int32))
        call = jax.ffi.ffi_call("oled_jax_route", results, input_output_aliases={1: 0, 2: 1})
        offsets = np.array([layout.slices[name].start for name in PLAN_FIELDS], np.int64)
        hidden = (x,) if self.uses_cpu else ()
        *arrays, flat = call(pack(ids, gates), *pool, *hidden, layer=np.int32(layer), offsets=offsets)
        return Pool(*arrays), Plan(flat, layout)

    def carry_out(
        self, layer: int, plan: Plan, pool: Pool, out: Float[Array, "I R D"], compute: Compute
    ) -> tuple[Pool, Float[Array, "I R D"]]:
        def turns(state: tuple[Int[Array, ""], Array]) -> Bool[Array, ""]:
            return state[0] < plan.entry("early_rounds", 0)

        def early_round(state: tuple[Int[Array, ""], Array]) -> tuple[Int[Array, ""], Array]:
            index, out = state
            # The first computes the hits, too: a later one may move pages into their slots.
            first = jnp.where(index > 0, plan.entry("item_end", index - 1), 0)
            return index + 1, compute((first, plan.entry("item_end", index)), pool, _land(out, pool))

        # The host must know how often a loop turns and waits for the device to say it: that takes least now, while the
        # device has nothing to do. Then the host runs ahead of the device. Nearly always one round is all there is, and
        # the loop does not turn: its pages move while the hits are computed.
        _, out = jax.lax.while_loop(turns, early_round, (jnp.int32(0), out))
        out = compute(InPlan("late_items"), pool, out)
        return pool, compute(InPlan("late_items", 1), pool, _land(out, pool))

    def add_cpu_share(self, layer: int, plan: Plan, pool: Pool, total: Float32[Array, "N D"]) -> Float32[Array, "N D"]:
        if not self.uses_cpu:
            return total
        call = jax.ffi.ffi_call("oled_jax_collect", _like(total))
        # Taking `total` makes the wait for the CPU come after the device's own work is on its way.
        share = call(total, pool.gate_up, layer=np.int32(layer))
        # Adding zeros is not the identity (-0.0 + 0.0 is 0.0).
        return jnp.where(plan.entry("cpu_pairs", 0) > 0, total + share, total)


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _land(out: Float[Array, "I R D"], pool: Pool) -> Float[Array, "I R D"]:
    """`out`, from now on with the pages of the next round in the pool."""
    call = jax.ffi.ffi_call("oled_jax_land", _like(out), input_output_aliases={0: 0})
    return call(out, pool.gate_up)


class NativeMover:
    """The pager of one engine. It can be had only where `unusable` finds nothing."""

    name: ClassVar[str] = "native"
    overlaps: ClassVar[bool] = True

    def __init__(self, store: PageStore, manager: CacheManager | None = None) -> None:
        if extension is None:
            raise RuntimeError(unusable())
        device = jax.local_devices()[0]
        gate_up, down = store.layers[0]
        self.handle = np.int32(0)
        self.operands: Sequence[Pool] = ()
        self._store = store  # the pager reads its memory
        self._pager = extension.Pager(
            platform=device.platform,
            device=device.local_hardware_id or 0,
            store=[tuple(array.unsafe_buffer_pointer() for array in layer) for layer in store.layers],
            gate_up_bytes=gate_up.nbytes // gate_up.shape[0],
            down_bytes=down.nbytes // down.shape[0],
            manager=manager,
            dtype=gate_up.dtype,
        )

    @property
    def statistics(self) -> dict[str, Any]:
        """Microseconds and bytes since the start, see PagerStatistics in csrc/pager.h."""
        return self._pager.statistics()

    def attach(self, pool: Pool) -> None:
        addresses = (array.unsafe_buffer_pointer() for array in jax.block_until_ready(pool))
        self._pager.attach(*addresses, slots=pool.gate_up.shape[0])

    def stage(self, pool: Pool, moves: Sequence[Move]) -> Pool:
        for layer, experts, slots in by_layer(moves):
            self._pager.stage(layer, experts, slots)
        return pool

    def drain(self, pool: Pool) -> None:
        self._pager.drain()

    def reset(self) -> None:
        self._pager.reset()


def unusable() -> str:
    """Why the native carrier cannot run here; empty if it can."""
    if extension is None:
        return f"the compiled extension is missing ({UNAVAILABLE})"
    platform = jax.local_devices()[0].platform
    return "" if platform in ("gpu", "cpu") else f"it serves CUDA devices, not {platform}"
