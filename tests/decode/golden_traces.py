"""The reference's recorded generations, and one comparison for anything that generates.

`compare(case, run)` takes any `run(prompt, args) -> (events, result)`, where `DecodingConfig(**args)` is the
configuration: a replay of the recorded predictions, or a real model with its KV cache. `DEVIATIONS` names the
cases where this package deliberately differs (numbers: docstring of `oled_jax.decode.block_diffusion`) and
what it returns there.
"""

import dataclasses
import functools
import json
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oled_jax.decode.events import Event, PassEvent, Result
from oled_jax.passes import PassKind

ARCHIVE = Path(__file__).parents[1] / "golden" / "golden.tar.xz"
FILES = {"./llada2-tiny-generate.json": False, "./llada21-tiny-generate.json": True}  # and whether tokens are edited
CONFIDENCE_ATOL = 5e-5  # README.md of the golden data

Run = Callable[[Sequence[int], Mapping[str, Any]], tuple[Iterable[Event], Result]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deviation:
    """What replaces the recording. `same_steps` of its steps still hold.

    Attributes:
      reason: number of the deliberate difference, and what happens.
      needs_model: the recorded predictions do not lead there. The values come from an independent float32
        NumPy implementation of REFERENCE sections 2 to 5 that leaves the mask token out of the argmax; noise
        of 2e-4 on its logits changes none of them.
    """

    reason: str
    output_ids: tuple[int, ...]
    final_canvas: tuple[int, ...] | None = None
    num_forward_calls: int | None = None
    same_steps: int | None = None
    needs_model: bool = False


# fmt: off
DEVIATIONS = {
    (False, "steps0_masks_remain"): Deviation(
        reason="2: gen_length 4 below minimal_topk 8 takes one step instead of none",
        output_ids=(417,) * 4, final_canvas=(480, 251, 160, 417, 417, 417, 417, 417), num_forward_calls=1,
        same_steps=0, needs_model=True,
    ),
    (False, "eos_beyond_gen_length_early1"): Deviation(
        reason="4: ten tokens were asked for, the reference returns 13",
        output_ids=(89, 24, 24, 30, 89, 89, 30, 24, 24, 24),
    ),
    (False, "prompt_contains_eos_early1"): Deviation(
        reason="3: the reference finds the prompt's eos and returns nothing", output_ids=(200, 24),
    ),
    (False, "mask_token_predicted"): Deviation(
        reason="1: the masks were right of the output, at the end of the last block",
        output_ids=(
            459, 442, 425, 297, 370, 370, 306, 387, 89, 234, 370, 290, 453, 453, 455, 492
        ),
        final_canvas=(
            277, 421, 283, 51, 143, 338, 311, 36, 502, 459, 442, 425, 297, 370, 370, 306, 387, 89, 234, 370,
            290, 453, 453, 455, 492, 129, 425, 132, 278, 425, 492, 492
        ),
        num_forward_calls=15, same_steps=12, needs_model=True,
    ),
    (False, "mask_token_left_in_output"): Deviation(
        reason="1: the seventh token of the reference's output is the mask",
        output_ids=(
            388, 122, 13, 160, 128, 13, 348, 447, 191, 437, 260, 349, 128, 62, 191, 160
        ),
        final_canvas=(
            174, 271, 291, 353, 445, 346, 507, 22, 484, 388, 122, 13, 160, 128, 13, 348, 447, 191, 437, 260,
            349, 128, 62, 191, 160, 407, 430, 30, 196, 430, 181, 437
        ),
        num_forward_calls=9, same_steps=2, needs_model=True,
    ),
    (True, "block32_boundary"): Deviation(
        reason="1: the reference edits a token into a mask, fills it again, and so gains a pass",
        output_ids=(
            178, 171, 22, 436, 236, 228, 21, 320, 387, 275, 195, 116, 503, 35, 275, 52, 35, 65, 69, 48, 417,
            195, 90, 425, 466, 417, 104, 491, 201, 290, 325, 52
        ),
        final_canvas=(
            55, 83, 10, 382, 157, 377, 374, 323, 226, 435, 222, 159, 385, 143, 396, 422, 164, 466, 0, 376,
            468, 68, 225, 453, 437, 497, 260, 165, 448, 478, 292, 459, 421, 223, 303, 444, 325, 272, 408,
            446, 109, 369, 446, 115, 469, 388, 381, 172, 136, 68, 464, 502, 13, 309, 72, 152, 161, 321, 284,
            327, 89, 500, 51, 160, 178, 171, 22, 436, 236, 228, 21, 320, 387, 275, 195, 116, 503, 35, 275,
            52, 35, 65, 69, 48, 417, 195, 90, 425, 466, 417, 104, 491, 201, 290, 325, 52
        ),
        num_forward_calls=23, same_steps=21, needs_model=True,
    ),
    (True, "gen_length_0_midblock"): Deviation(
        reason="5: nothing was asked for, so nothing runs", output_ids=(),
        final_canvas=(447, 54, 81, 405, 389, 511, 511, 511), num_forward_calls=0, same_steps=0,
    ),
}
# fmt: on


@dataclasses.dataclass(frozen=True)
class GoldenCase:
    """One recorded generation; `expected` has the deviation applied."""

    editing: bool
    recorded: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{'llada21' if self.editing else 'llada20'}-{self.recorded['name']}"

    @property
    def args(self) -> dict[str, Any]:
        return {**self.recorded["args"], "editing": self.editing}

    @property
    def deviation(self) -> Deviation | None:
        return DEVIATIONS.get((self.editing, self.recorded["name"]))

    def expected(self, field: str) -> Any:
        changed = getattr(self.deviation, field, None)
        return self.recorded[field] if changed is None else changed

    def same_steps(self) -> list[Mapping[str, Any]]:
        return self.recorded["steps"][: getattr(self.deviation, "same_steps", None)]


@functools.cache
def golden_cases() -> tuple[GoldenCase, ...]:
    """All 81 cases, read from the archive, for parametrized tests."""
    cases: list[GoldenCase] = []
    # As a stream: going back in the archive would unpack it from its beginning again, in every process that collects.
    with tarfile.open(ARCHIVE, "r|xz") as archive:
        for member in archive:
            if member.name in FILES:
                file = archive.extractfile(member)
                assert file is not None
                cases += [GoldenCase(FILES[member.name], case) for case in json.load(file)["cases"]]
            if len({case.editing for case in cases}) == len(FILES):
                break
    return tuple(cases)


def compare(case: GoldenCase, run: Run) -> None:
    """Asserts the same output, canvas, number of forward calls (commits apart) and decisions in each step."""
    events, result = run(case.recorded["prompt"], case.args)
    passes = [e for e in events if isinstance(e, PassEvent) and e.kind is not PassKind.COMMIT]
    for number, (event, step) in enumerate(zip(passes, case.same_steps(), strict=False)):
        _compare_step(f"{case.name}, forward call {number}", event, step, case.args["mask_id"])
    assert list(result.output_ids) == list(case.expected("output_ids")), case.name
    assert result.canvas.tolist() == list(case.expected("final_canvas")), case.name
    assert len(passes) == case.expected("num_forward_calls"), case.name
    assert len(passes) == result.passes[PassKind.DENOISE] + result.passes[PassKind.EDIT], case.name


def _compare_step(where: str, event: PassEvent, step: Mapping[str, Any], mask_id: int) -> None:
    assert event.block == step["block"], where
    assert event.tokens_before.tolist() == step["tokens_before"], where
    if "step" in step:
        assert (event.step, event.num_to_transfer) == (step["step"], step["num_to_transfer"]), where
    else:
        assert (event.step, event.post_steps) == (step["iteration"], step["post_steps"]), where
    assert event.predicted is not None, where
    assert event.confidence is not None, where
    comparable = np.array(step["x0"]) != mask_id  # the reference may predict it, this package never does
    assert event.predicted[comparable].tolist() == np.array(step["x0"])[comparable].tolist(), where
    np.testing.assert_allclose(
        event.confidence[comparable],
        np.array(step["confidence"])[comparable],
        rtol=0,
        atol=CONFIDENCE_ATOL,
        err_msg=where,
    )
    assert list(event.mask_transfer) == step.get("mask_transfer", step.get("transfer")), where
    assert list(event.edit_transfer) == step.get("edit_transfer", []), where
