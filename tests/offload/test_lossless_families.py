"""Lossless for the families whose router, attention or decoding differ from LLaDA2's (see test_lossless.py)."""

import functools
from typing import Any

import numpy as np
import pytest
from engines import build, open_golden, run

from oled_jax.config import DecodingConfig
from oled_jax.passes import PassKind
from oled_jax.prefix import KeptPrefix

L, E, K, SPARE = 3, 16, 4, 5
CAPACITIES = (1, K - 1, K, 9, E)
SLOTS = L * E + SPARE  # of the largest pool: with it, all capacities run the same programs
# One prompt of several prefill blocks and one shorter than a block.
PROMPTS = [[int(token) for token in np.random.default_rng(3).integers(0, 250, 23)], [5, 6, 7]]
SETTINGS: dict[str, dict[str, Any]] = {
    "sdar": {"rule": "dynamic", "block_length": 4, "threshold": 0.85},
    "rnd1": {"rule": "entropy", "whole_text": True, "steps": 5},
}


@pytest.fixture(scope="module", params=SETTINGS)
def family(request, golden):
    """Configuration, weights, and how a family is decoded."""
    config, source = open_golden(golden / f"{request.param}-tiny")
    return config, source, DecodingConfig(mask_id=252, eos_id=-1, gen_length=9, **SETTINGS[request.param])


def outcome(engine, decoding):
    """The requests one after the other: of each the output ids; then kind and logits of all passes."""
    ids = [run(engine, [prompt], decoding)[0].output_ids for prompt in PROMPTS]
    return ids, engine.recorded


@pytest.fixture(scope="module")
def yardstick(family):
    config, source, decoding = family
    return outcome(build(config, source, "lru", E), decoding)


def assert_same(found, expected, assert_logits=np.testing.assert_array_equal):
    assert found[0] == expected[0]
    for (kind, logits), (expected_kind, other) in zip(found[1], expected[1], strict=True):
        assert kind == expected_kind
        assert_logits(logits, other)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("policy", ["lru", "oled"])
def test_logits_are_bit_identical_at_every_capacity(family, yardstick, policy, capacity):
    config, source, decoding = family
    engine = build(config, source, policy, capacity, slots=SLOTS)
    assert_same(outcome(engine, decoding), yardstick)
    # Every pass was an iteration of the cache: all of them were planned and counted.
    decode = [kind for kind, _ in engine.recorded if kind is PassKind.DENOISE]
    assert engine.statistics.summary(PassKind.DENOISE).passes == len(decode) > 4


def test_resident_experts_agree_within_float32_noise(family, yardstick):
    config, source, decoding = family
    close = functools.partial(np.testing.assert_allclose, atol=1e-4)
    assert_same(outcome(build(config, source, "all"), decoding), yardstick, close)


@pytest.mark.slow
def test_whole_texts_of_unequal_length_in_a_batch_are_each_their_own(golden):
    """Sampled: what a row draws does not depend on the others either, nor on their length."""
    config, source = open_golden(golden / "rnd1-tiny")
    decoding = DecodingConfig(mask_id=252, eos_id=-1, gen_length=9, temperature=1.0, **SETTINGS["rnd1"])
    engine = build(config, source, "oled", 5, slots=SLOTS)
    alone, _ = outcome(engine, decoding)
    assert [result.output_ids for result in run(engine, PROMPTS, decoding)] == alone
    late = [9] * 12  # waits for a place
    results = engine.generate([*PROMPTS, late], decoding, batch=2)
    assert [result.output_ids for result in results] == [*alone, run(engine, [late], decoding)[0].output_ids]
    with pytest.raises(ValueError, match="whole text leaves no keys"):
        list(engine.stream([late], decoding, kept=KeptPrefix(config, 64, 8, 64)))
