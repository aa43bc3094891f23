"""Lossless as a tested property: what is resident never changes what is computed (docs/design.md)."""

import numpy as np
import pytest
from engines import GREEDY, build, open_tiny, run

from oled_jax.passes import PassKind

E, K = 32, 4
CAPACITIES = (1, K - 1, K, K + 1, 8, 16, E - 1, E)
# One prompt of several prefill blocks and one shorter than a block; the answers take several blocks.
PROMPTS = [[int(token) for token in np.random.default_rng(3).integers(0, 500, 90)], [5, 6, 7, 8, 9]]


@pytest.fixture(scope="module")
def model(golden):
    return open_tiny(golden)


def outcome(engine):
    """Both requests, one after the other: output ids and the logits of every pass."""
    outputs = [run(engine, [prompt])[0].output_ids for prompt in PROMPTS]
    return outputs, engine.recorded


@pytest.fixture(scope="module")
def yardstick(model):
    """Capacity E under the same carrier."""
    return outcome(build(*model, "lru", E))


@pytest.mark.parametrize("policy", ["lru", "oled"])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_logits_are_bit_identical_at_every_capacity(model, yardstick, policy, capacity):
    engine = build(*model, policy, capacity)
    outputs, recorded = outcome(engine)
    assert outputs == yardstick[0]
    assert [kind for kind, _ in recorded] == [kind for kind, _ in yardstick[1]]
    for (_, logits), (_, expected) in zip(recorded, yardstick[1], strict=True):
        np.testing.assert_array_equal(logits, expected)


class EvenRouter:
    """The golden weights without the router's bias, so that 90 tokens activate every expert of every layer."""

    def __init__(self, source):
        self.read_pages = source.read_pages
        self.check_finite = source.check_finite
        self._source = source

    def read_trunk(self, dtype):
        arrays = self._source.read_trunk(dtype)
        return {path: array * (path[-1] != "expert_bias") for path, array in arrays.items()}


def test_a_prefill_that_activates_every_expert_is_bit_identical_too(model):
    config, source = model
    engines = [build(config, EvenRouter(source), "lru", capacity) for capacity in (E, 1, 8)]
    outputs = [outcome(engine) for engine in engines]
    for engine, (ids, recorded) in zip(engines, outputs, strict=True):
        assert engine.statistics.per_layer([PassKind.PREFILL], "activated").tolist() == [E] * 3
        assert ids == outputs[0][0]
        for (_, logits), (_, expected) in zip(recorded, outputs[0][1], strict=True):
            np.testing.assert_array_equal(logits, expected)


def test_resident_experts_agree_within_float32_noise(model, yardstick):
    outputs, recorded = outcome(build(*model, "all"))
    assert outputs == yardstick[0]
    for (_, logits), (_, expected) in zip(recorded, yardstick[1], strict=True):
        np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("spare", [1, E])
def test_the_number_of_spare_slots_changes_nothing(model, yardstick, spare):
    outputs, recorded = outcome(build(*model, "lru", 2, spare=spare))
    assert outputs == yardstick[0]
    for (_, logits), (_, expected) in zip(recorded, yardstick[1], strict=True):
        np.testing.assert_array_equal(logits, expected)


def test_a_batch_of_unequal_prompts_gives_each_row_its_own_text(model, yardstick):
    outputs = [result.output_ids for result in run(build(*model, "oled", 8), PROMPTS, GREEDY)]
    assert outputs == yardstick[0]


def test_bfloat16_logits_are_bit_identical_too(golden):
    model = open_tiny(golden, "bfloat16")
    expected = outcome(build(*model, "lru", E))
    outputs, recorded = outcome(build(*model, "oled", K))
    assert outputs == expected[0]
    for (_, logits), (_, other) in zip(recorded, expected[1], strict=True):
        np.testing.assert_array_equal(logits, other)
