"""A pass over two blocks of a row: one that is final, whose keys and values it stores, and the one that follows.

So a finished block needs no commit pass of its own: attention is causal between blocks, and every layer writes keys and
values before it reads them, so the new block sees what a commit pass would have left. Where some row of a batch folds,
the pass is two blocks wide for all: [finished block | its own] where a row folds, [its own | nothing] where not.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Shaped


def place_blocks(
    folds: Bool[np.ndarray, " B"], own: Shaped[np.ndarray, "B T"], *, finished: Any, empty: Any
) -> Shaped[np.ndarray, "B _"]:
    """Values of a pass's positions, [B, 2T]; `own` itself if no row folds.

    Args:
      folds: rows that take in the block before their own.
      own: values of each row's own block.
      finished: those of the blocks before, [B, T], or one for all of them.
      empty: of positions that hold nothing.
    """
    if not folds.any():
        return own
    B, T = own.shape
    placed = np.full((B, 2 * T), empty, own.dtype)
    placed[~folds, :T] = own[~folds]
    placed[folds, T:] = own[folds]
    placed[folds, :T] = np.broadcast_to(finished, own.shape)[folds]
    return placed


def own_blocks(folds: Bool[jax.Array, " B"] | None, values: Shaped[jax.Array, "B _ ..."]) -> Shaped[jax.Array, "B _ ..."]:
    """What `place_blocks` got as `own`, of values per position; all of them if `folds` is None."""
    if folds is None:
        return values
    first, second = jnp.split(values, 2, axis=1)
    return jnp.where(folds.reshape(-1, *(1,) * (values.ndim - 1)), second, first)
