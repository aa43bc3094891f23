"""Acceptance rules on rigged predictions, and the transfer schedules of the reference."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_denoisers import EOS, MASK

from oled_jax.config import DecodingConfig
from oled_jax.decode.entropy import EntropyBoundRule, EntropyRule
from oled_jax.decode.registry import RULES, acceptance_rule
from oled_jax.decode.unmask import (
    Acceptance,
    AcceptanceRule,
    BlockState,
    EditRule,
    SequentialRule,
    ThresholdRule,
    transfer_schedule,
)
from oled_jax.errors import UsageError


def accept(rule: AcceptanceRule, tokens: list[int], confidence: list[float], **changes: Any) -> Acceptance:
    state: dict[str, Any] = {"is_prompt": np.zeros(len(tokens), bool), "step": 0, "post_steps": 0, **changes}
    predicted = np.array(state.pop("predicted", [9] * len(tokens)), np.int32)
    return rule.accept(
        BlockState(
            tokens=np.array(tokens, np.int32),
            predicted=predicted,
            confidence=np.array(confidence, np.float32),
            **state,
        )
    )


def offsets(chosen: np.ndarray) -> list[int]:
    return np.flatnonzero(chosen).tolist()


def threshold_rule(threshold: float = 0.5, schedule: tuple[int, ...] = (1, 1, 1, 1)) -> ThresholdRule:
    return ThresholdRule(mask_id=MASK, threshold=threshold, schedule=schedule)


def edit_rule(**changes: Any) -> EditRule:
    fields = {"threshold": 0.5, "editing_threshold": 0.5, "max_post_steps": 2, "num_to_transfer": 1}
    return EditRule(mask_id=MASK, **{**fields, **changes})


def test_schedules_of_the_reference(golden: Path) -> None:
    schedules = json.loads((golden / "llada2-sampler.json").read_text())["schedules"]
    assert len(schedules) == 55
    for entry in schedules:
        assert list(transfer_schedule(entry["block_length"], entry["steps"])) == entry["schedule"], entry


def test_all_masks_above_the_threshold_are_filled() -> None:
    done = accept(threshold_rule(), [MASK, 3, MASK, MASK], [0.9, 0.9, 0.6, 0.2])
    assert offsets(done.mask_transfer) == [0, 2]
    assert not done.done
    assert not done.edit_transfer.any()


def test_threshold_is_strict_in_float32() -> None:
    rule = threshold_rule(threshold=0.1, schedule=(2,))  # 0.1 is not a float32
    above = float(np.nextafter(np.float32(0.1), np.float32(1)))
    assert offsets(accept(rule, [MASK] * 4, [0.1, above, 0.05, above]).mask_transfer) == [1, 3]
    assert offsets(accept(rule, [MASK] * 4, [above, 0.1, 0.05, 0.1]).mask_transfer) == [0, 1]


def test_too_few_above_the_threshold_takes_the_best_masked_ones() -> None:
    rule = threshold_rule(schedule=(3, 1))
    found = accept(rule, [MASK, 3, MASK, MASK, MASK], [0.9, 1.0, 0.1, 0.3, 0.2])
    assert offsets(found.mask_transfer) == [0, 3, 4]
    assert found.num_to_transfer == 3
    assert offsets(accept(rule, [3, 3, MASK, MASK, 3], [1, 1, 0.1, 0.1, 1]).mask_transfer) == [2, 3]


def test_equal_confidences_go_by_index() -> None:
    assert offsets(accept(threshold_rule(2.0, (2,)), [MASK] * 8, [0.7] * 8).mask_transfer) == [0, 1]


@pytest.mark.parametrize(("step", "schedule"), [(0, ()), (4, (1, 1, 1, 1)), (1, (4, 0, 0))])
def test_one_mask_is_filled_when_the_schedule_gives_none(step: int, schedule: tuple[int, ...]) -> None:
    found = accept(threshold_rule(2.0, schedule), [MASK, MASK, 3, 3], [0.1, 0.2, 1, 1], step=step)
    assert offsets(found.mask_transfer) == [1]


def test_done_when_the_last_mask_is_filled() -> None:
    assert accept(threshold_rule(), [3, 3, MASK, 3], [0.1] * 4).done


def test_edits_happen_while_masks_remain_and_spare_the_prompt() -> None:
    found = accept(
        edit_rule(),
        [5, 5, 9, MASK, 5, MASK],
        [0.9, 0.9, 0.9, 0.3, 0.5, 0.2],
        is_prompt=np.array([True] + [False] * 5),
    )
    assert offsets(found.edit_transfer) == [1]  # 0: prompt, 2: the same token, 4: not above the threshold
    assert offsets(found.mask_transfer) == [3]
    assert not found.done


def test_mask_in_the_prompt_is_filled_but_not_edited() -> None:
    prompt = np.array([True, True])
    assert offsets(accept(edit_rule(), [MASK, 5], [0.9, 0.9], is_prompt=prompt).mask_transfer) == [0]
    assert not accept(edit_rule(), [4, 5], [0.9, 0.9], is_prompt=prompt, post_steps=1).edit_transfer.any()


def test_full_block_takes_a_confirming_pass() -> None:
    assert not accept(edit_rule(), [9, 9, MASK], [0.9] * 3).done
    assert accept(edit_rule(), [9, 9, 9], [0.9] * 3, post_steps=1).done
    assert not accept(edit_rule(), [9, 5, 9], [0.9] * 3, post_steps=1).done


def test_post_steps_are_bounded_and_their_last_edits_kept() -> None:
    found = accept(edit_rule(), [9, 5, 9], [0.9] * 3, post_steps=2)
    assert found.done
    assert offsets(found.edit_transfer) == [1]
    assert accept(edit_rule(max_post_steps=0), [9, 5, MASK], [0.9] * 3).done


def test_num_to_transfer_beyond_the_masks() -> None:
    assert offsets(accept(edit_rule(num_to_transfer=9), [MASK, 5, MASK], [0.1] * 3).mask_transfer) == [0, 2]


def config(**changes: Any) -> DecodingConfig:
    return DecodingConfig(**{"mask_id": MASK, "eos_id": EOS, "block_length": 8, "gen_length": 16, **changes})


def test_no_editing_threshold_edits_nothing_and_needs_no_confirming_pass() -> None:
    rule = acceptance_rule(config(editing=True, editing_threshold=None))
    assert not accept(rule, [5, 5, 9, MASK], [1.0] * 4).edit_transfer.any()
    assert accept(rule, [5, 5, 9, MASK], [1.0] * 4).done


def test_registry() -> None:
    assert isinstance(acceptance_rule(config()), ThresholdRule)
    assert isinstance(acceptance_rule(config(editing=True)), EditRule)
    assert {name: type(entry.make(config())) for name, entry in RULES.items()} == {
        "threshold": ThresholdRule, "edit": EditRule, "dynamic": ThresholdRule, "static": ThresholdRule,
        "sequential": SequentialRule, "entropy": EntropyRule, "entropy-bound": EntropyBoundRule,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "schedule"),
    [
        ({"steps": 3}, (3, 3, 2)),
        ({"steps": 32, "gen_length": 5}, (2, 2, 2, 1, 1)),
        ({"minimal_topk": 4}, (2, 2, 2, 2)),
        ({"minimal_topk": 17}, (8,)),  # the reference: no step at all
    ],
)
def test_schedule_of_a_configuration(changes: dict[str, Any], schedule: tuple[int, ...]) -> None:
    assert ThresholdRule.from_config(config(**changes)).schedule == schedule


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"gen_length": -1}, "gen_length is -1"),
        ({"block_length": 0}, "block_length is 0"),
        ({"minimal_topk": 0}, "minimal_topk is 0"),
        ({"num_to_transfer": 0}, "num_to_transfer is 0"),
        ({"eos_id": -2}, "eos_id is -2"),
        ({"eos_id": MASK}, "mask_id and eos_id are both 15"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"editing_threshold": float("inf")}, "editing_threshold is inf"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1e-30}, "temperature is 1e-30"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_configuration_names_the_culprit(changes: dict[str, Any], culprit: str) -> None:
    with pytest.raises(UsageError, match=culprit):
        config(**changes)
