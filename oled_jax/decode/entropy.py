"""RND1's acceptance rules: what the model is least uncertain of is written first (REFERENCE section 10).

Pure NumPy over one row, like the rules in `unmask.py`. The whole text is the row's only block.
"""

import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float32

from oled_jax.config import DecodingConfig
from oled_jax.decode.unmask import Acceptance, BlockState


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntropyRule:
    """A schedule says how many masks stay; those of highest entropy do.

    After step t of `steps` the share 1 - t / steps of all masks is left. A step whose share keeps every mask takes
    no pass: it would see the same tokens again. So there are at most min(steps, masks) passes.
    """

    mask_id: int
    steps: int
    tokens_are_final: ClassVar[bool] = True

    @classmethod
    def from_config(cls, config: DecodingConfig) -> "EntropyRule":
        return cls(mask_id=config.mask_id, steps=config.steps)

    def accept(self, state: BlockState) -> Acceptance:
        masked = state.tokens == self.mask_id
        left = int(np.count_nonzero(masked))
        count = left - self._kept(state.to_fill, left)
        filled = lowest(masked, entropy_of(state), count)
        return Acceptance(
            mask_transfer=filled,
            edit_transfer=np.zeros_like(masked),
            num_to_transfer=count,
            done=bool((filled == masked).all()),
        )

    def _kept(self, total: int, left: int) -> int:
        """The largest share of `total` that is smaller than `left`; float32, as the reference has it."""
        shares = np.float32(total) * (np.arange(self.steps) / self.steps).astype(np.float32)
        smaller = shares.astype(np.int64)
        return int(smaller[smaller < left].max(initial=0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntropyBoundRule:
    """The likeliest tokens are written together, as many as keep their joint uncertainty within a bound.

    By falling probability, while the sum of the entropies so far less the largest of them is at most `bound`: at
    least one in every pass. The last of `steps` passes writes what is left.
    """

    mask_id: int
    steps: int
    bound: float
    tokens_are_final: ClassVar[bool] = True

    @classmethod
    def from_config(cls, config: DecodingConfig) -> "EntropyBoundRule":
        return cls(mask_id=config.mask_id, steps=config.steps, bound=config.entropy_bound)

    def accept(self, state: BlockState) -> Acceptance:
        masked = state.tokens == self.mask_id
        filled = masked if state.step >= self.steps - 1 else self._within_bound(state, masked)
        return Acceptance(
            mask_transfer=filled.copy(),
            edit_transfer=np.zeros_like(masked),
            num_to_transfer=1,
            done=bool((filled == masked).all()),
        )

    def _within_bound(self, state: BlockState, masked: Bool[np.ndarray, " T"]) -> Bool[np.ndarray, " T"]:
        order = np.flatnonzero(masked)
        order = order[np.argsort(-state.confidence[order], kind="stable")]
        entropy = entropy_of(state)[order]
        joint = np.cumsum(entropy) - np.maximum.accumulate(entropy)
        filled = np.zeros_like(masked)
        filled[order[joint <= np.float32(self.bound)]] = True
        return filled


def entropy_of(state: BlockState) -> Float32[np.ndarray, " T"]:
    """The entropies, which only passes over whole texts compute."""
    if state.entropy is None:
        raise RuntimeError("this acceptance rule needs the entropy of every position")
    return state.entropy


def lowest(masked: Bool[np.ndarray, " T"], values: Float32[np.ndarray, " T"], count: int) -> Bool[np.ndarray, " T"]:
    """The `count` masked positions of lowest value; equal values: the lowest index goes first."""
    ranked = np.lexsort((values, ~masked))  # the last key is the primary one; the sort is stable
    chosen = np.zeros_like(masked)
    chosen[ranked[:count]] = True
    return chosen
