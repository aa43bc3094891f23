"""RND1's acceptance rules on rigged values, and every rule's guarantees: it ends, and no mask is left."""

from typing import Any

import numpy as np
import pytest
from fake_denoisers import EOS, MASK, FakeDenoiser, Model, config, hashed_model

from oled_jax.decode.block_diffusion import BlockDiffusion, Prediction
from oled_jax.decode.entropy import EntropyBoundRule, EntropyRule
from oled_jax.decode.events import FinishEvent, PassEvent, Result
from oled_jax.decode.registry import RULES, acceptance_rule
from oled_jax.decode.unmask import BlockState
from oled_jax.decode.whole_text import one_block, rounded_up
from oled_jax.errors import UsageError
from oled_jax.passes import PassKind


class EntropyDenoiser(FakeDenoiser):
    """Arbitrary but fixed entropies beside the predictions."""

    def forward(self, kind: PassKind, tokens: np.ndarray, *rest: Any) -> Prediction | None:
        prediction = super().forward(kind, tokens, *rest)
        if prediction is None:
            return None
        rng = np.random.default_rng(int(tokens.sum()))
        return prediction._replace(entropy=rng.random(tokens.shape).astype(np.float32))


def state(tokens: list[int], entropy: list[float], **changes: Any) -> BlockState:
    fields: dict[str, Any] = {
        "tokens": np.array(tokens, np.int32),
        "predicted": np.full(len(tokens), 9, np.int32),
        "confidence": np.linspace(0.9, 0.1, len(tokens), dtype=np.float32),
        "is_prompt": np.zeros(len(tokens), bool),
        "step": 0,
        "post_steps": 0,
        "to_fill": tokens.count(MASK),
        "entropy": np.array(entropy, np.float32),
    }
    return BlockState(**{**fields, **changes})


def test_highest_entropies_stay_masked_and_other_tokens_do_not_count() -> None:
    rule = EntropyRule(mask_id=MASK, steps=2)
    found = rule.accept(state([MASK, 3, MASK, MASK, MASK], [0.5, 0.0, 2.0, 0.5, 0.1]))
    assert np.flatnonzero(found.mask_transfer).tolist() == [0, 4]  # of equal entropies the lowest index goes first
    assert not found.done


@pytest.mark.parametrize(
    ("masks", "steps", "written"),
    [
        (19, 8, [3, 2, 3, 2, 2, 3, 2, 2]),
        (9, 16, [1] * 9),  # steps that would write nothing take no pass
        (5, 1, [5]),
        (1, 256, [1]),
    ],
)
def test_schedule(masks: int, steps: int, written: list[int]) -> None:
    rule, tokens, found = EntropyRule(mask_id=MASK, steps=steps), [MASK] * masks, []
    while MASK in tokens:
        accepted = rule.accept(state(tokens, [0.0] * masks, to_fill=masks))
        found.append(int(accepted.mask_transfer.sum()))
        tokens = np.where(accepted.mask_transfer, 9, tokens).tolist()
        assert accepted.done == (MASK not in tokens)
    assert found == written


def test_bounded_entropy_counts_all_but_the_largest() -> None:
    rule = EntropyBoundRule(mask_id=MASK, steps=9, bound=1.0)
    tokens = [MASK, MASK, 3, MASK, MASK]
    entropy = [0.6, 5.0, 0.0, 0.4, 0.1]  # by falling confidence: 0, 0.6, 1.0, 1.1 besides the largest so far
    assert np.flatnonzero(rule.accept(state(tokens, entropy)).mask_transfer).tolist() == [0, 1, 3]
    assert rule.accept(state(tokens, entropy, step=8)).done
    strict = EntropyBoundRule(mask_id=MASK, steps=9, bound=0.0)
    assert np.flatnonzero(strict.accept(state(tokens, entropy)).mask_transfer).tolist() == [0]


