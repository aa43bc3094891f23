"""Output tokens are counted from what a trace says was written."""

import dataclasses

import numpy as np
from made_traces import HEADER, made_trace

from oled_jax.sim.tokens import OutputTokens
from oled_jax.traces.trace import MemoryTrace

EOS = 7


def counted(trace: MemoryTrace, **settings) -> int:
    tokens = OutputTokens(dataclasses.replace(HEADER, settings=settings))
    for step in trace:
        tokens.add(step)
    return tokens.count()


def with_tokens(trace: MemoryTrace, token_of) -> MemoryTrace:
    """The trace with the written token at each position of each row."""
    passes = []
    for step in trace:
        T = step.outcome.token_ids.size // step.request_ids.size
        positions = (step.block_starts[:, None] + np.arange(T)).ravel()
        ids = np.array([token_of(position) for position in positions], np.int32)
        passes.append(dataclasses.replace(step, outcome=dataclasses.replace(step.outcome, token_ids=ids)))
    return MemoryTrace(trace.header, tuple(passes))


# Prompts of 7 tokens; blocks begin at 8 and 12, and three of their four positions are written.
TRACE = with_tokens(made_trace(requests=2, rows=2), lambda position: EOS if position == 10 else 1)


def test_without_an_end_every_written_position_counts():
    assert counted(TRACE) == counted(TRACE, eos_id=5, gen_length=100) == 4 * 6


def test_nothing_counts_after_the_end_token():
    assert counted(TRACE, eos_id=EOS) == 4 * 3


def test_nothing_counts_after_the_length():
    assert counted(TRACE, eos_id=-1, gen_length=6) == 4 * 4  # positions 8, 9, 10 and 12


def test_a_token_that_is_edited_counts_once():
    step = TRACE.passes[1]
    again = dataclasses.replace(TRACE.passes[2], outcome=step.outcome)
    once = counted(MemoryTrace(HEADER, (TRACE.passes[0], step)))
    assert counted(MemoryTrace(HEADER, (TRACE.passes[0], step, again))) == once == 2
