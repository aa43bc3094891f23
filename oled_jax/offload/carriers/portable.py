"""The portable carrier: `io_callback` to the manager, `device_put` in the graph. Works on every backend.

The callbacks are module-level functions that take an engine handle and look the manager up: a closed-over manager
would be part of the program's identity, and every engine would compile anew. No JAX call happens inside a callback.
"""

import itertools
import weakref
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Float, Float32, Int

from oled_jax.offload.manager import CacheManager
from oled_jax.offload.plan import PlanLayout
from oled_jax.offload.pool import Pool, fetch

_managers: "weakref.WeakValueDictionary[int, CacheManager]" = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def register(manager: CacheManager) -> int:
    """A handle for programs to carry. It is good as long as the manager lives."""
    handle = next(_handles)
    _managers[handle] = manager
    return handle


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
        layout: PlanLayout,
    ) -> dict[str, Int[Array, "..."]]:
        packed = jnp.concatenate([ids, jax.lax.bitcast_convert_type(gates, jnp.int32)], axis=-1)
        result = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        operands = (self.handle, np.int32(layer), packed, *((x,) if self.uses_cpu else ()))
        return layout.fields(io_callback(_route, result, *operands, ordered=False))

    def fetch(
        self,
        layer: int,
        pool: Pool,
        experts: Int[Array, " M"],
        slots: Int[Array, " M"],
        begin: Int[Array, ""],
        end: Int[Array, ""],
    ) -> Pool:
        return fetch(pool, self.store[layer], experts, slots, begin, end)

    def add_cpu_share(
        self, layer: int, cpu_pairs: Int[Array, ""], total: Float32[Array, "N D"]
    ) -> Float32[Array, "N D"]:
        if not self.uses_cpu:
            return total

        def collect(total: Float32[Array, "N D"]) -> Float32[Array, "N D"]:
            # Taking `total` makes the wait for the CPU come after the device's own work, not before it.
            result = jax.ShapeDtypeStruct(total.shape, total.dtype)
            return total + io_callback(_collect, result, self.handle, np.int32(layer), total, ordered=False)

        return jax.lax.cond(cpu_pairs > 0, collect, _unchanged, total)


def _unchanged(total: Float32[Array, "N D"]) -> Float32[Array, "N D"]:
    return total
