"""Greedy choice, filters and draws. The filters' expectations are recorded from the reference."""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from oled_jax.decode.sampling import filter_logits, predict, request_numbers, row_keys

CONSTANT_ROW = 4  # of the recorded logits
NOWHERE = -1  # a mask id outside the vocabulary: nothing is forbidden
DEFAULTS: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": None,
    "top_p": None,
    "editing": False,
    "mask_id": NOWHERE,
}


@pytest.fixture(scope="module")
def sampler(golden: Path) -> dict[str, np.ndarray]:
    return load_file(golden / "llada2-sampler.safetensors")


@cache
def jitted_predict(**settings: Any) -> Any:
    return jax.jit(partial(predict, **settings))


def chosen(logits: Any, key: jax.Array | None = None, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """`predict` under jit, as the engine runs it. `logits` [T V] for one row, or [B T V]."""
    batch = jnp.asarray(logits, jnp.float32)
    batch = batch if batch.ndim == 3 else batch[None]
    tokens, confidence = jitted_predict(**{**DEFAULTS, **changes})(batch, key)
    return np.asarray(tokens), np.asarray(confidence)


def keys(seed: int, B: int = 1, pass_index: int = 0) -> jax.Array:
    return row_keys(seed, np.arange(B, dtype=np.int32), pass_index)


def test_filters_of_the_reference(golden: Path, sampler: dict[str, np.ndarray]) -> None:
    filters = json.loads((golden / "llada2-sampler.json").read_text())["filters"]
    assert len(filters) == 12
    logits = sampler["logits"]
    for entry in filters:
        i = entry.pop("index")
        filtered = filter_logits(jnp.asarray(logits), **entry)
        ours, theirs = np.asarray(jnp.isfinite(filtered)), sampler[f"kept.{i}"].astype(bool)
        probabilities = np.asarray(jax.nn.softmax(filtered, axis=-1))
        for row in range(len(logits)):
            if row == CONSTANT_ROW and entry["top_p"] is not None:
                # 40 equal entries: p falls on a step of the cumulative sum, whose rounding decides about one.
                assert abs(int(ours[row].sum()) - int(theirs[row].sum())) <= 1, entry
                continue
            # Which of several equal logits top-p keeps is up to the sort, so compare values, not places.
            assert sorted(logits[row][ours[row]]) == sorted(logits[row][theirs[row]]), (entry, row)
            np.testing.assert_allclose(
                np.sort(probabilities[row]),
                np.sort(sampler[f"probs.{i}"][row]),
                rtol=0,
                atol=1e-6,
                err_msg=str(entry),
            )


def test_top_p_keeps_the_lowest_index_of_equal_logits() -> None:
    kept = jnp.isfinite(filter_logits(jnp.zeros((1, 10)), temperature=1.0, top_k=None, top_p=0.25))
    assert np.flatnonzero(kept).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("editing", "version"), [(False, "20"), (True, "21")])
def test_greedy_of_the_reference(sampler: dict[str, np.ndarray], editing: bool, version: str) -> None:
    tokens, confidence = chosen(sampler["logits"], editing=editing)
    assert tokens[0].tolist() == sampler[f"greedy{version}_token"].tolist()
    np.testing.assert_allclose(confidence[0], sampler[f"greedy{version}_prob"], rtol=0, atol=1e-6)


def test_near_tie_is_decided_by_probability_in_20_and_by_logit_in_21(sampler: dict[str, np.ndarray]) -> None:
    logits = sampler["near_tie_logits"]
    assert chosen(logits, editing=False)[0][0].tolist() == sampler["near_tie_token20"].tolist()
    assert chosen(logits, editing=True)[0][0].tolist() == sampler["near_tie_token21"].tolist()


@pytest.mark.parametrize("editing", [False, True])
def test_greedy_takes_the_second_best_for_the_mask_with_its_true_probability(editing: bool) -> None:
    logits = np.log([[0.1, 0.6, 0.3]])
    tokens, confidence = chosen(logits, mask_id=1, editing=editing)
    assert tokens.tolist() == [[2]]
    np.testing.assert_allclose(confidence, [[0.3]], atol=1e-6)


def test_greedy_survives_a_mask_that_takes_all_probability() -> None:
    tokens, confidence = chosen([[0.0, 1e4, 0.0]], mask_id=1)
    assert tokens.tolist() == [[0]]
    assert confidence.tolist() == [[0.0]]


def test_temperature_0_ignores_the_filters_and_needs_no_key() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 9))
    plain, filtered = chosen(logits), chosen(logits, top_k=1, top_p=0.1)
    assert (plain[0] == filtered[0]).all()
    assert (plain[1] == filtered[1]).all()
    with pytest.raises(ValueError, match="needs random keys"):
        chosen(logits, temperature=0.5)


def test_draw_never_takes_the_mask_and_filters_without_it() -> None:
    logits = np.tile(np.log([0.05, 0.8, 0.1, 0.05]), (64, 1))
    tokens, confidence = chosen(logits, keys(0), temperature=1.0, top_k=1, mask_id=1)
    assert set(tokens.ravel().tolist()) == {2}  # the mask does not use up the one place
    assert (confidence == 1.0).all()


def test_confidence_of_a_draw_is_the_probability_after_filtering() -> None:
    logits = np.tile(np.log([0.5, 0.3, 0.15, 0.05]), (4096, 1))
    tokens, confidence = chosen(logits, keys(1), temperature=1.0, top_k=2)
    expected = np.array([0.625, 0.375])
    np.testing.assert_allclose(confidence[0], expected[tokens[0]], atol=1e-6)
    # Binomial with n = 4096: five standard deviations are 0.038.
    assert abs((tokens == 0).mean() - 0.625) < 0.038


def test_temperature_sharpens_the_draw() -> None:
    logits = np.tile(np.log([0.6, 0.4]), (4096, 1))
    tokens, _ = chosen(logits, keys(2), temperature=0.5)
    assert abs((tokens == 0).mean() - 0.36 / 0.52) < 0.038


def test_a_row_draws_the_same_alone_and_in_a_batch() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 8, 50))
    together, _ = chosen(logits, keys(7, B=3), temperature=1.0, top_p=0.9)
    for row in range(3):
        alone, _ = chosen(logits[row], keys(7, B=3)[row : row + 1], temperature=1.0, top_p=0.9)
        assert (alone[0] == together[row]).all()


def test_keys_differ_by_seed_request_and_pass() -> None:
    data = {
        tuple(np.asarray(jax.random.key_data(row_keys(seed, np.array([request], np.int32), index))).ravel().tolist())
        for seed in (0, 1, 2**32 - 1)
        for request in range(3)
        for index in range(3)
    }
    assert len(data) == 27
    traced = jax.jit(row_keys)(jnp.uint32(1), jnp.arange(2, dtype=jnp.int32), jnp.int32(5))
    assert (jax.random.key_data(traced) == jax.random.key_data(row_keys(1, jnp.arange(2, dtype=jnp.int32), 5))).all()


def test_request_numbers_tell_equal_prompts_apart_and_nothing_else() -> None:
    assert request_numbers([[1, 2], [3], [1, 2], [], [1, 2]]).tolist() == [0, 0, 1, 0, 2]
    assert request_numbers([]).tolist() == []
