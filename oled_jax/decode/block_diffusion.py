"""The block loop: runs passes through a `Denoiser` and lets every row decide what is written.

Owns the order of passes and the clock. What is written is the rule's decision (`unmask.py`), a row's progress
is the row's (`row.py`), the model and its KV cache are the denoiser's. NumPy only.

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

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float32, Int32

from oled_jax.config import DecodingConfig
from oled_jax.decode.events import BlockEvent, Event, FinishEvent, Result
from oled_jax.decode.registry import acceptance_rule
from oled_jax.decode.row import Row, Step
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
    """A model with its KV cache, for one batch."""

    def prefill(self, tokens: Int32[np.ndarray, "B P"], lengths: Int32[np.ndarray, " B"]) -> None:
        """Whole prompt blocks into the KV cache; returns when they are there.

        Called at most once, before any `forward`, and not at all if every length is 0. `lengths` are
        multiples of the block length and may be 0; what follows a row's length is padding (the mask token).
        """

    def forward(
        self,
        kind: PassKind,
        tokens: Int32[np.ndarray, "B T"],
        starts: Int32[np.ndarray, " B"],
        active: Bool[np.ndarray, " B"],
        commit: Bool[np.ndarray, " B"],
        is_prompt: Bool[np.ndarray, "B T"],
    ) -> Prediction | None:
        """One pass over one block per row, which sees the row's cache below `starts` and itself entirely.

        Always stores the keys and values of the block, over those of earlier passes at the same place.
        `commit`: the row's tokens are final and its prediction is not read. Returns None if every active row
        commits.
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

    def run(self, prompts: Sequence[Sequence[int]]) -> Iterator[Event]:
        """Decodes; yields each event as it happens, `FinishEvent` last of its row.

        Ends: a row is in one block at a time, the rule bounds the passes over a block (`unmask.py`), at most
        one commit follows, and a row has ceil((P + gen_length) / L) blocks.

        Raises:
          UsageError: at once, if a prompt is not a sequence of token ids.
          RuntimeError: the denoiser returned a mask token or a confidence that is not a number.
        """
        ids = [token_ids(index, prompt) for index, prompt in enumerate(prompts)]
        return self._generate([Row(i, prompt, self._config, self._rule) for i, prompt in enumerate(ids)])

    def _generate(self, rows: list[Row]) -> Iterator[Event]:
        clock = _Clock()
        self._prefill(rows)
        prefill_s = clock.elapsed()
        first_block_s: dict[int, float] = {}
        yield from clock.outside([_finish(row, prefill_s, None, prefill_s) for row in rows if row.finished])
        while active := [row for row in rows if not row.finished]:
            steps = self._pass(rows, active)
            now = clock.elapsed()
            events: list[Event] = []
            for row in active:
                events += steps[row.index].events
                if any(isinstance(event, BlockEvent) for event in steps[row.index].events):
                    first_block_s.setdefault(row.index, now)
                if row.finished:
                    events.append(_finish(row, prefill_s, first_block_s[row.index], now))
            yield from clock.outside(events)

    def _prefill(self, rows: list[Row]) -> None:
        lengths = np.array([row.prefill_length for row in rows], np.int32)
        if not lengths.any():
            return
        tokens = np.full((len(rows), lengths.max()), self._config.mask_id, np.int32)
        for row, length in zip(rows, lengths, strict=True):
            tokens[row.index, :length] = row.canvas[:length]
            row.passes[PassKind.PREFILL] += bool(length)
        self._denoiser.prefill(tokens, lengths)

    def _pass(self, rows: list[Row], active: list[Row]) -> dict[int, Step]:
        """One forward pass for the whole batch and its consequences, one `Step` per active row."""
        shape = (len(rows), self._config.block_length)
        tokens = np.full(shape, self._config.mask_id, np.int32)
        is_prompt, starts = np.zeros(shape, bool), np.zeros(len(rows), np.int32)
        running, commit = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
        for row in active:
            tokens[row.index], is_prompt[row.index] = row.window, row.is_prompt
            starts[row.index], running[row.index] = row.start, True
            commit[row.index] = row.kind is PassKind.COMMIT
        kind = _kind_of_pass([row.kind for row in active])
        prediction = self._denoiser.forward(kind, tokens, starts, running, commit, is_prompt)
        self._check(prediction, running & ~commit)
        after, confidence = tokens.copy(), np.ones(shape, np.float32)
        written, edited = np.zeros(shape, bool), np.zeros(shape, bool)
        steps = {}
        for row in active:
            step = _advance(row, prediction)
            after[row.index], confidence[row.index] = step.tokens_after, step.confidence
            written[row.index], edited[row.index] = step.written, step.edited
            steps[row.index] = step
        masked = (tokens == self._config.mask_id) & running[:, None]
        outcome = PassOutcome(
            kind=kind, tokens_before=tokens, tokens_after=after, written=written, edited=edited,
            masked_before=masked, confidence=confidence, active=running, starts=starts,
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


def _advance(row: Row, prediction: Prediction | None) -> Step:
    if row.kind is PassKind.COMMIT or prediction is None:
        return row.commit()
    entropy = None if prediction.entropy is None else prediction.entropy[row.index].copy()
    return row.accept(prediction.tokens[row.index].copy(), prediction.confidence[row.index].copy(), entropy)


def _kind_of_pass(kinds: Sequence[PassKind]) -> PassKind:
    """COMMIT if all rows commit, EDIT if no other row holds a mask, else DENOISE."""
    for kind in (PassKind.DENOISE, PassKind.EDIT):
        if kind in kinds:
            return kind
    return PassKind.COMMIT


def _finish(row: Row, prefill_s: float, first_block_s: float | None, now: float) -> FinishEvent:
    output = row.output
    result = Result(
        output_ids=output,
        canvas=row.canvas.copy(),
        finish=row.finish,
        passes=dict(row.passes),
        ttft_prefill_s=prefill_s,
        ttft_block_s=first_block_s,
        decode_s=now - prefill_s,
        tpot_s=(now - prefill_s) / len(output) if output else None,
    )
    return FinishEvent(row=row.index, result=result)


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


class _Clock:
    """Seconds since it was made, without the time that the consumer of the events takes."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._origin

    def outside(self, events: Sequence[Event]) -> Iterator[Event]:
        paused_at = time.perf_counter()
        yield from events
        self._origin += time.perf_counter() - paused_at
