"""Goes through a trace once and adds up how local it is, in bounded memory. NumPy only.

`LocalityMeter` takes passes in order and keeps, for every running sequence, the experts that its last eight iterations
activated. A row without a mask in a denoise pass of a batch commits or edits, which the trace does not tell: it counts
in the pass, not as an iteration of the row. So does a finished block that a pass takes in beside the next one.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from oled_jax.passes import PassKind
from oled_jax.policies.base import IterationOutcome
from oled_jax.traces.locality import CONFIDENCE_EDGES, GAPS, ITERATIONS, STATES, DecodingCost, Locality, ratio
from oled_jax.traces.trace import Trace, TraceHeader, TracePass

DECODING = (*ITERATIONS, PassKind.COMMIT)


def measure_locality(trace: Trace) -> Locality:
    """Goes through a trace once."""
    meter = LocalityMeter(trace.header)
    for pass_ in trace:
        meter.add(pass_)
    return meter.result()


def token_states(outcome: IterationOutcome) -> Int[np.ndarray, " N"]:
    """What each token is for the next iteration: an index into STATES.

    One that was written, over the mask or over another token, enters the next iteration as another input.
    """
    state = np.where(outcome.masked, STATES.index("masked"), STATES.index("decoded"))
    state[outcome.written] = STATES.index("just_written")
    return state


class LocalityMeter:
    """Adds up what passes say, in order.

    Args:
      header: of the trace that they are of.
    """

    def __init__(self, header: TraceHeader) -> None:
        L = header.num_layers
        self._header = header
        self._passes: collections.Counter[PassKind] = collections.Counter()
        self._generated = self._routed_tokens = self._decode_pages = 0
        self._distinct, self._boundary = _Mean(L), _Mean(L)
        self._overlap, self._cosine = _Mean(GAPS, L), _Mean(GAPS, L)
        self._kept = _Mean(len(STATES), len(CONFIDENCE_EDGES) + 1)
        self._moments = np.zeros((len(STATES), 6))
        self._sequences: dict[int, _Sequence] = {}

    def add(self, pass_: TracePass) -> None:
        """The next pass."""
        kind, tokens = pass_.info.kind, pass_.info.token_mask
        self._passes[kind] += 1
        if kind not in DECODING:
            return
        B = len(pass_.request_ids)
        activated = _activated(pass_.expert_ids, tokens, self._header.num_experts)
        distinct = np.count_nonzero(activated, axis=-1)
        self._decode_pages += int(distinct.sum())
        self._routed_tokens += int(np.count_nonzero(tokens))
        self._generated += int(np.count_nonzero(pass_.outcome.written & pass_.outcome.masked))
        if kind not in ITERATIONS:
            return
        self._distinct.add(distinct)
        if pass_.cosine is not None:
            self._cosine.add(pass_.cosine.T)
        takes_part = tokens & pass_.outcome.masked if kind is PassKind.DENOISE else tokens
        rows = np.any(takes_part.reshape(B, -1), axis=-1)
        spans = own_spans(pass_)
        running = {}
        for row, request in enumerate(pass_.request_ids.tolist()):
            sequence = self._sequences.get(request) or _Sequence()
            if rows[row]:
                self._add_row(sequence, _row_of(pass_, row, spans[row], self._header.num_experts))
            running[request] = sequence
        self._sequences = running

    def result(self) -> Locality:
        """What the passes so far say together."""
        return Locality(
            header=self._header,
            passes={kind: self._passes[kind] for kind in PassKind},
            generated=self._generated,
            distinct=self._distinct.value,
            overlap=self._overlap.value,
            boundary=self._boundary.value,
            cosine=self._cosine.value,
            tokens=self._kept.count.copy(),
            kept=self._kept.value,
            moments=self._moments.copy(),
            cost=self._cost(),
        )

    def _add_row(self, sequence: "_Sequence", now: "_Row") -> None:
        last = sequence.last
        if last is not None and now.start != last.start:
            self._boundary.add(_overlap(now.activated, [sequence.window[-1]])[0])
            sequence.window.clear()
        elif last is not None:
            self._overlap.add(_overlap(now.activated, list(sequence.window)[::-1]))
            self._add_kept(last, now)
        sequence.window.append(now.activated)
        sequence.last = now

    def _add_kept(self, before: "_Row", now: "_Row") -> None:
        same = (before.ids[..., :, None] == now.ids[..., None, :]).any(-1)
        share = same.mean((0, -1))
        group = np.searchsorted(np.asarray(CONFIDENCE_EDGES, np.float32), before.confidence, side="right")
        self._kept.add_at((before.state, group), share)
        x = before.confidence.astype(np.float64)
        moments = np.stack([np.ones_like(x), x, share, x * x, share * share, x * share], axis=-1)
        np.add.at(self._moments, before.state, moments)

    def _cost(self) -> DecodingCost:
        header, tokens = self._header, self._generated
        L, K, page = header.num_layers, header.top_k, header.page_bytes
        flops = 6 * header.hidden_size * header.moe_intermediate_size  # one token, one expert: three D x F products
        iterations = sum(self._passes[kind] for kind in ITERATIONS)
        return DecodingCost(
            pass_bytes=float(self._distinct.value.sum()) * page if iterations else None,
            token_bytes=self._decode_pages * page / tokens if tokens else None,
            token_flops=self._routed_tokens * L * K * flops / tokens if tokens else None,
            single_bytes=L * K * page,
            single_flops=L * K * flops,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    """One sequence's part of an iteration. state: index into STATES of what each token is for the next iteration."""

    start: int
    ids: Int[np.ndarray, "L T K"]
    activated: Bool[np.ndarray, "L E"]
    state: Int[np.ndarray, " T"]
    confidence: Float32[np.ndarray, " T"]


