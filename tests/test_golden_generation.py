"""The whole system against the reference's recorded generations: real model, KV cache on, experts paged."""

import pytest
from decode.golden_traces import GoldenCase, compare, golden_cases
from engines import CheckedEngine, build_plain, open_tiny

from oled_jax.config import DecodingConfig
from oled_jax.decode.events import FinishEvent

# Sampled cases follow a random stream that only the reference has; top_k 1 leaves one candidate, so these stay.
CASES = [case for case in golden_cases() if case.args["temperature"] == 0 or case.args["top_k"] == 1]


@pytest.fixture(scope="module")
def engine(golden):
    engine = build_plain(*open_tiny(golden), "oled", 6)
    engine.__class__ = CheckedEngine
    return engine


def test_all_greedy_recordings_are_here():
    assert sum(case.args["temperature"] == 0 for case in CASES) == 79


def folded(case: GoldenCase, marks):
    return pytest.param(case, True, marks=marks, id=f"{case.name}-folding")


@pytest.mark.parametrize(
    ("case", "folds"),
    [
        # Every second one belongs to the slow tests: rules and order of passes are tested with all of them elsewhere
        # (decode/test_golden_traces.py).
        *(
            pytest.param(case, False, id=case.name, marks=[pytest.mark.slow] * (number % 2))
            for number, case in enumerate(CASES)
        ),
        *(folded(case, ()) for case in CASES[::20]),
        *(folded(case, pytest.mark.exhaustive) for number, case in enumerate(CASES) if number % 20),
    ],
)
def test_generation_equals_the_recording(engine, case: GoldenCase, folds: bool):
    def run(prompt, args):
        events = list(engine.stream([prompt], DecodingConfig(**args, fold_commits=folds)))
        return events, next(event.result for event in events if isinstance(event, FinishEvent))

    compare(case, run)
