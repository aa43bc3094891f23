"""Work items inside a program, for a pool that holds every page: `grouping` without the host."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from oled_jax.ops.grouping import ItemShape, group_pairs


def expert_items(keys: Int[Array, " P"], shape: ItemShape) -> tuple[Int[Array, " P"], Int[Array, " I"], Int[Array, ""]]:
    """`group_pairs` inside a program, where a key is an expert: pair_row, the expert of each item, number of items.

    Beyond that number the experts mean nothing. Where an item holds every token, comparisons take the place of
    counting and sorting: four small kernels on a GPU instead of some twenty, of which each costs a launch.
    """
    E = shape.num_experts
    experts = jnp.arange(E, dtype=jnp.int32)
    if not shape.direct:
        pair_row, items = group_pairs(keys, E, shape, jnp)
        return pair_row, jnp.repeat(experts, items, total_repeat_length=shape.max_items), items.sum()
    active = (keys[:, None] == experts).any(axis=0)
    item = jnp.where(active & (experts < experts[:, None]), 1, 0).sum(axis=1)  # how many active experts come before
    token = jnp.arange(shape.pairs, dtype=jnp.int32) // shape.top_k
    pair_row = jnp.where(keys < E, item[jnp.minimum(keys, E - 1)] * shape.rows + token, -1)
    places = jnp.arange(shape.max_items)[:, None]
    item_expert = jnp.where(active & (item == places), experts, 0).sum(axis=1)
    return pair_row.astype(jnp.int32), item_expert.astype(jnp.int32), active.sum()
