"""Capacities: exact sums within bounds, the running means, and when they change."""

import itertools

import numpy as np
import pytest
from driver import Driver, context, make_pass, random_passes

from oled_jax.passes import PassKind
from oled_jax.policies.allocation import AdaptiveAllocation, UniformAllocation, apportion
from oled_jax.policies.registry import make_policy


@pytest.mark.parametrize("seed", range(40))
def test_apportion_is_exact_and_within_bounds(seed):
    rng = np.random.default_rng(seed)
    L = int(rng.integers(1, 12))
    weights = rng.random(L) ** 4 * (rng.random(L) < 0.8)
    floor = rng.integers(0, 4, L)
    ceiling = floor + rng.integers(0, 30, L)
    total = int(rng.integers(0, ceiling.sum() + 5))
    shares = apportion(weights, total, floor, ceiling)
    assert shares.sum() == np.clip(total, floor.sum(), ceiling.sum())
    assert np.all((floor <= shares) & (shares <= ceiling))


@pytest.mark.parametrize("seed", range(20))
def test_layers_between_their_bounds_are_proportional(seed):
    rng = np.random.default_rng(seed)
    weights = rng.random(6) + 0.01
    shares = apportion(weights, 90, np.full(6, 4), np.full(6, 32))
    inside = np.flatnonzero((shares > 5) & (shares < 31))
    for one, other in itertools.combinations(inside, 2):
        scales = [(shares[layer] + np.array([-1, 1])) / weights[layer] for layer in (one, other)]
        assert scales[0][0] < scales[1][1]
        assert scales[1][0] < scales[0][1]


@pytest.mark.parametrize(
    ("weights", "total", "expected"),
    [
        ([1, 1, 2], 8, [2, 2, 4]),
        ([1, 1, 1], 10, [4, 3, 3]),  # equal remainders: the lower layer first
        ([0.45, 0.3, 0.25], 10, [5, 3, 2]),  # 4.5, 3, 2.5: the first of two equal remainders
        ([1, 0, 0], 20, [16, 2, 2]),  # the excess over the ceiling 16 goes to the others
        ([100, 1, 1], 12, [8, 2, 2]),  # the floor 2 is taken from the one above it
        ([0, 0, 0], 12, [4, 4, 4]),
        ([5, 1, 1], 48, [16, 16, 16]),
    ],
)
def test_apportion_by_hand(weights, total, expected):
    shares = apportion(np.array(weights, float), total, np.full(3, 2), np.full(3, 16))
    assert shares.tolist() == expected


def test_uniform_spreads_the_remainder():
    assert UniformAllocation(context(total_slots=20)).capacities().tolist() == [7, 7, 6]
    assert UniformAllocation(context(total_slots=90)).capacities().tolist() == [16, 16, 16]


def slow_capacities(passes, log, total, decay, interval):
    """The rule, one layer at a time, from what the driver saw. Returns capacities after each pass."""
    a, u, capacities, count, history = (
        {},
        {},
        UniformAllocation(context(total_slots=total)).capacities(),
        0,
        [],
    )
    steps = iter(log)
    for step in passes:
        routings = [next(steps)[0] for _ in range(3)]
        if step.info.kind in (PassKind.DENOISE, PassKind.EDIT):
            for layer, routing in enumerate(routings):
                active = routing.loads > 0
                now_a = active.sum() / 16
                now_u = (active & routing.resident).sum() / capacities[layer]
                a[layer] = decay * a[layer] + (1 - decay) * now_a if layer in a else now_a
                u[layer] = decay * u[layer] + (1 - decay) * now_u if layer in u else now_u
            count += 1
            if count % interval == 0:
                weights = np.array([a[layer] * u[layer] for layer in range(3)])
                floor = np.full(3, min(2, total // 3))
                capacities = apportion(weights, total, floor, np.full(3, 16))
        history.append(capacities)
    return history


@pytest.mark.parametrize(("decay", "interval"), [(0.8, 5), (0.5, 2)])
def test_adaptive_capacities_follow_the_definition(decay, interval):
    passes = random_passes(2, 60)
    driver = Driver(make_policy(f"oled:decay={decay}:interval={interval}", context()))
    seen = []
    for step in passes:
        driver.run_pass(step)
        seen.append(driver.policy.capacities().tolist())
    expected = slow_capacities(passes, driver.log, 18, decay, interval)
    assert seen == [capacities.tolist() for capacities in expected]
    assert len({tuple(capacities) for capacities in seen}) > 1


@pytest.mark.parametrize("kind", [PassKind.PREFILL, PassKind.COMMIT])
def test_prefill_and_commit_change_nothing(kind):
    ids = np.stack([np.tile([[0, 1]], (8, 1)), np.arange(16).reshape(8, 2), np.arange(16).reshape(8, 2)])
    driver = Driver(make_policy("oled:interval=1", context())).run([make_pass(ids, kind=kind)] * 4)
    assert driver.policy.capacities().tolist() == [6, 6, 6]
    driver.run([make_pass(ids, kind=PassKind.EDIT)])
    assert driver.policy.capacities().tolist() != [6, 6, 6]


@pytest.mark.parametrize("kind", [PassKind.PREFILL, PassKind.DENOISE])
def test_a_pass_that_failed_changes_nothing(kind):
    """Its layers were observed, it never ended."""
    failed, later = make_pass(np.tile([0, 1], (3, 8, 1)), kind=kind), random_passes(3, 12)
    drivers = [Driver(make_policy("oled:interval=1", context())) for _ in range(2)]
    routings = Driver(make_policy("lru", context())).run([failed]).log
    for layer in range(3):
        drivers[0].policy.allocation.observe(routings[layer][0])
    mine, other = ([driver.run([step]).policy.capacities().tolist() for step in later] for driver in drivers)
    assert mine == other


def test_an_idle_layer_keeps_the_floor():
    allocation = AdaptiveAllocation(context(total_slots=30, top_k=4), interval=1)
    assert allocation.floor.tolist() == [4, 4, 4]
    assert AdaptiveAllocation(context(total_slots=9, top_k=4)).floor.tolist() == [3, 3, 3]
