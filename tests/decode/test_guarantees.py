"""What must hold for any model and any input: an end, text without masks, same draws, eos rules, errors."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_denoisers import EDITING, EOS, MASK, VOCAB, FakeDenoiser, config, constant, decode, hashed_model

from oled_jax.config import DecodingConfig
from oled_jax.decode.block_diffusion import BlockDiffusion, Prediction, token_ids
from oled_jax.decode.events import BlockEvent
from oled_jax.decode.sampling import predict, request_numbers, row_keys
from oled_jax.errors import UsageError
from oled_jax.passes import PassKind


def test_endless_edits_are_bounded() -> None:
    def alternating(prefix: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.where(block == 1, 2, 1).astype(np.int32), np.ones(len(block), np.float32)

    settings = config(editing=True, gen_length=8, max_post_steps=5)
    _, results = decode([[]], settings, FakeDenoiser(alternating))
    # Each block: one pass fills it, five edit it; then one commit, but not for the last block.
    assert results[0].passes == {"prefill": 0, "denoise": 2, "edit": 10, "commit": 1}


@cache
def jitted_predict(temperature: float, editing: bool) -> Any:
    settings = {"temperature": temperature, "editing": editing, "top_k": None, "top_p": None}
    return jax.jit(partial(predict, mask_id=MASK, **settings))


class LogitsDenoiser(FakeDenoiser):
    """The real sampler on logits that depend on the row's tokens; `mask_bonus` makes the mask attractive."""

    def __init__(self, settings: DecodingConfig, prompts: list[list[int]], *, mask_bonus: float = 0.0):
        super().__init__(self._predict, length=128)
        self._seed, self._requests, self._bonus = settings.seed, request_numbers(prompts), mask_bonus
        self._predict_fn = jitted_predict(settings.temperature, settings.editing)
        self._pass_index = 0

    def forward(self, kind: PassKind, tokens: np.ndarray, *rest: Any) -> Prediction | None:
        self._order = iter(np.flatnonzero(rest[1] & ~rest[2]).tolist())
        prediction = super().forward(kind, tokens, *rest)
        self._pass_index += 1
        return prediction

    def _predict(self, prefix: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        token, _ = hashed_model(prefix, block)
        logits = np.random.default_rng(int(token.sum())).normal(size=(1, len(block), VOCAB)).astype(np.float32)
        logits[..., MASK] += self._bonus
        row = next(self._order)
        key = row_keys(self._seed, self._requests[row : row + 1], self._pass_index)
        tokens, confidence = self._predict_fn(jnp.asarray(logits), key)
        return np.asarray(tokens[0]), np.asarray(confidence[0])


@pytest.mark.parametrize("editing", EDITING)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_wants_only_masks_still_ends_with_text(editing: bool, temperature: float) -> None:
    settings = config(editing=editing, temperature=temperature, eos_id=-1, minimal_topk=3, max_post_steps=4)
    prompts = [[1, 2, 3], [MASK, 1, 1, 1, MASK]]
    _, results = decode(prompts, settings, LogitsDenoiser(settings, prompts, mask_bonus=1e3))
    for result in results.values():
        assert len(result.output_ids) == 10
        assert MASK not in result.output_ids
        assert result.passes[PassKind.DENOISE] + result.passes[PassKind.EDIT] <= 4 * (4 + 4)
    assert results[1].canvas[0] == MASK  # in a whole prompt block it stays
    assert results[1].canvas[4] != MASK  # in the shared block it is decoded


def test_same_seed_same_text_whatever_the_batch() -> None:
    def texts(prompts: list[list[int]], seed: int) -> list[tuple[int, ...]]:
        settings = config(temperature=1.0, seed=seed, eos_id=-1)
        _, results = decode(prompts, settings, LogitsDenoiser(settings, prompts))
        return [results[row].output_ids for row in range(len(prompts))]

    batch = texts([[1, 2], [3], [1, 2]], seed=5)
    assert batch == texts([[1, 2], [3], [1, 2]], seed=5)
    assert [batch[0]] == texts([[1, 2]], seed=5)
    assert [batch[1]] == texts([[3]], seed=5)
    assert batch[0] != batch[2]
    assert batch != texts([[1, 2], [3], [1, 2]], seed=6)


def test_eos_in_the_prompt_neither_ends_nor_empties_the_answer() -> None:
    for early in (False, True):
        for editing in EDITING:
            settings = config(editing=editing, eos_early_stop=early, eos_id=7)
            _, results = decode([[7, 1, 7, 2, 7]], settings, FakeDenoiser(constant(3)))
            assert results[0].output_ids == (3,) * 10


def test_early_stop_inside_a_block_waits_for_the_left_side() -> None:
    def eos_second(prefix: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.array([3, EOS, 3, 3], np.int32), np.array([0.8, 0.9, 0.2, 0.1], np.float32)

    events, results = decode([[]], config(threshold=2.0, eos_early_stop=True), FakeDenoiser(eos_second))
    # The step that completes the left side writes no eos, so the block goes on to its end.
    assert results[0].passes[PassKind.DENOISE] == 4
    assert (results[0].output_ids, results[0].finish) == ((3, EOS), "eos")
    assert [e.tokens for e in events if isinstance(e, BlockEvent)] == [(3, EOS)]


def test_early_stop_never_returns_more_than_gen_length() -> None:
    def eos_last(prefix: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.array([3, 3, 3, EOS], np.int32), np.ones(4, np.float32)

    for editing in EDITING:
        settings = config(gen_length=2, editing=editing, eos_early_stop=True)
        _, results = decode([[]], settings, FakeDenoiser(eos_last))
        assert (results[0].output_ids, results[0].finish) == ((3, 3), "length")


@pytest.mark.parametrize(
    ("prompt", "culprit"),
    [
        ([1, -3], "prompt 1: -3 at position 1"),
        ([2**40], "prompt 1: 1099511627776 at position 0"),
        ([1.5], "prompt 1 must be a flat sequence of integer"),
        ([[1, 2], [3, 4]], "prompt 1 must be a flat sequence of integer"),
        ("text", "prompt 1 must be a flat sequence of integer"),
        (7, "prompt 1 must be a flat sequence of integer"),
        ([True], "prompt 1 must be a flat sequence of integer"),
        ([1, [2, 3]], "prompt 1 must be a flat sequence of integer"),
        (None, "prompt 1 must be a flat sequence of integer"),
        ([2**70], "prompt 1 must be a flat sequence of integer"),
    ],
)
def test_bad_prompts_are_named(prompt: Any, culprit: str) -> None:
    with pytest.raises(UsageError, match=culprit):
        token_ids(1, prompt)


def test_bad_prompts_are_refused_before_anything_runs() -> None:
    denoiser = FakeDenoiser()
    with pytest.raises(UsageError, match="prompt 1: -3 at position 1 is not a token id"):
        BlockDiffusion(denoiser, config()).run([[1] * 8, [1, -3]])
    assert denoiser.prefills == 0


def test_no_prompts_no_events() -> None:
    assert decode([], config()) == ([], {})


def test_broken_predictions_are_refused() -> None:
    with pytest.raises(RuntimeError, match="row 0: the denoiser predicted the mask token 15"):
        decode([[1]], config(), FakeDenoiser(constant(MASK)))
    with pytest.raises(RuntimeError, match="row 0: the model's probabilities are NaN"):
        decode([[1]], config(), FakeDenoiser(constant(3, float("nan"))))
