"""Folded commits in the block loop: the text and the passes of a run that commits, without the commit passes."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from fake_denoisers import EDITING, FakeDenoiser, config, constant, decode, random_config, random_prompt

from oled_jax.decode.events import BlockEvent, Event, PassEvent
from oled_jax.folding import find_folds, first_tokens, own_tokens, place_blocks
from oled_jax.passes import PassKind


def described(events: list[Event], row: int) -> list[tuple[Any, ...]]:
    """What happened to a row, commit passes apart."""
    passes = [e for e in events if e.row == row and isinstance(e, PassEvent) and e.kind is not PassKind.COMMIT]
    blocks = [(e.block, e.tokens) for e in events if e.row == row and isinstance(e, BlockEvent)]
    return [*((e.kind, e.block, e.step, e.mask_transfer, e.edit_transfer) for e in passes), *blocks]


@pytest.mark.parametrize("editing", EDITING)
def test_the_text_of_a_run_that_commits(editing: bool) -> None:
    """The fake model sees what the cache holds, so a block that no pass stored would change what follows."""
    rng = np.random.default_rng(3)
    folded_blocks = 0
    for _ in range(12):
        settings = random_config(rng, editing=editing)
        prompts = [random_prompt(rng) for _ in range(5)]
        alone = [decode([prompt], settings) for prompt in prompts]
        for places in (1, 3, 5):
            denoiser = FakeDenoiser()
            events, results = decode(prompts, dataclasses.replace(settings, fold_commits=True), denoiser, places)
            for row, (expected_events, expected) in enumerate(alone):
                assert described(events, row) == described(expected_events, 0)
                assert results[row].canvas.tolist() == expected[0].canvas.tolist()
                assert results[row].passes == {**expected[0].passes, PassKind.COMMIT: 0}
            folds = sum(int(call["folds"].sum()) for call in denoiser.calls)
            assert folds == sum(expected[0].passes[PassKind.COMMIT] for _, expected in alone)
            folded_blocks += folds
    assert folded_blocks > 50


@pytest.mark.parametrize("length", [0, 3, 4, 5])
def test_a_text_of_one_block_neither_folds_nor_commits(length: int) -> None:
    denoiser = FakeDenoiser()
    settings = config(fold_commits=True, eos_id=-1, gen_length=4 - length % 4)
    _, results = decode([[1] * length], settings, denoiser)
    assert results[0].passes[PassKind.COMMIT] == 0
    assert not any(call["folds"].any() for call in denoiser.calls)


def test_rows_fold_when_their_own_block_begins() -> None:
    denoiser = FakeDenoiser(constant(3, 0.1))
    decode([[1, 1, 1], []], config(threshold=2.0, eos_id=-1, fold_commits=True), denoiser)
    assert [call["folds"].tolist() for call in denoiser.calls[:6]] == [
        [False, False], [True, False], [False, False], [False, False], [False, True], [True, False],
    ]  # fmt: skip


def test_how_two_blocks_lie_in_a_pass() -> None:
    folds = np.array([True, False, False])
    own, finished = np.array([[1, 2], [3, 4], [5, 6]]), np.array([[7, 8], [0, 0], [0, 0]])
    placed = place_blocks(folds, own, finished=finished, empty=9)
    assert placed.tolist() == [[7, 8, 1, 2], [3, 4, 9, 9], [5, 6, 9, 9]]
    assert placed.ravel()[own_tokens(folds, placed.size)].tolist() == own.ravel().tolist()
    assert placed.ravel()[first_tokens(folds, placed.size)].tolist() == [7, 8, 3, 4, 5, 6]
    active = np.array([[True], [True], [False]]).repeat(2, axis=1)  # the last row has ended
    mask = place_blocks(folds, active, finished=True, empty=False).ravel()
    np.testing.assert_array_equal(find_folds(2, mask, 3, PassKind.DENOISE), folds)
    assert find_folds(2, mask, 3, PassKind.PREFILL) is find_folds(4, mask, 3, PassKind.DENOISE) is None
    nobody = np.zeros(3, bool)
    assert place_blocks(nobody, own, finished=finished, empty=9) is own
    assert own.ravel()[own_tokens(None, own.size)].tolist() == own.ravel().tolist()
