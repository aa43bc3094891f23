"""Acceptance rules: which predicted tokens of a block are written after a pass, and when the block is done.

Pure NumPy over the block of one row, no state: a rule is a frozen object with one method, `accept`. A new
rule is a class like these and one line in `registry.py`. The loop that calls them is in `block_diffusion.py`,
which also lists where this package departs from the published code on purpose.
"""

import dataclasses
import math
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float32, Int32

from oled_jax.config import DecodingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockState:
    """What a rule sees: one row's block right after a pass over it.

    Attributes:
      tokens: the block as the model saw it.
      predicted: the model's token for every position, never the mask token.
      confidence: the probability of `predicted`.
      is_prompt: positions of the prompt. One that holds the mask token is filled once and then kept.
      step: passes over this block before this one.
      post_steps: passes over this block that began without a mask, this one included.
      to_fill: masks that the block held before its first pass.
      entropy: of what the model says of every position, before top-k and top-p; None where nothing asks for it.
    """

    tokens: Int32[np.ndarray, " T"]
    predicted: Int32[np.ndarray, " T"]
    confidence: Float32[np.ndarray, " T"]
    is_prompt: Bool[np.ndarray, " T"]
    step: int
    post_steps: int
    to_fill: int = 0
    entropy: Float32[np.ndarray, " T"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What a rule decides. `mask_transfer` and `edit_transfer` never overlap; both get the predicted token.

    `num_to_transfer` is the least number of masks the rule wanted to fill. `done`: the block is final.
    """

    mask_transfer: Bool[np.ndarray, " T"]
    edit_transfer: Bool[np.ndarray, " T"]
    num_to_transfer: int
    done: bool


@runtime_checkable
class AcceptanceRule(Protocol):
    """Decides after every pass.

    Attributes:
      tokens_are_final: a written token never changes. Then early stop may end the text inside a block, and an
        eos always ends it after its block. Otherwise only early stop does, once the block is done.
    """

    tokens_are_final: ClassVar[bool]

    def accept(self, state: BlockState) -> Acceptance: ...


def transfer_schedule(block_length: int, steps: int) -> tuple[int, ...]:
    """Tokens to write in each step: an even share, the remainder on the first steps (REFERENCE 6, item 2)."""
    if steps == 0:
        return ()
    share, remainder = divmod(block_length, steps)
    return tuple(share + (step < remainder) for step in range(steps))


def scheduled(schedule: tuple[int, ...], step: int) -> int:
    """Masks to fill in a step: at least one, also after the schedule's end."""
    return max(1, schedule[step]) if step < len(schedule) else 1


def select_masked(
    masked: Bool[np.ndarray, " T"], confidence: Float32[np.ndarray, " T"], threshold: float, count: int
) -> Bool[np.ndarray, " T"]:
    """Every masked position above the threshold, or the `count` most confident if fewer are.

    REFERENCE section 6, item 3.4, and section 7, item 3. The comparison is strict and in float32. Equal
    confidences: the lowest index goes first.
    """
    high = masked & (confidence > np.float32(threshold))
    if np.count_nonzero(high) >= count:
        return high
    ranked = np.lexsort((-confidence, ~masked))  # the last key is the primary one; the sort is stable
    best = np.zeros_like(masked)
    best[ranked[: min(count, np.count_nonzero(masked))]] = True
    return best


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThresholdRule:
    """LLaDA2.0 and SDAR: fill masks by threshold and schedule; a written token stays (REFERENCE 6 and 10).

    Fills at least one mask in every pass, also after the schedule ends, so a block of T positions takes at
    most T passes.
    """

    mask_id: int
    threshold: float
    schedule: tuple[int, ...]
    tokens_are_final: ClassVar[bool] = True

    @classmethod
    def from_config(cls, config: DecodingConfig) -> "ThresholdRule":
        steps = min(config.steps, max(1, config.gen_length // config.minimal_topk))
        schedule = transfer_schedule(config.block_length, steps)
        return cls(mask_id=config.mask_id, threshold=config.threshold, schedule=schedule)

    @classmethod
    def dynamic(cls, config: DecodingConfig) -> "ThresholdRule":
        """SDAR's "low_confidence_dynamic": a short answer does not shorten the schedule."""
        schedule = transfer_schedule(config.block_length, config.steps)
        return cls(mask_id=config.mask_id, threshold=config.threshold, schedule=schedule)

    @classmethod
    def static(cls, config: DecodingConfig) -> "ThresholdRule":
        """SDAR's "low_confidence_static": the schedule alone decides how many."""
        return dataclasses.replace(cls.dynamic(config), threshold=math.inf)

    def accept(self, state: BlockState) -> Acceptance:
        masked = state.tokens == self.mask_id
        count = scheduled(self.schedule, state.step)
        filled = select_masked(masked, state.confidence, self.threshold, count)
        return Acceptance(
            mask_transfer=filled,
            edit_transfer=np.zeros_like(masked),
            num_to_transfer=count,
            done=bool((filled == masked).all()),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequentialRule:
    """SDAR's "sequential": the schedule's number of masks from the left, however sure the model is."""

    mask_id: int
    schedule: tuple[int, ...]
    tokens_are_final: ClassVar[bool] = True

    @classmethod
    def from_config(cls, config: DecodingConfig) -> "SequentialRule":
        return cls(mask_id=config.mask_id, schedule=transfer_schedule(config.block_length, config.steps))

    def accept(self, state: BlockState) -> Acceptance:
        masked = state.tokens == self.mask_id
        count = scheduled(self.schedule, state.step)
        filled = masked & (np.cumsum(masked) <= count)
        return Acceptance(
            mask_transfer=filled,
            edit_transfer=np.zeros_like(masked),
            num_to_transfer=count,
            done=bool((filled == masked).all()),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditRule:
    """LLaDA2.1: fill masks by threshold, replace tokens that the model now sees differently (REFERENCE 7).

    Every pass over a block with masks fills at least one and none comes back; then at most `max_post_steps`
    passes follow: a block of T positions takes at most T + `max_post_steps` passes. `editing_threshold` None
    edits nothing.
    """

    mask_id: int
    threshold: float
    editing_threshold: float | None
    max_post_steps: int
    num_to_transfer: int
    tokens_are_final: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: DecodingConfig) -> "EditRule":
        return cls(
            mask_id=config.mask_id,
            threshold=config.threshold,
            editing_threshold=config.editing_threshold,
            # Without edits a pass over a full block can change nothing.
            max_post_steps=0 if config.editing_threshold is None else config.max_post_steps,
            num_to_transfer=config.num_to_transfer,
        )

    def accept(self, state: BlockState) -> Acceptance:
        masked = state.tokens == self.mask_id
        filled = select_masked(masked, state.confidence, self.threshold, self.num_to_transfer)
        edits = self._edits(state, masked)
        settled = not masked.any() and not edits.any()
        full = bool((filled == masked).all())
        return Acceptance(
            mask_transfer=filled,
            edit_transfer=edits,
            num_to_transfer=self.num_to_transfer,
            done=full and (settled or state.post_steps >= self.max_post_steps),
        )

    def _edits(self, state: BlockState, masked: Bool[np.ndarray, " T"]) -> Bool[np.ndarray, " T"]:
        if self.editing_threshold is None:
            return np.zeros_like(masked)
        confident = state.confidence > np.float32(self.editing_threshold)
        return ~masked & ~state.is_prompt & confident & (state.predicted != state.tokens)
