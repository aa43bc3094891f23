"""The pool: device arrays that hold resident pages, one slot per page, for all layers together.

The pool is donated to every pass and updated in place. In one layer all writes of a round precede its reads in one
chain of values: an update that follows a read of the same value would make XLA copy the whole pool.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from oled_jax.ops.loops import keep_narrow

# Pages moved by one turn of the copy loop: each turn waits for the host once.
UNROLLED = 4


class Pool(NamedTuple):
    """gate_up: gate rows, then up rows. down: Hugging Face orientation, [out, in]."""

    gate_up: Float[Array, "C G D"]
    down: Float[Array, "C D F"]


def empty_pool(num_slots: int, hidden: int, width: int, dtype: jnp.dtype) -> Pool:
    """A pool of zeros. hidden: D, width: F.

    Committed to the device, as what a pass returns is: else the second pass would compile anew.
    """
    device = jax.local_devices()[0]
    shapes = (num_slots, 2 * width, hidden), (num_slots, hidden, width)
    return Pool(*(jax.device_put(jnp.zeros(shape, dtype), device) for shape in shapes))


def fetch(
    pool: Pool,
    pages: Pool,
    experts: Int[Array, " M"],
    slots: Int[Array, " M"],
    begin: Int[Array, ""],
    end: Int[Array, ""],
) -> Pool:
    """Copies pages of one layer's store into their slots.

    Args:
      pool: the pool, updated in place where it is donated.
      pages: the layer's two store arrays, [E, 2F, D] and [E, D, F], in host memory.
      experts, slots: page i goes from experts[i] to slots[i], for begin <= i < end.
    """

    def move(index: Int[Array, ""], pool: Pool) -> Pool:
        moved = []
        sources, pool, index = keep_narrow((pages, pool, index))
        for source, target in zip(sources, pool, strict=True):
            page = jax.lax.dynamic_index_in_dim(source, experts[index], keepdims=False)
            page = jax.device_put(page, jax.memory.Space.Device)
            moved.append(jax.lax.dynamic_update_index_in_dim(target, page, slots[index], 0))
        return Pool(*moved)

    def move_several(group: Int[Array, ""], pool: Pool) -> Pool:
        for offset in range(UNROLLED):
            pool = move(begin + group * UNROLLED + offset, pool)
        return pool

    groups = (end - begin) // UNROLLED
    pool = jax.lax.fori_loop(0, groups, move_several, pool)
    return jax.lax.fori_loop(begin + groups * UNROLLED, end, move, pool)


@functools.partial(jax.jit, donate_argnames="pool")
def stage_pages(
    pool: Pool, pages: Pool, experts: Int32[Array, " M"], slots: Int32[Array, " M"], count: Int32[Array, ""]
) -> Pool:
    """Copies pages of one layer into their slots, between passes."""
    return fetch(pool, pages, experts, slots, jnp.zeros_like(count), count)
