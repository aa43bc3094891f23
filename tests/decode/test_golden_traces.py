"""The decoder against the recorded generations of the reference, with recorded predictions for a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from decode.golden_traces import DEVIATIONS, GoldenCase, compare, golden_cases
from fake_denoisers import ReplayDenoiser, decode

from oled_jax.config import DecodingConfig
from oled_jax.decode.events import Event, Result

CASES = golden_cases()


def needs_model(case: GoldenCase) -> bool:
    return case.deviation is not None and case.deviation.needs_model


@pytest.mark.parametrize("folds", [False, True], ids=["committing", "folding"])
@pytest.mark.parametrize("case", [c for c in CASES if not needs_model(c)], ids=lambda c: c.name)
def test_replay(case: GoldenCase, folds: bool) -> None:
    def run(prompt: Sequence[int], args: Mapping[str, Any]) -> tuple[list[Event], Result]:
        settings = DecodingConfig(**args, fold_commits=folds)
        events, results = decode([prompt], settings, ReplayDenoiser(case.recorded["steps"]))
        return events, results[0]

    compare(case, run)


def test_every_recording_is_used() -> None:
    assert sum(not c.editing for c in CASES) == 40
    assert sum(c.editing for c in CASES) == 41
    named = {(c.editing, c.recorded["name"]) for c in CASES}
    assert set(DEVIATIONS) <= named
    # Most cases must be compared unchanged, or the comparison says nothing about the reference.
    assert len(DEVIATIONS) == 7


@pytest.mark.parametrize("case", [c for c in CASES if c.deviation is not None], ids=lambda c: c.name)
def test_deviations_differ(case: GoldenCase) -> None:
    """A deviation that no longer differs from the recording must leave the list."""
    fields = ("output_ids", "final_canvas", "num_forward_calls")
    assert any(case.expected(f) not in (case.recorded[f], tuple(case.recorded[f])) for f in fields[:1]) or any(
        case.expected(f) != case.recorded[f] for f in fields[1:]
    )
    assert case.args["mask_id"] not in case.expected("output_ids")
    assert len(case.expected("output_ids")) <= case.args["gen_length"]


def test_recorded_mask_predictions_are_refused() -> None:
    """The reference's own predictions of the mask token break the denoiser's contract."""
    (case,) = [c for c in CASES if c.name == "llada20-mask_token_left_in_output"]
    with pytest.raises(RuntimeError, match="predicted the mask token 380"):
        decode([case.recorded["prompt"]], DecodingConfig(**case.args), ReplayDenoiser(case.recorded["steps"]))
