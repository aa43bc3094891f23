"""OLED's priority, its parts switched one at a time, and what happens at the end of an iteration."""

import numpy as np
import pytest
from driver import Driver, context, make_pass, random_passes

from oled_jax.policies.base import top_scored
from oled_jax.policies.registry import make_policy
from oled_jax.policies.retention import Priority

PSI = {"confidence": lambda c: c, "ones": lambda c: 1.0, "square": lambda c: c * c}


def slow_priority(step, layer, confidence, psi):
    """p_e by the definition, one token and one expert at a time."""
    sums = [0.0] * 16
    for token in range(step.ids.shape[1]):
        if step.info.token_mask[token]:
            for slot in range(step.ids.shape[2]):
                gate = float(step.gates[layer, token, slot])
                sums[step.ids[layer, token, slot]] += gate * PSI[psi](float(confidence[token]))
    return np.array(sums) / sum(sums)


def priority_of(driver):
    retention = driver.policy.retention
    assert isinstance(retention, Priority)
    return np.stack([retention.scores(layer) for layer in range(3)])


@pytest.mark.parametrize("psi", PSI)
def test_priority_is_the_definition_with_this_iterations_confidence(psi):
    passes = random_passes(0, 12)
    driver = Driver(make_policy(f"oled:psi={psi}", context()))
    for step in passes:
        driver.run_pass(step)
        expected = [slow_priority(step, layer, step.outcome.confidence, psi) for layer in range(3)]
        np.testing.assert_allclose(priority_of(driver), expected, rtol=1e-6)


@pytest.mark.parametrize("confidence", ["previous", "none"])
def test_priority_without_reranking(confidence):
    step = random_passes(1, 4)[3]
    driver = Driver(make_policy(f"oled:confidence={confidence}", context())).run([step])
    psi = "ones" if confidence == "none" else "confidence"
    expected = [slow_priority(step, layer, step.info.confidence, psi) for layer in range(3)]
    np.testing.assert_allclose(priority_of(driver), expected, rtol=1e-6)


def test_in_layer_ranking_uses_the_previous_confidence_and_the_end_the_new():
    ids = np.array([[[0, 1], [2, 3]]])
    step = make_pass(ids, confidence=np.float32([0.9, 0.1]), confidence_after=np.float32([0.1, 0.9]))
    driver = Driver(make_policy("oled:dispatch=gpu", context(num_layers=1, total_slots=2))).run([step])
    assert np.flatnonzero(driver.log[0][1].keep).tolist() == [0, 1]
    np.testing.assert_allclose(driver.policy.scores(0)[:4], [0.05, 0.05, 0.45, 0.45], rtol=1e-6)


def test_residents_without_tokens_have_priority_zero_and_leave_by_last_use():
    one = np.ones(1, np.float32)
    passes = [make_pass([[[expert, expert + 1]]], confidence=one) for expert in (0, 2, 4)]
    driver = Driver(make_policy("oled:dispatch=gpu", context(num_layers=1, total_slots=4))).run(passes)
    assert np.flatnonzero(driver.resident[0]).tolist() == [2, 3, 4, 5]
    assert driver.policy.scores(0)[2] == 0.0


def test_retention_is_top_of_residents_and_transferred():
    driver = Driver(make_policy("oled:dispatch=load", context(total_slots=12))).run(random_passes(4, 40))
    for routing, decision in driver.log:
        candidates = routing.resident.copy()
        candidates[decision.to_gpu] = True
        assert decision.keep.sum() == min(candidates.sum(), routing.capacity)


@pytest.mark.parametrize("seed", range(3))
def test_with_every_part_replaced_it_is_lru(seed):
    passes = random_passes(seed, 60)
    one = Driver(make_policy("oled:retention=lru:allocation=uniform:dispatch=gpu", context())).run(passes)
    other = Driver(make_policy("lru", context())).run(passes)
    assert np.array_equal(one.resident, other.resident)
    assert (one.hits, one.transfers) == (other.hits, other.transfers)
    full = Driver(make_policy("oled", context())).run(passes)
    assert (full.hits, full.transfers) != (other.hits, other.transfers)


@pytest.mark.parametrize(
    ("part", "changed"),
    [("retention=lfu", "retention"), ("allocation=uniform", "allocation"), ("dispatch=gpu", "dispatch")],
)
def test_one_part_is_switched_alone(part, changed):
    paper, ablated = make_policy("oled", context()), make_policy(f"oled:{part}", context())
    for name in ("retention", "allocation", "dispatch"):
        same = type(getattr(paper, name)) is type(getattr(ablated, name))
        assert same == (name != changed)


def test_the_default_dispatch_follows_the_backend():
    with_cpu, without = make_policy("oled", context()), make_policy("oled", context(cpu_available=False))
    gpu = make_policy("oled:dispatch=gpu", context())
    assert type(without.dispatch) is type(gpu.dispatch)
    assert type(with_cpu.dispatch) is type(make_policy("oled:dispatch=oled", context()).dispatch)


def test_ties_go_to_last_use_and_then_to_the_lower_number():
    chosen = top_scored(np.ones(4, bool), np.array([0.0, 1.0, 0.0, 0.0]), np.array([3, 0, 7, 3]), 3)
    assert chosen.tolist() == [True, True, True, False]
