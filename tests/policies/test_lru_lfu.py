"""Recency and frequency, against lists and counters."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
from driver import Driver, context, make_pass, random_passes

from oled_jax.passes import PassKind
from oled_jax.policies.registry import make_policy


def activated(step, layer):
    return np.flatnonzero(step.loads(layer, 16)).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_lru_against_ordered_lists(seed):
    passes = random_passes(seed, 50)
    driver = Driver(make_policy("lru", context()))
    lists = [OrderedDict() for _ in range(3)]
    for step in passes:
        driver.run_pass(step)
        for layer, pages in enumerate(lists):
            # Within a pass the lower number counts as the more recent one.
            for expert in reversed(activated(step, layer)):
                pages.pop(expert, None)
                pages[expert] = True
            while len(pages) > 6:
                pages.popitem(last=False)
            assert sorted(pages) == np.flatnonzero(driver.resident[layer]).tolist()


@pytest.mark.parametrize("total_slots", [5, 18, 30, 48])
def test_global_lru_against_one_ordered_list(total_slots):
    passes = random_passes(7, 50)
    driver = Driver(make_policy("lru-global", context(total_slots=total_slots)))
    pages = OrderedDict()
    for step in passes:
        for layer in range(3):
            for expert in reversed(activated(step, layer)):
                pages.pop((layer, expert), None)
                pages[layer, expert] = True
            while len(pages) > total_slots:
                pages.popitem(last=False)
        driver.run_pass(step)
        assert sorted(pages) == [tuple(page) for page in np.argwhere(driver.resident).tolist()]
        assert driver.policy.capacities().sum() <= total_slots


def test_global_lru_cycles_where_one_pass_does_not_fit():
    passes = [make_pass(np.tile([[[0, 1]], [[2, 3]], [[4, 5]]], 1))] * 10
    assert Driver(make_policy("lru-global", context(total_slots=4))).run(passes).hits == 0
    assert Driver(make_policy("lru-global", context(total_slots=6))).run(passes).hits == 9 * 6
    assert Driver(make_policy("lru", context(total_slots=6))).run(passes).hits == 9 * 6


def run_counts(spec, passes, count):
    """Runs the policy next to `count`, which sees each step first and returns counters by layer."""
    driver = Driver(make_policy(spec, context()))
    for step in passes:
        counters = count(step)
        driver.run_pass(step)
        for (routing, decision), counter in zip(driver.log[-3:], counters, strict=True):
            present = np.flatnonzero(routing.resident | routing.activated).tolist()
            ranked = sorted(present, key=lambda e: (-counter[e], -routing.last_use[e], e))
            assert sorted(ranked[: routing.capacity]) == np.flatnonzero(decision.keep).tolist()
    return driver


@pytest.mark.parametrize(("spec", "halve_every"), [("lfu", None), ("lfu-decay:halve_every=4", 4)])
def test_lfu_counts_passes_since_the_request_began(spec, halve_every):
    counters = [Counter() for _ in range(3)]
    number = 0

    def count(step):
        nonlocal number
        if step.begins_request:
            number = 0
            for counter in counters:
                counter.clear()
        elif halve_every and number % halve_every == 0:
            for counter in counters:
                for expert in counter:
                    counter[expert] /= 2
        number += 1
        for layer, counter in enumerate(counters):
            counter.update(activated(step, layer))
        return counters

    run_counts(spec, random_passes(1, 50), count)


def test_released_moe_infinity_counts_since_decoding_began():
    counters = [Counter() for _ in range(3)]
    decoding = False

    def count(step):
        nonlocal decoding
        if step.begins_request:
            decoding = False
        if step.info.kind is not PassKind.PREFILL and not decoding:
            decoding = True
            for counter in counters:
                counter.clear()
        for layer, counter in enumerate(counters):
            counter.update(activated(step, layer))
        return counters

    run_counts("moe-infinity-lfu", random_passes(2, 50), count)


def test_a_use_is_a_pass_and_not_a_token():
    busy_once = make_pass([[[0, 1], [0, 1], [0, 1]]])
    often = [make_pass([[[2, 3]]])] * 2
    driver = Driver(make_policy("lfu", context(num_layers=1, total_slots=2))).run([busy_once, *often])
    assert driver.policy.scores(0)[:4].tolist() == [1, 1, 2, 2]
    assert np.flatnonzero(driver.resident[0]).tolist() == [2, 3]
