"""The block loop with fake models: the reference's semantics, batches, termination, events."""

import json

import numpy as np
import pytest
from fake_denoisers import (
    EDITING,
    MASK,
    FakeDenoiser,
    config,
    constant,
    decode,
    random_config,
    random_prompt,
    reference_generate,
)

from oled_jax.decode.events import BlockEvent, FinishEvent, PassEvent
from oled_jax.passes import PassKind


@pytest.mark.parametrize("editing", EDITING)
def test_equals_the_uncached_reference_loop(editing: bool) -> None:
    rng = np.random.default_rng(0)
    finishes = set()
    for _ in range(60):
        prompt, settings = random_prompt(rng), random_config(rng, editing=editing)
        events, results = decode([prompt], settings)
        output, canvas, calls = reference_generate(prompt, settings)
        forward = [e for e in events if isinstance(e, PassEvent) and e.kind is not PassKind.COMMIT]
        assert list(results[0].output_ids) == output[: settings.gen_length], (prompt, settings)
        assert results[0].canvas.tolist() == canvas, (prompt, settings)
        assert len(forward) == calls, (prompt, settings)
        finishes.add(results[0].finish)
    assert finishes == {"eos", "length"}


@pytest.mark.parametrize("editing", EDITING)
def test_a_batch_of_unequal_rows_equals_each_alone(editing: bool) -> None:
    rng = np.random.default_rng(1)
    for _ in range(6):
        settings = random_config(rng, editing=editing)
        prompts = [random_prompt(rng) for _ in range(5)]
        events, results = decode(prompts, settings)
        for row, prompt in enumerate(prompts):
            alone, result = decode([prompt], settings)
            mine = [e for e in events if e.row == row and isinstance(e, PassEvent)]
            theirs = [e for e in alone if isinstance(e, PassEvent)]
            assert [(e.kind, e.block, e.step, e.mask_transfer, e.edit_transfer) for e in mine] == [
                (e.kind, e.block, e.step, e.mask_transfer, e.edit_transfer) for e in theirs
            ]
            assert results[row].output_ids == result[0].output_ids
            assert results[row].passes == result[0].passes
            assert (results[row].canvas == result[0].canvas).all()


@pytest.mark.parametrize("editing", EDITING)
@pytest.mark.parametrize("places", [1, 2, 4])
def test_rows_that_wait_for_a_place_become_what_they_are_alone(editing: bool, places: int) -> None:
    rng = np.random.default_rng(2)
    settings = random_config(rng, editing=editing)
    prompts = [random_prompt(rng) for _ in range(7)]
    denoiser = FakeDenoiser()
    _, results = decode(prompts, settings, denoiser, places)
    assert [request for _, request in denoiser.entered] == list(range(7))
    assert {place for place, _ in denoiser.entered} == set(range(places))
    assert {len(call["tokens"]) for call in denoiser.calls} == {places}
    for row, prompt in enumerate(prompts):
        result = decode([prompt], settings)[1][0]
        assert results[row].output_ids == result.output_ids
        assert results[row].passes == result.passes
        assert (results[row].waited_s > 0) or row < places
    before_the_last_entered = denoiser.outcomes[: denoiser.passes_at_entry[-1]]
    assert all(outcome.active.all() for outcome in before_the_last_entered), "a place was idle while a request waited"


