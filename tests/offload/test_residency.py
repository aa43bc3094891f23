"""The slot table refuses what would lose a slot or give it to two pages."""

import numpy as np
import pytest

from oled_jax.offload.residency import Residency


def test_admit_and_evict_keep_every_slot_accounted_for():
    rng = np.random.default_rng(0)
    residency = Residency(num_layers=3, num_experts=16, num_slots=20)
    for _ in range(300):
        layer = int(rng.integers(3))
        inside = np.flatnonzero(residency.resident(layer))
        outside = np.flatnonzero(~residency.resident(layer))
        entering = rng.permutation(outside)[: rng.integers(0, min(4, residency.free_slots) + 1)]
        slots = residency.admit(layer, entering)
        np.testing.assert_array_equal(residency.slot[layer, entering], slots)
        residency.evict(layer, rng.permutation(inside)[: rng.integers(0, 4)])
        residency.check()
        assert residency.free_slots == 20 - residency.counts().sum()


def test_a_resident_page_cannot_enter_again():
    residency = Residency(num_layers=1, num_experts=4, num_slots=4)
    residency.admit(0, np.array([2]))
    with pytest.raises(RuntimeError, match=r"\[1, 2\] of layer 0"):
        residency.admit(0, np.array([1, 2]))


def test_more_pages_than_free_slots_are_refused():
    residency = Residency(num_layers=1, num_experts=4, num_slots=2)
    with pytest.raises(RuntimeError, match="2 slots are free"):
        residency.admit(0, np.array([0, 1, 2]))


def test_only_residents_leave():
    residency = Residency(num_layers=1, num_experts=4, num_slots=2)
    with pytest.raises(RuntimeError, match=r"\[3\] of layer 0"):
        residency.evict(0, np.array([3]))


def test_check_finds_a_slot_that_holds_two_pages():
    residency = Residency(num_layers=1, num_experts=4, num_slots=3)
    residency.admit(0, np.array([0, 1]))
    residency.slot[0, 1] = residency.slot[0, 0]
    with pytest.raises(RuntimeError, match="two pages"):
        residency.check()
