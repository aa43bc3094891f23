"""The block loop: runs passes through a `Denoiser` and lets every row decide what is written.

Owns the order of passes, and who is in the batch: a row that has ended leaves its place to the next that waits
(`seats.py`). What is written is the rule's decision (`unmask.py`), a row's progress is the row's (`row.py`), the
model and its KV cache are the denoiser's. NumPy only.

The text is that of the published `generate` functions (REFERENCE sections 6, 7 and 10), with these deliberate
differences. For every family:

1. The mask token is never predicted (`sampling.py`). The reference may leave masks in the output (2.0, RND1),
   edit a token back to a mask or loop without end (2.1), or fail (SDAR).
2. A gen_length below minimal_topk still takes one step, which fills the whole block; the reference takes none
   and returns masks. In general a pass over masks fills at least one, even when the schedule is used up.
3. Eos is searched in the generated part only. In the reference (2.0, early stop) an eos in the prompt makes
   the first eos that is written return an empty answer.
4. Early stop never returns more than gen_length tokens. In the reference (2.0) an eos beyond it lengthens the
   answer.
5. gen_length 0 runs no pass. The reference (2.1) decodes the rest of the prompt's block and returns nothing.
6. `editing_threshold` None edits nothing and needs no confirming pass; the reference has no such setting.
7. Equal confidences: the lowest index first. The reference leaves the order to its top-k.
8. A batch. The reference decodes one prompt.

SDAR and RND1:

9. The answer is what was generated, at most gen_length tokens, cut after the first eos. The references return the
   prompt with it, and whatever follows the eos.
10. A step fills masks only. SDAR's overwrites other tokens, even of the prompt, where fewer masks are left.
11. Temperature 0 is greedy, with RND1's entropies at temperature 1. SDAR's divides by zero, RND1's by 1e-8.
12. gen_length is the number of tokens: RND1 counts the position behind them in, which it leaves to pad (`end_id`).
13. Entropies are those before top-k and top-p; RND1's turn into NaN.
14. A step of RND1's schedule that would fill no mask runs no pass.
15. A mask in an RND1 prompt is decoded where it stands (`Result.canvas`), also if gen_length is 0: infilling.

A mask token in the prompt of a model with blocks is as in the reference: it stays in a whole prompt block, and is
decoded in the block that prompt and answer share.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float32, Int32

from oled_jax.config import DecodingConfig
from oled_jax.decode.events import BlockEvent, Event
from oled_jax.decode.registry import acceptance_rule
from oled_jax.decode.row import Row, Step
from oled_jax.decode.seats import Clock, Seat
from oled_jax.decode.unmask import AcceptanceRule
from oled_jax.errors import UsageError
from oled_jax.passes import PassKind, PassOutcome


class Prediction(NamedTuple):
    """The model's token for each position of the block, its probability, and how uncertain the model was.

    entropy: only where whole texts are decoded.
    """

    tokens: Int32[np.ndarray, "B T"]
    confidence: Float32[np.ndarray, "B T"]
    entropy: Float32[np.ndarray, "B T"] | None = None


@runtime_checkable
class Denoiser(Protocol):
    """A model with its KV cache, for one batch. The places of the batch are the first axis of all arrays."""

    def enter(self, place: int, request: int) -> None:
        """Prompt number `request` takes a place, for good or until another takes it."""

    def prefill(self, tokens: Int32[np.ndarray, "B P"], lengths: Int32[np.ndarray, " B"]) -> None:
        """Whole prompt blocks of requests that just entered into the KV cache; returns when they are there.

        Not called if every length is 0. `lengths` are multiples of the block length, 0 for every place whose
        cache must stay as it is; what follows a row's length is padding (the mask token).
        """

    def forward(
        self,
        kind: PassKind,
        tokens: Int32[np.ndarray, "B T"],
        starts: Int32[np.ndarray, " B"],
        active: Bool[np.ndarray, " B"],
        commit: Bool[np.ndarray, " B"],
        folds: Bool[np.ndarray, " B"],
        is_prompt: Bool[np.ndarray, "B T"],
    ) -> Prediction | None:
        """One pass over one block per row, which sees the row's cache below `starts` and itself entirely.

        Always stores the keys and values of the block, over those of earlier passes at the same place.
        `commit`: the row's tokens are final and its prediction is not read. `folds`: the pass takes in the block
        before, too, as the row's last pass left it, and stores its keys and values before this one sees them.
        Returns None if every active row commits.
        """

    def end_pass(self, outcome: PassOutcome) -> None:
        """What became of the pass, once the rule has run."""


class BlockDiffusion:
    """Decodes a batch of prompts block by block.

    Args:
      denoiser: the model; used by one run at a time.
      config: how to decode.
      rule: acceptance rule; by default the one that `config.editing` chooses.
    """

    def __init__(self, denoiser: Denoiser, config: DecodingConfig, rule: AcceptanceRule | None = None):
        self._denoiser = denoiser
        self._config = config
        self._rule = acceptance_rule(config) if rule is None else rule

    def run(self, prompts: Sequence[Sequence[int]], places: int | None = None) -> Iterator[Event]:
        """Decodes; yields each event as it happens, `FinishEvent` last of its row.

        Ends: a row is in one block at a time, the rule bounds the passes over a block (`unmask.py`), at most
        one commit follows (none after the last block, and with `fold_commits` none at all), and a row has
        ceil((P + gen_length) / L) blocks.

        Args:
          prompts: token ids.
          places: rows of the batch; while all are taken prompts wait, in order. None: as many as prompts.

        Raises:
          UsageError: at once, if a prompt is not a sequence of token ids.
          RuntimeError: the denoiser returned a mask token or a confidence that is not a number.
        """
        ids = [token_ids(index, prompt) for index, prompt in enumerate(prompts)]
        rows = deque(Row(i, prompt, self._config, self._rule) for i, prompt in enumerate(ids))
        return self._generate(rows, len(rows) if places is None else min(places, len(rows)))

    def _generate(self, waiting: deque[Row], places: int) -> Iterator[Event]:
        clock = Clock()
        seats: list[Seat | None] = [None] * places
        while waiting or any(seat is not None for seat in seats):
            self._fill(seats, waiting, clock)
            taken = [seat for seat in seats if seat is not None]
            running = [seat for seat in taken if not seat.row.finished]
            steps = self._pass(running, places) if running else {}
            now = clock.elapsed()
            events: list[Event] = []
            for seat in taken:
                if seat.place in steps:
                    events += steps[seat.place].events
                    if any(isinstance(event, BlockEvent) for event in steps[seat.place].events):
                        seat.end_block(now)
                if seat.row.finished:
                    events.append(seat.finish(now))
                    seats[seat.place] = None
            yield from clock.outside(events)

    def _fill(self, seats: list[Seat | None], waiting: deque[Row], clock: Clock) -> None:
        """Gives free places to waiting rows, whose prompts then go into the KV cache together."""
        entered = []
        for place, seat in enumerate(seats):
            if seat is None and waiting:
                entered.append(Seat(place, waiting.popleft(), clock.elapsed()))
                seats[place] = entered[-1]
                self._denoiser.enter(place, entered[-1].row.index)
        self._prefill(entered, len(seats))
        now = clock.elapsed()
        for seat in entered:
            seat.prefilled_s = now

    def _prefill(self, entered: list[Seat], places: int) -> None:
        lengths = np.zeros(places, np.int32)
        for seat in entered:
            lengths[seat.place] = seat.row.prefill_length
        if not lengths.any():
            return
        tokens = np.full((places, lengths.max()), self._config.mask_id, np.int32)
        for seat in entered:
            length = seat.row.prefill_length
            tokens[seat.place, :length] = seat.row.canvas[:length]
            seat.row.passes[PassKind.PREFILL] += bool(length)
        self._denoiser.prefill(tokens, lengths)

    def _pass(self, running: list[Seat], places: int) -> dict[int, Step]:
        """One forward pass for the whole batch and its consequences, one `Step` for each place that runs."""
        shape = (places, self._config.block_length)
        tokens = np.full(shape, self._config.mask_id, np.int32)
        is_prompt, starts = np.zeros(shape, bool), np.zeros(places, np.int32)
        active, commit, folds = np.zeros((3, places), bool)
        for seat in running:
            row, place = seat.row, seat.place
            tokens[place], is_prompt[place] = row.window, row.is_prompt
            starts[place], active[place] = row.start, True
            commit[place], folds[place] = row.kind is PassKind.COMMIT, row.folds
        kind = _kind_of_pass([seat.row.kind for seat in running])
        prediction = self._denoiser.forward(kind, tokens, starts, active, commit, folds, is_prompt)
        self._check(prediction, active & ~commit)
        after, confidence = tokens.copy(), np.ones(shape, np.float32)
        written, edited = np.zeros(shape, bool), np.zeros(shape, bool)
        steps = {}
        for seat in running:
            place, step = seat.place, _advance(seat, prediction)
            after[place], confidence[place] = step.tokens_after, step.confidence
            written[place], edited[place] = step.written, step.edited
            steps[place] = step
        masked = (tokens == self._config.mask_id) & active[:, None]
        outcome = PassOutcome(
            kind=kind, tokens_before=tokens, tokens_after=after, written=written, edited=edited,
            masked_before=masked, confidence=confidence, active=active, starts=starts,
        )  # fmt: skip
        self._denoiser.end_pass(outcome)
        return steps

    def _check(self, prediction: Prediction | None, rows: Bool[np.ndarray, " B"]) -> None:
        """The acceptance rules end only if masks are filled with tokens, and rank only numbers."""
        if not rows.any():
            return
        if prediction is None:
            raise RuntimeError("the denoiser returned no prediction for a pass that needs one")
        for row in np.flatnonzero(rows):
            if (prediction.tokens[row] == self._config.mask_id).any():
                raise RuntimeError(f"row {row}: the denoiser predicted the mask token {self._config.mask_id}")
            if np.isnan(prediction.confidence[row]).any():
                raise RuntimeError(f"row {row}: the model's probabilities are NaN (damaged weights or overflow)")


def _advance(seat: Seat, prediction: Prediction | None) -> Step:
    place, row = seat.place, seat.row
    if row.kind is PassKind.COMMIT or prediction is None:
        return row.commit()
    entropy = None if prediction.entropy is None else prediction.entropy[place].copy()
    return row.accept(prediction.tokens[place].copy(), prediction.confidence[place].copy(), entropy)


def _kind_of_pass(kinds: Sequence[PassKind]) -> PassKind:
    """COMMIT if all rows commit, EDIT if no other row holds a mask, else DENOISE."""
    for kind in (PassKind.DENOISE, PassKind.EDIT):
        if kind in kinds:
            return kind
    return PassKind.COMMIT


def token_ids(index: int, prompt: object) -> Int32[np.ndarray, " P"]:
    """Prompt number `index` as an array, or UsageError. The vocabulary's end is for the engine to check."""
    try:
        ids = np.asarray(prompt)
    except ValueError:  # nested sequences of unequal length
        ids = np.empty(0, object)
    if ids.shape == (0,) and ids.dtype != object:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(f"prompt {index} must be a flat sequence of integer token ids")
    outside = np.flatnonzero((ids < 0) | (ids > np.iinfo(np.int32).max))
    if outside.size:
        raise UsageError(f"prompt {index}: {ids[outside[0]]} at position {outside[0]} is not a token id")
    return ids.astype(np.int32)
