"""The portable carrier: `io_callback` to the manager, `device_put` in the graph. Works on every backend.

The callbacks are module-level functions that take an engine handle and look the manager up: a closed-over manager
would be part of the program's identity, and every engine would compile anew. No JAX call happens inside a callback.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Float, Float32, Int

from oled_jax.offload.carriers.base import Compute, Plan
from oled_jax.offload.manager import CacheManager
from oled_jax.offload.plan import PlanLayout
from oled_jax.offload.pool import Pool, fetch, stage_pages
from oled_jax.offload.schedule import Move, by_layer
from oled_jax.offload.store import PageStore

_managers: "weakref.WeakValueDictionary[int, CacheManager]" = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def pack(ids: Int[Array, "N K"], gates: Float[Array, "N K"]) -> Int[Array, "N K2"]:
    """The router's result as one array, as `CacheManager.on_route` takes it."""
    return jnp.concatenate([ids, jax.lax.bitcast_convert_type(gates, jnp.int32)], axis=-1)


def _route(handle: jax.Array, layer: jax.Array, packed: jax.Array, *hidden: jax.Array) -> np.ndarray:
    manager = _managers[int(np.asarray(handle))]
    return manager.on_route(int(np.asarray(layer)), np.asarray(packed), *(np.asarray(x) for x in hidden))


def _collect(handle: jax.Array, layer: jax.Array, total: jax.Array) -> np.ndarray:
    return _managers[int(np.asarray(handle))].collect(int(np.asarray(layer)), total.shape)


class PortableCarrier:
    """Carrier of one trace of one program.

    Args:
      handle: of the manager, an int32 operand of the program.
      store: pages per MoE layer, operands of the program.
      uses_cpu: the policy may leave experts to the CPU in this pass. Only then do hidden states go to the host.
    """

    def __init__(self, handle: Int[Array, ""], store: Sequence[Pool], *, uses_cpu: bool) -> None:
        self.handle = handle
        self.store = store
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
        result = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        operands = (self.handle, np.int32(layer), pack(ids, gates), *((x,) if self.uses_cpu else ()))
        return pool, Plan(io_callback(_route, result, *operands, ordered=False), layout)

    def carry_out(
        self, layer: int, plan: Plan, pool: Pool, out: Float[Array, "I R D"], compute: Compute
    ) -> tuple[Pool, Float[Array, "I R D"]]:
        def one_round(index: Int[Array, ""], state: tuple[Pool, Array]) -> tuple[Pool, Array]:
            pool, out = state
            previous = jnp.maximum(index - 1, 0)
            first_transfer = jnp.where(index > 0, plan["transfer_end"][previous], 0)
            first_item = jnp.where(index > 0, plan["item_end"][previous], 0)
            moves = plan["transfer_expert"], plan["transfer_slot"], first_transfer, plan["transfer_end"][index]
            pool = fetch(pool, self.store[layer], *moves)
            return pool, compute((first_item, plan["item_end"][index]), pool, out)

        pool, out = jax.lax.fori_loop(0, plan["num_rounds"][0], one_round, (pool, out))
        if layer + 1 < len(self.store):
            # All of them are the next layer's: the manager holds others back.
            count = plan["prefetch_count"][0]
            moves = plan["prefetch_expert"], plan["prefetch_slot"], jnp.zeros_like(count), count
            pool = fetch(pool, self.store[layer + 1], *moves)
        return pool, out

    def add_cpu_share(self, layer: int, plan: Plan, pool: Pool, total: Float32[Array, "N D"]) -> Float32[Array, "N D"]:
        if not self.uses_cpu:
            return total

        def collect(total: Float32[Array, "N D"]) -> Float32[Array, "N D"]:
            # Taking `total` makes the wait for the CPU come after the device's own work, not before it.
            result = jax.ShapeDtypeStruct(total.shape, total.dtype)
            return total + io_callback(_collect, result, self.handle, np.int32(layer), total, ordered=False)

        return jax.lax.cond(plan["cpu_pairs"][0] > 0, collect, _unchanged, total)


def _unchanged(total: Float32[Array, "N D"]) -> Float32[Array, "N D"]:
    return total


class PortableMover:
    """Stages pages by a small jitted program on the donated pool."""

    name: ClassVar[str] = "portable"
    overlaps: ClassVar[bool] = False

    def __init__(self, store: PageStore, manager: CacheManager | None = None) -> None:
        self.handle = np.int32(next(_handles))
        self.operands: Sequence[Pool] = store.layers
        if manager is not None:
            _managers[int(self.handle)] = manager

    def attach(self, pool: Pool) -> None:
        """Programs are given the pool."""

    def stage(self, pool: Pool, moves: Sequence[Move]) -> Pool:
        width = self.operands[0].gate_up.shape[0]
        for layer, experts, slots in by_layer(moves):
            # A fixed width: one program serves every number of pages.
            table = np.zeros((2, max(width, len(slots))), np.int32)
            table[:, : len(slots)] = experts, slots
            pool = stage_pages(pool, self.operands[layer], *table, np.int32(len(slots)))
        return pool

    def drain(self, pool: Pool) -> None:
        jax.block_until_ready(pool)

    def reset(self) -> None:
        """Nothing moves outside a program."""
