"""Sorting (token, k) pairs by the expert that computes them, into work items of a fixed number of rows.

One function for both worlds: the cache manager calls it with NumPy, a program without callbacks with jax.numpy.
"""

import dataclasses
import functools
import types
from typing import Any

import numpy as np

MAX_ROWS_PER_ITEM = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemShape:
    """Work items of a pass over N tokens: each is one page and `rows` rows of tokens.

    `rows` depends on the shape of the pass only, so that a row's arithmetic never depends on how many pages are
    active (docs/design.md, "Lossless").
    """

    num_tokens: int
    top_k: int
    num_experts: int

    @functools.cached_property
    def rows(self) -> int:
        return min(self.num_tokens, MAX_ROWS_PER_ITEM)

    @property
    def direct(self) -> bool:
        """An item holds every token of the pass, row = token: then nothing needs to be gathered."""
        return self.num_tokens <= MAX_ROWS_PER_ITEM

    @property
    def pairs(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def max_items(self) -> int:
        """Most items any routing can need: every activated expert wastes less than one item."""
        used = min(self.num_experts, self.pairs)
        return used if self.direct else used + self.pairs // self.rows


def group_pairs(keys: Any, num_keys: int, shape: ItemShape, xp: types.ModuleType = np) -> tuple[Any, Any]:
    """Gives each pair its row among work items.

    Args:
      keys: [P] int, the key (an expert, numbered in execution order) of each pair; num_keys for a pair that no item
        computes. A token's pairs have different keys.
      num_keys: number of keys.
      shape: of the pass.
      xp: numpy or jax.numpy.

    Returns:
      pair_row: [P] int32, item * rows + row within the item; -1 for a pair that no item computes.
      items: [num_keys] int32, number of items of each key; a key's items are consecutive, keys ascending.
    """
    P = shape.pairs
    counts = xp.bincount(keys, minlength=num_keys + 1, **({} if xp is np else {"length": num_keys + 1}))
    items = (counts[:num_keys] > 0).astype(counts.dtype) if shape.direct else -(-counts[:num_keys] // shape.rows)
    first_item = xp.concatenate([xp.cumsum(items) - items, xp.zeros(1, items.dtype)])
    within = xp.arange(P) // shape.top_k if shape.direct else _rank(keys, counts, xp)
    pair_row = xp.where(keys < num_keys, first_item[keys] * shape.rows + within, -1)
    return pair_row.astype(np.int32), items.astype(np.int32)


def _rank(keys: Any, counts: Any, xp: types.ModuleType) -> Any:
    """[P] how many earlier pairs have the same key."""
    first_pair = xp.cumsum(counts) - counts
    order = xp.argsort(keys, stable=True)
    rank_in_order = xp.arange(keys.shape[0]) - first_pair[keys[order]]
    return rank_in_order[xp.argsort(order)]
