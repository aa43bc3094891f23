"""One request as a state machine: its canvas, the block it works on, and what its next pass is for.

A row owns its canvas and knows nothing of the other rows, so what it becomes cannot depend on them.
`block_diffusion.py` drives it: read `kind` and `window`, then call `accept` after a denoise or edit pass,
`commit` after a commit pass.
"""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float32, Int32

from oled_jax.config import DecodingConfig
from oled_jax.decode.events import BlockEvent, PassEvent
from oled_jax.decode.unmask import AcceptanceRule, BlockState
from oled_jax.passes import PassKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What one pass did to a row: the change for the cache manager, the events for the user."""

    tokens_after: Int32[np.ndarray, " T"]
    written: Bool[np.ndarray, " T"]
    edited: Bool[np.ndarray, " T"]
    confidence: Float32[np.ndarray, " T"]
    events: list[PassEvent | BlockEvent]


class Row:
    """Decodes one prompt: P tokens, block length L. Blocks before P // L are only prefilled.

    Attributes:
      folds: the next pass takes in the block before, too, whose final tokens no pass has seen.
    """

    def __init__(self, index: int, prompt: Int32[np.ndarray, " P"], config: DecodingConfig, rule: AcceptanceRule):
        P, L = len(prompt), config.block_length
        self.index = index
        self.prefill_length = P // L * L if config.gen_length > 0 else 0
        self.passes = dict.fromkeys(PassKind, 0)
        self._config = config
        self._rule = rule
        self._prompt_length = P
        self._num_blocks = -(-(P + config.gen_length) // L)
        self.canvas = np.full(self._num_blocks * L, config.mask_id, np.int32)
        self.canvas[:P] = prompt
        if config.whole_text:
            self.canvas[P + config.gen_length :] = config.end_id
        infills = config.whole_text and bool((self.canvas == config.mask_id).any())
        self.finished = config.gen_length == 0 and not infills
        self._in_prompt = np.arange(len(self.canvas)) < P
        # A mask token in the prompt is text to be generated, not text that was given.
        self._given = self.canvas != config.mask_id
        self._emitted = 0
        self._enter(P // L)

    def _enter(self, block: int, *, folds: bool = False) -> None:
        self.folds = folds
        self.block, self.start = block, block * self._config.block_length
        self._span = slice(self.start, self.start + self._config.block_length)
        self._step = self._post_steps = 0
        self._to_fill = int(np.count_nonzero(self.window == self._config.mask_id))
        self._committing = False
        self._confidence = np.ones(
            self._config.block_length, np.float32
        )  # in a block's first pass every token counts 1.0

    @property
    def window(self) -> Int32[np.ndarray, " T"]:
        """The current block, a view of the canvas."""
        return self.canvas[self._span]

    @property
    def is_prompt(self) -> Bool[np.ndarray, " T"]:
        """Positions of the current block whose token was given."""
        return self._given[self._span]

    @property
    def kind(self) -> PassKind:
        """What the row needs next."""
        if self._committing:
            return PassKind.COMMIT
        return PassKind.DENOISE if (self.window == self._config.mask_id).any() else PassKind.EDIT

    @property
    def output(self) -> tuple[int, ...]:
        """Generated tokens so far: through the current block, at most gen_length, cut after the first eos."""
        length = self._config.gen_length
        eos = self._first_eos()
        return tuple(self._generated()[: length if eos is None else min(length, eos + 1)].tolist())

    @property
    def finish(self) -> Literal["eos", "length"]:
        """Why a finished row ended."""
        return "eos" if self.output[-1:] == (self._config.eos_id,) else "length"

    def _generated(self) -> Int32[np.ndarray, " G"]:
        return self.canvas[self._prompt_length : self._span.stop]

    def accept(
        self,
        predicted: Int32[np.ndarray, " T"],
        confidence: Float32[np.ndarray, " T"],
        entropy: Float32[np.ndarray, " T"] | None = None,
    ) -> Step:
        """Writes what the rule accepts, and moves on to the next step, commit, block or the end."""
        kind, before = self.kind, self.window.copy()
        self.folds = False
        self.passes[kind] += 1
        self._post_steps += kind is PassKind.EDIT
        state = BlockState(
            tokens=before, predicted=predicted, confidence=confidence, is_prompt=self._in_prompt[self._span],
            step=self._step, post_steps=self._post_steps, to_fill=self._to_fill, entropy=entropy,
        )  # fmt: skip
        accepted = self._rule.accept(state)
        written = accepted.mask_transfer | accepted.edit_transfer
        self.window[written] = predicted[written]
        after = self.window.copy()
        self._confidence = np.where(self.is_prompt, np.float32(1.0), confidence)
        events: list[PassEvent | BlockEvent] = [
            PassEvent(
                row=self.index, kind=kind, block=self.block, step=self._step, post_steps=self._post_steps,
                tokens_before=before, tokens_after=after, predicted=predicted, confidence=confidence,
                mask_transfer=_offsets(accepted.mask_transfer),
                edit_transfer=_offsets(accepted.edit_transfer),
                num_to_transfer=accepted.num_to_transfer,
            )
        ]  # fmt: skip
        self._step += 1
        step = Step(
            tokens_after=after, written=written, edited=accepted.edit_transfer, confidence=self._confidence,
            events=events,
        )  # fmt: skip
        stops = self._stops_inside_block(predicted[written])
        if stops or accepted.done:
            events.append(self._block_event())
            self._leave(stops, changed=bool(written.any()))
        return step

    def commit(self) -> Step:
        """Goes to the next block: the pass over the final tokens has stored their keys and values."""
        self.passes[PassKind.COMMIT] += 1
        tokens = self.window.copy()
        event = PassEvent(
            row=self.index, kind=PassKind.COMMIT, block=self.block, step=0, post_steps=0,
            tokens_before=tokens, tokens_after=tokens, predicted=None, confidence=None,
            mask_transfer=(), edit_transfer=(), num_to_transfer=0,
        )  # fmt: skip
        nothing = np.zeros(len(tokens), bool)
        step = Step(tokens_after=tokens, written=nothing, edited=nothing, confidence=self._confidence, events=[event])
        self._enter(self.block + 1)
        return step

    def _leave(self, stops: bool, *, changed: bool) -> None:
        if stops or self.block == self._num_blocks - 1 or self._stops_after_block():
            self.finished = True
        elif changed and not self._config.fold_commits:
            self._committing = True
        else:
            # A pass that wrote nothing saw the final tokens: its keys and values are those of a commit.
            self._enter(self.block + 1, folds=changed)

    def _stops_inside_block(self, just_written: Int32[np.ndarray, " N"]) -> bool:
        """REFERENCE 6, item 3.6: an eos was just written, and no mask is left of the first eos.

        In a whole text that mask may also be filled later than the eos; RND1's reference has no early stop.
        """
        if not (self._rule.tokens_are_final and self._config.eos_early_stop):
            return False
        if not self._config.whole_text and not (just_written == self._config.eos_id).any():
            return False
        eos = self._first_eos()
        return eos is not None and not (self._generated()[:eos] == self._config.mask_id).any()

    def _stops_after_block(self) -> bool:
        return self._first_eos() is not None and (self._rule.tokens_are_final or self._config.eos_early_stop)

    def _first_eos(self) -> int | None:
        """Offset of the first eos behind the prompt: an eos inside a chat prompt does not end the answer."""
        found = np.flatnonzero(self._generated() == self._config.eos_id)
        return int(found[0]) if found.size else None

    def _block_event(self) -> BlockEvent:
        output = self.output
        new = output[self._emitted :]
        self._emitted = len(output)
        return BlockEvent(row=self.index, block=self.block, tokens=new)


def _offsets(chosen: Bool[np.ndarray, " T"]) -> tuple[int, ...]:
    return tuple(np.flatnonzero(chosen).tolist())
