"""Sorting (token, k) pairs by the expert that computes them, into work items of a fixed number of rows.

One function for both worlds: the cache manager calls it with NumPy, a program without callbacks with jax.numpy.
"""

import dataclasses
import types
from typing import Any

import numpy as np

MAX_ROWS_PER_ITEM = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemShape:
    """Work items of a pass over N tokens: each is one page and up to `rows` (token, k) pairs.

    `rows` depends on the shape of the pass only, so that a row's arithmetic never depends on how many pages are
    active (docs/design.md, "Lossless").
    """

    num_tokens: int
    top_k: int
    num_experts: int

    @property
    def rows(self) -> int:
        return min(self.num_tokens, MAX_ROWS_PER_ITEM)

    @property
    def pairs(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def max_items(self) -> int:
        """Most items any routing can need: every activated expert wastes less than one item."""
        return min(self.num_experts, self.pairs) + self.pairs // self.rows


def group_pairs(keys: Any, num_keys: int, rows: int, xp: types.ModuleType = np) -> tuple[Any, Any]:
    """Gives each pair its row among work items.

    Args:
      keys: [P] int, the key (an expert, numbered in execution order) of each pair; num_keys for a pair that no item
        computes.
      num_keys: number of keys.
      rows: rows of an item. All pairs of an item have the same key; a key's items are consecutive, keys ascending.
      xp: numpy or jax.numpy.

    Returns:
      pair_row: [P] int32, item * rows + row within the item; -1 for a pair that no item computes.
      items: [num_keys] int32, number of items of each key.
    """
    P = keys.shape[0]
    counts = xp.bincount(keys, minlength=num_keys + 1, **({} if xp is np else {"length": num_keys + 1}))
    items = -(-counts[:num_keys] // rows)
    first_item = xp.concatenate([xp.cumsum(items) - items, xp.zeros(1, items.dtype)])
    first_pair = xp.cumsum(counts) - counts
    order = xp.argsort(keys, stable=True)
    sorted_keys = keys[order]
    within = xp.arange(P) - first_pair[sorted_keys]
    sorted_row = xp.where(sorted_keys < num_keys, first_item[sorted_keys] * rows + within, -1)
    pair_row = sorted_row[xp.argsort(order)]
    return pair_row.astype(np.int32), items.astype(np.int32)