@pytest.mark.parametrize("editing", EDITING)
@pytest.mark.parametrize("gen_length", [1, 3, 4, 5, 11])
def test_lengths_around_the_block_boundary(editing: bool, gen_length: int) -> None:
    settings = config(editing=editing, eos_id=-1, gen_length=gen_length)
    for P in range(10):
        prompt = [1] * P
        denoiser = FakeDenoiser()
        events, results = decode([prompt], settings, denoiser)
        assert len(results[0].output_ids) == gen_length
        assert results[0].finish == "length"
        assert results[0].canvas[:P].tolist() == prompt
        assert denoiser.prefills == results[0].passes[PassKind.PREFILL] == int(P >= 4)
        commits = [e.block for e in events if isinstance(e, PassEvent) and e.kind is PassKind.COMMIT]
        blocks = range(P // 4, -(-(P + gen_length) // 4))
        # Never after the last block; elsewhere only if the last pass over the block wrote something.
        assert set(commits) <= set(blocks[:-1])
        if not editing:
            assert commits == list(blocks[:-1])


def test_prefill_gets_whole_blocks_only() -> None:
    seen = []

    class Recorder(FakeDenoiser):
        def prefill(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
            seen.append((tokens.copy(), lengths.copy()))
            super().prefill(tokens, lengths)

    decode([[1] * 9, [2] * 3, [], [3] * 4], config(), Recorder())
    ((tokens, lengths),) = seen
    assert lengths.tolist() == [8, 0, 0, 4]
    assert tokens.tolist() == [[1] * 8, [MASK] * 8, [MASK] * 8, [3] * 4 + [MASK] * 4]


@pytest.mark.parametrize("editing", EDITING)
def test_gen_length_0_runs_no_pass(editing: bool) -> None:
    for prompt in ([], [1], [1] * 4, [1] * 6):
        denoiser = FakeDenoiser()
        events, results = decode([prompt], config(editing=editing, gen_length=0), denoiser)
        assert [type(e) for e in events] == [FinishEvent]
        assert results[0].output_ids == ()
        assert results[0].finish == "length"
        assert (results[0].ttft_block_s, results[0].tpot_s) == (None, None)
        assert (denoiser.prefills, denoiser.calls) == (0, [])


@pytest.mark.parametrize("editing", EDITING)
def test_block_events_join_to_the_output_and_finish_comes_last(editing: bool) -> None:
    rng = np.random.default_rng(3)
    for _ in range(8):
        settings = random_config(rng, editing=editing)
        prompts = [random_prompt(rng) for _ in range(3)]
        events, results = decode(prompts, settings)
        for row, result in results.items():
            mine = [e for e in events if e.row == row]
            assert isinstance(mine[-1], FinishEvent)
            joined = [t for e in mine if isinstance(e, BlockEvent) for t in e.tokens]
            assert tuple(joined) == result.output_ids
            assert MASK not in joined
            assert (result.finish == "eos") == (result.output_ids[-1:] == (settings.eos_id,))
            assert 0 <= result.ttft_prefill_s <= result.ttft_block_s <= result.ttft_prefill_s + result.decode_s
            assert result.tpot_s == pytest.approx(result.decode_s / len(result.output_ids))
            counted = {kind: sum(isinstance(e, PassEvent) and e.kind is kind for e in mine) for kind in PassKind}
            assert {**counted, PassKind.PREFILL: result.passes[PassKind.PREFILL]} == result.passes


@pytest.mark.parametrize("editing", EDITING)
def test_outcomes_tell_what_was_written(editing: bool) -> None:
    rng = np.random.default_rng(4)
    prompts = [[1, 2, MASK], [5] * 6, []]
    for _ in range(10):
        denoiser = FakeDenoiser()
        settings = random_config(rng, editing=editing)
        decode(prompts, settings, denoiser)
        assert len(denoiser.outcomes) == len(denoiser.calls)
        for outcome, call in zip(denoiser.outcomes, denoiser.calls, strict=True):
            before, after = outcome.tokens_before, outcome.tokens_after
            assert (outcome.masked_before == ((before == MASK) & outcome.active[:, None])).all()
            assert (outcome.written == (before != after)).all()
            assert (outcome.edited == (outcome.written & (before != MASK))).all()
            assert (outcome.confidence[call["is_prompt"]] == 1.0).all()
            assert (outcome.starts % settings.block_length == 0).all()
            assert not (call["is_prompt"] & outcome.masked_before).any()  # a mask in the prompt is not prompt
            running = outcome.active & ~call["commit"]
            masks = outcome.masked_before[running].any()
            expected = PassKind.DENOISE if masks else PassKind.EDIT if running.any() else PassKind.COMMIT
            assert outcome.kind is call["kind"] is expected
            assert not outcome.written[call["commit"]].any()


def test_commit_shares_the_pass_of_rows_that_denoise() -> None:
    denoiser = FakeDenoiser(constant(3, 0.1))
    decode([[1, 1, 1], []], config(threshold=2.0, eos_id=-1), denoiser)
    assert [(c["kind"].value, c["commit"].tolist()) for c in denoiser.calls[:6]] == [
        ("denoise", [False, False]),
        ("denoise", [True, False]),
        ("denoise", [False, False]),
        ("denoise", [False, False]),
        ("denoise", [False, True]),
        ("denoise", [False, False]),
    ]
    shared = denoiser.outcomes[1]
    assert shared.confidence[0].tolist() == pytest.approx([1.0, 1.0, 1.0, 0.1])  # kept from the pass before


def test_no_commit_after_a_pass_that_changed_nothing() -> None:
    """The confirming pass of 2.1 saw the final tokens, so its keys are final too."""
    settings = config(editing=True, gen_length=8, eos_id=-1)
    _, results = decode([[]], settings, FakeDenoiser(constant(3)))
    assert results[0].passes == {"prefill": 0, "denoise": 2, "edit": 2, "commit": 0}


def test_passes_serialize_by_name() -> None:
    _, results = decode([[1]], config())
    assert set(json.loads(json.dumps(results[0].passes))) == {"prefill", "denoise", "commit", "edit"}
