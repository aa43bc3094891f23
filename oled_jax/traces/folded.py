"""A trace whose finished blocks have passes of their own, as it would be with folded commits. NumPy only."""

import dataclasses
from typing import Any

import numpy as np

from oled_jax.passes import PassKind
from oled_jax.traces.trace import MemoryTrace, Trace, TracePass, arrays_of


def fold_commits(trace: Trace) -> MemoryTrace:
    """Each commit pass and the first pass over the blocks that follow become one pass over both.

    What a token routes to is as it was, so this is the run that folds. In batches only passes in which every row
    commits are folded: a row that commits beside others cannot be told from one that edits.
    """
    passes: list[TracePass] = []
    for step in trace:
        if passes and _follows(passes[-1], step, trace.header.block_length):
            step = _joined(passes.pop(), step, trace.header.block_length)
        passes.append(step)
    return MemoryTrace(trace.header, tuple(passes))


def _follows(commit: TracePass, step: TracePass, block_length: int) -> bool:
    """All rows of `commit` commit, and `step` is about the blocks behind theirs."""
    return (
        commit.info.kind is PassKind.COMMIT
        and step.info.kind is PassKind.DENOISE
        and np.array_equal(commit.request_ids, step.request_ids)
        and np.array_equal(commit.block_starts + block_length, step.block_starts)
    )


def _joined(commit: TracePass, step: TracePass, block_length: int) -> TracePass:
    return dataclasses.replace(
        step,
        prompts=(*commit.prompts, *step.prompts),
        new_blocks=commit.new_blocks + step.new_blocks,
        block_starts=commit.block_starts,
        info=_both(commit.info, step.info, block_length, folds=np.ones(step.request_ids.size, bool)),
        expert_ids=_side_by_side(commit.expert_ids, step.expert_ids, block_length),
        gates=_side_by_side(commit.gates, step.gates, block_length),
        outcome=_both(commit.outcome, step.outcome, block_length),
    )


def _both(finished: Any, own: Any, block_length: int, **changes: Any) -> Any:
    """Records of a pass. In the finished blocks is no mask, and nothing was written."""
    arrays = {
        name: _side_by_side(getattr(finished, name), value, block_length) for name, value in arrays_of(own).items()
    }
    return dataclasses.replace(own, **arrays, **changes)


def _side_by_side(finished: np.ndarray, own: np.ndarray, block_length: int) -> np.ndarray:
    """Values of tokens, [N] or [L, N, K], so that each row's finished block comes before its own."""
    axis = min(own.ndim - 1, 1)
    layers, rest = own.shape[:axis], own.shape[axis + 1 :]
    blocks = [values.reshape(*layers, -1, block_length, *rest) for values in (finished, own)]
    return np.concatenate(blocks, axis=axis + 1).reshape(*layers, -1, *rest)