class _Sequence:
    """A running request: its last iteration, and what the last iterations of its block activated."""

    def __init__(self) -> None:
        self.last: _Row | None = None
        self.window: collections.deque[Bool[np.ndarray, "L E"]] = collections.deque(maxlen=GAPS)


class _Mean:
    """Running means of an array's entries; NaN is no value."""

    def __init__(self, *shape: int) -> None:
        self._total = np.zeros(shape)
        self.count = np.zeros(shape, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Values for the first len(values) entries of the first axis."""
        known = ~np.isnan(values)
        self._total[: len(values)] += np.where(known, values, 0.0)
        self.count[: len(values)] += known

    def add_at(self, index: tuple[np.ndarray, ...], values: np.ndarray) -> None:
        np.add.at(self._total, index, values)
        np.add.at(self.count, index, 1)

    @property
    def value(self) -> np.ndarray:
        return ratio(self._total, self.count)


def _activated(ids: Int[np.ndarray, "L N K"], tokens: Bool[np.ndarray, " N"], E: int) -> Bool[np.ndarray, "L E"]:
    """Experts that real tokens were routed to."""
    L = len(ids)
    found = np.zeros((L, E), bool)
    found[np.arange(L)[:, None], ids[:, tokens].reshape(L, -1)] = True
    return found


def own_spans(pass_: TracePass) -> list[slice]:
    """Where among the tokens of a pass each row's own block lies."""
    B, folds = len(pass_.request_ids), pass_.info.folds
    T = len(pass_.info.token_mask) // B
    L = T if folds is None else T // 2
    firsts = np.arange(B) * T + (0 if folds is None else folds * L)
    return [slice(first, first + L) for first in firsts.tolist()]


def _row_of(pass_: TracePass, row: int, span: slice, num_experts: int) -> _Row:
    T = len(pass_.info.token_mask) // len(pass_.request_ids)
    ids = pass_.expert_ids[:, span]
    activated = _activated(ids, pass_.info.token_mask[span], num_experts)
    return _Row(
        start=int(pass_.block_starts[row]) + span.start - row * T,
        ids=ids,
        activated=activated,
        state=token_states(pass_.outcome)[span],
        confidence=pass_.outcome.confidence[span],
    )


def _overlap(now: Bool[np.ndarray, "L E"], before: Sequence[Bool[np.ndarray, "L E"]]) -> Float[np.ndarray, "G L"]:
    """|before ∩ now| / |now| for each of `before`."""
    common = np.count_nonzero(np.stack(before) & now, axis=-1)
    return common / np.count_nonzero(now, axis=-1)
