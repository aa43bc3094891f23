"""A trace of one request at a time, as it would be if requests ran side by side in batches. NumPy only."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from oled_jax.passes import PassKind
from oled_jax.traces.trace import MemoryTrace, Trace, TracePass, arrays_of

# What a pass over rows of several kinds is as a whole: the first of these that a row is.
RANK = (PassKind.DENOISE, PassKind.EDIT, PassKind.COMMIT, PassKind.PREFILL)


def stack_requests(trace: Trace, rows: int) -> MemoryTrace:
    """Rows requests at a time; the rest that makes no whole batch is left out.

    The i-th pass of a batch holds the i-th pass of each of its requests, as in a batch that began together. A request
    that has ended keeps its row, whose tokens route no more.

    Args:
      trace: of one row a pass; requests whose prompts are equally long, and whose commits are not folded.
    """
    requests = [list(passes) for _, passes in itertools.groupby(trace, lambda step: int(step.request_ids[0]))]
    batches = [requests[start : start + rows] for start in range(0, len(requests) - rows + 1, rows)]
    return MemoryTrace(trace.header, tuple(step for batch in batches for step in _stacked(batch)))


def _stacked(requests: Sequence[Sequence[TracePass]]) -> Iterator[TracePass]:
    for number in range(max(map(len, requests))):
        steps = [passes[number] if number < len(passes) else _ended(passes[-1]) for passes in requests]
        running = {passes[number].info.kind for passes in requests if number < len(passes)}
        kind = next(kind for kind in RANK if kind in running)
        yield TracePass(
            prompts=tuple(prompt for step in steps for prompt in step.prompts),
            new_blocks=sum(step.new_blocks for step in steps),
            request_ids=np.concatenate([step.request_ids for step in steps]),
            block_starts=np.concatenate([step.block_starts for step in steps]),
            info=_joined([step.info for step in steps], kind),
            expert_ids=np.concatenate([step.expert_ids for step in steps], axis=1),
            gates=np.concatenate([step.gates for step in steps], axis=1),
            outcome=_joined([step.outcome for step in steps], kind),
        )


def _ended(step: TracePass) -> TracePass:
    """The row of a request that has ended."""
    nothing = np.zeros_like(step.info.token_mask)
    return dataclasses.replace(
        step,
        prompts=(),
        new_blocks=0,
        info=dataclasses.replace(step.info, token_mask=nothing, masked=nothing),
        outcome=dataclasses.replace(step.outcome, written=nothing, masked=nothing),
    )


def _joined(parts: Sequence[Any], kind: PassKind) -> Any:
    """Records of single rows as one of the whole pass."""
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays_of(parts[0])}
    return dataclasses.replace(parts[0], kind=kind, **joined)