def results_of(
    prompts: list[list[int]], rule: str, model: Model = hashed_model, **changes: Any
) -> tuple[dict[int, Result], EntropyDenoiser]:
    settings = config(rule=rule, editing=rule == "edit", whole_text=RULES[rule].whole_text, **changes)
    if settings.whole_text:
        settings = one_block(prompts, settings)
    denoiser = EntropyDenoiser(model)
    events = list(BlockDiffusion(denoiser, settings).run(prompts))
    for event in events:
        if isinstance(event, PassEvent) and event.kind is not PassKind.COMMIT:
            assert not set(event.mask_transfer) & set(np.flatnonzero(event.tokens_before != MASK).tolist())
    return {event.row: event.result for event in events if isinstance(event, FinishEvent)}, denoiser


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("steps", [1, 3, 50])
def test_every_rule_ends_with_text(rule: str, steps: int) -> None:
    prompts = [[1, 2, 3], [1, MASK, 4, 2, 2, 5, 1, 1, MASK]]
    results, denoiser = results_of(prompts, rule, steps=steps, threshold=0.9, eos_id=-1)
    for row, prompt in enumerate(prompts):
        assert len(results[row].output_ids) == 10
        assert MASK not in results[row].output_ids
        given = np.array(prompt) != MASK
        np.testing.assert_array_equal(results[row].canvas[: len(prompt)][given], np.array(prompt)[given])
    assert len(denoiser.outcomes) < 100


def test_a_whole_text_is_one_block_with_something_behind_it() -> None:
    results, denoiser = results_of([[1, 2, 3], [4]], "entropy", steps=4, pad_id=EOS)
    assert {call["kind"] for call in denoiser.calls} == {PassKind.DENOISE}
    assert denoiser.prefills == 0
    assert results[0].passes[PassKind.DENOISE] == 4
    for row, length in enumerate((3, 1)):
        assert (results[row].canvas[length + 10 :] == EOS).all()
        assert results[row].finish == ("eos" if EOS in results[row].output_ids else "length")
    before = denoiser.outcomes[0]
    assert before.masked_before.sum(axis=1).tolist() == [10, 10]


def test_early_stop_saves_passes_and_changes_no_token() -> None:
    def eos_third(prefix: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.full(len(block), 3, np.int32)
        tokens[3] = EOS
        return tokens, np.ones(len(block), np.float32)

    found = [results_of([[1]], "entropy", eos_third, steps=9, eos_early_stop=early)[0][0] for early in (False, True)]
    assert found[0].output_ids == found[1].output_ids == (3, 3, EOS)
    assert (found[0].finish, found[1].finish) == ("eos", "eos")
    assert found[1].passes[PassKind.DENOISE] < found[0].passes[PassKind.DENOISE] == 9


def test_what_stands_behind_a_text_is_never_a_mask() -> None:
    assert config(whole_text=True, pad_id=3).end_id == 3
    assert config(whole_text=True).end_id == EOS
    assert config(whole_text=True, eos_id=-1).end_id == 0
    assert config(whole_text=True, eos_id=-1, mask_id=0).end_id == 1
    with pytest.raises(UsageError, match="pad_id is 15, no pad"):
        config(pad_id=MASK)


def test_masks_in_the_prompt_are_an_infilling() -> None:
    results, _ = results_of([[1, MASK, MASK, 2]], "entropy", steps=2, gen_length=0)
    assert results[0].output_ids == ()
    assert MASK not in results[0].canvas
    assert results[0].passes[PassKind.DENOISE] == 2


@pytest.mark.parametrize(("prompt", "said"), [([], "prompt 0 is empty"), ([MASK, 1], "prompt 0 begins with the mask")])
def test_a_text_needs_a_first_token(prompt: list[int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        one_block([prompt], config(rule="entropy", whole_text=True))


def test_a_rule_of_another_way_to_decode_is_refused() -> None:
    with pytest.raises(UsageError, match="'entropy' decodes whole texts"):
        acceptance_rule(config(rule="entropy"))
    with pytest.raises(UsageError, match="'static' decodes block by block"):
        acceptance_rule(config(rule="static", whole_text=True))
    with pytest.raises(UsageError, match="'magic' is unknown"):
        acceptance_rule(config(rule="magic"))
    with pytest.raises(UsageError, match="rule is 'static', but editing is True"):
        config(rule="static", editing=True)


def test_lengths_are_rounded_to_few_values() -> None:
    assert [rounded_up(positions) for positions in (1, 64, 65, 513, 1000)] == [64, 64, 128, 640, 1024]
