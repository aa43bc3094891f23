"""Lossless as a tested property: what is resident never changes what is computed (docs/design.md)."""

import functools

import numpy as np
import pytest
from engines import SLOTS, build, open_tiny, run

from oled_jax.passes import PassKind

pytestmark = pytest.mark.usefixtures("roomy_kv_cache")

L, E, K, SPARE = 3, 32, 4, 5
CAPACITIES = (1, K - 1, K, K + 1, 8, 16, E - 1, E)
# One prompt of several prefill blocks and one shorter than a block; the answers take several blocks.
PROMPTS = [[int(token) for token in np.random.default_rng(3).integers(0, 500, 90)], [5, 6, 7, 8, 9]]


@pytest.fixture(scope="module")
def model(golden):
    return open_tiny(golden)


def outcome(engine, prompts=PROMPTS):
    """The requests, one after the other: of each the output ids, and the kind and logits of every pass."""
    outcomes = []
    for prompt in prompts:
        before = len(engine.recorded)
        output_ids = run(engine, [prompt])[0].output_ids
        outcomes.append((output_ids, engine.recorded[before:]))
    return outcomes


def assert_same(outcomes, expected, assert_logits=np.testing.assert_array_equal):
    for (ids, passes), (expected_ids, expected_passes) in zip(outcomes, expected, strict=True):
        assert ids == expected_ids
        for (kind, logits), (expected_kind, other) in zip(passes, expected_passes, strict=True):
            assert kind == expected_kind
            assert_logits(logits, other)


@pytest.fixture(scope="module")
def yardstick(model):
    """Capacity E under the same carrier."""
    return outcome(build(*model, "lru", E))


@pytest.mark.parametrize("policy", ["lru", "oled"])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_logits_are_bit_identical_at_every_capacity(model, yardstick, policy, capacity):
    engine = build(*model, policy, capacity, slots=SLOTS)
    assert engine.manager.residency.num_slots == capacity * L + SPARE
    assert_same(outcome(engine), yardstick)


@pytest.mark.parametrize(
    ("capacity", "spare"),
    [
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(2, E, marks=pytest.mark.slow),
        pytest.param(K, SPARE, marks=pytest.mark.slow),
        # The pool of capacity E is the yardstick's.
        *(pytest.param(capacity, SPARE, marks=pytest.mark.exhaustive) for capacity in (K - 1, K + 1, 8, 16, E - 1)),
    ],
)
def test_the_size_of_the_pool_and_of_its_spare_part_changes_nothing(model, yardstick, capacity, spare):
    """Pools as users have them, a program for each size: decoding at all of them, prefill where `spare` differs."""
    first = 1 if spare == SPARE else 0
    for policy in ("lru", "oled"):
        engine = build(*model, policy, capacity, spare=spare)
        assert engine.pool.gate_up.shape[0] == capacity * L + spare
        assert_same(outcome(engine, PROMPTS[first:]), yardstick[first:])


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
    engines = [build(config, EvenRouter(source), "lru", capacity, slots=SLOTS) for capacity in (E, 1, 8)]
    outcomes = [outcome(engine) for engine in engines]
    for engine, requests in zip(engines, outcomes, strict=True):
        assert engine.statistics.per_layer([PassKind.PREFILL], "activated").tolist() == [E] * L
        assert_same(requests, outcomes[0])


def test_resident_experts_agree_within_float32_noise(model, yardstick):
    close = functools.partial(np.testing.assert_allclose, atol=1e-4)
    assert_same(outcome(build(*model, "all")), yardstick, close)


@pytest.mark.exhaustive  # test_batches.py has more such batches, at three capacities
def test_a_batch_of_unequal_prompts_gives_each_row_its_own_text(model, yardstick):
    results = run(build(*model, "oled", 8), PROMPTS)
    assert [result.output_ids for result in results] == [ids for ids, _ in yardstick]


def test_bfloat16_logits_are_bit_identical_too(golden):
    model = open_tiny(golden, "bfloat16")
    expected = outcome(build(*model, "lru", E))
    assert_same(outcome(build(*model, "oled", K, slots=SLOTS)), expected)
