"""A pass over two blocks of a row: one that is final, whose keys and values it stores, and the one that follows.

So a finished block needs no commit pass of its own: attention is causal between blocks, and every layer writes keys and
values before it reads them, so the new block sees what a commit pass would have left. Where some row of a batch folds,
the pass is two blocks wide for all: [finished block | its own] where a row folds, [its own | nothing] where not.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Shaped

from oled_jax.passes import PassKind

Index = slice | Bool[np.ndarray, " N"]  # of values of a pass's tokens
EVERYWHERE = slice(None)


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


def own_tokens(folds: Bool[np.ndarray, " B"] | None, size: int) -> Index:
    """Where the rows' own blocks are among the `size` tokens of a pass; None: it is one block wide."""
    return EVERYWHERE if folds is None else _halves(~folds, folds, size)


def first_tokens(folds: Bool[np.ndarray, " B"] | None, size: int) -> Index:
    """Where the blocks are that were the rows' own in the pass before, finished or not."""
    return EVERYWHERE if folds is None else _halves(np.ones_like(folds), np.zeros_like(folds), size)


def _halves(first: np.ndarray, second: np.ndarray, size: int) -> Bool[np.ndarray, " N"]:
    return np.repeat(np.stack([first, second], axis=1).ravel(), size // first.size // 2)


def find_folds(
    block_length: int, token_mask: Bool[np.ndarray, " N"], rows: int, kind: PassKind
) -> Bool[np.ndarray, " B"] | None:
    """Which rows of a recorded pass fold; None if it is one block wide, or none over blocks (block length 0)."""
    if kind is PassKind.PREFILL or block_length == 0 or token_mask.size != rows * 2 * block_length:
        return None
    return np.any(token_mask.reshape(rows, 2, block_length)[:, 1], axis=1)
