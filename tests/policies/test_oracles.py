"""The bounds really are bounds."""

import itertools

import numpy as np
import pytest
from driver import Driver, context, future_of, make_pass, random_passes

from oled_jax.errors import PolicyError
from oled_jax.policies.registry import POLICIES, make_policy


@pytest.mark.parametrize("total_slots", [4, 12, 25, 40])
def test_oracle_makes_most_activated_experts_resident(total_slots):
    passes = random_passes(1, 40)
    policy = make_policy("oracle", context(total_slots=total_slots, future=future_of(passes)))
    driver = Driver(policy)
    for number, step in enumerate(passes):
        capacities = policy.capacities().copy()
        driver.run_pass(step)
        active = [int((step.loads(layer, 16) > 0).sum()) for layer in range(3)]
        hits = sum(int((routing.activated & routing.resident).sum()) for routing, _ in driver.log[-3:])
        assert hits == min(total_slots, sum(active))
        assert capacities.sum() == total_slots
        assert hits == sum(min(c, a) for c, a in zip(capacities, active, strict=True))
        assert number == len(driver.log) // 3 - 1


def fewest_transfers(requests, capacity):
    """Least transfers for one layer by search over every resident set that demand transfers can lead to."""
    states = {frozenset(): 0}
    for wanted in requests:
        following = {}
        for resident, cost in states.items():
            present = resident | wanted
            total = cost + len(wanted - resident)
            for keep in itertools.combinations(sorted(present), min(capacity, len(present))):
                key = frozenset(keep)
                following[key] = min(following.get(key, total), total)
        states = following
    return min(states.values())


@pytest.mark.parametrize("seed", range(8))
def test_belady_transfers_as_little_as_possible(seed):
    rng = np.random.default_rng(seed)
    passes = [make_pass([[rng.permutation(6)[:2]]]) for _ in range(14)]
    shape = {"num_layers": 1, "num_experts": 6, "total_slots": 3}
    policy = make_policy("belady", context(**shape, future=future_of(passes, 6)))
    driver = Driver(policy).run(passes)
    requests = [frozenset(np.flatnonzero(step.loads(0, 6)).tolist()) for step in passes]
    assert driver.transfers == fewest_transfers(requests, 3)


def test_belady_beats_every_policy_on_demand():
    passes = random_passes(2, 60)
    future = future_of(passes)
    best = Driver(make_policy("belady", context(future=future))).run(passes).transfers
    for spec in ("lru", "lfu", "lfu-decay", "oled:allocation=uniform:dispatch=gpu", "moe-infinity-lfu"):
        assert Driver(make_policy(spec, context())).run(passes).transfers >= best


def test_belady_refuses_another_routing():
    passes = random_passes(2, 10)
    driver = Driver(make_policy("belady", context(future=future_of(passes))))
    with pytest.raises(PolicyError, match="'belady': pass 0, layer 0"):
        driver.run_pass(random_passes(3, 1)[0])


def test_belady_refuses_to_go_on_past_the_trace():
    passes = random_passes(2, 10)
    driver = Driver(make_policy("belady", context(future=future_of(passes[:5]))))
    with pytest.raises(PolicyError, match="pass 5"):
        driver.run(passes)


def test_only_the_content_oracle_is_free_of_charge():
    assert [name for name, entry in POLICIES.items() if entry.simulated_only] == ["oracle"]
    passes = random_passes(0, 3)
    for name, entry in POLICIES.items():
        if not entry.is_reference:
            free = make_policy(name, context(future=future_of(passes))).free_residents()
            assert (free is not None) == (name == "oracle")
