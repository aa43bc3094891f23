"""Static placements (KTransformers, Fiddler) and TIDE's refreshes."""

import numpy as np
import pytest
from driver import COSTS, Driver, context, make_pass, random_passes

from oled_jax.errors import UsageError
from oled_jax.passes import PassKind
from oled_jax.policies.registry import make_policy
from oled_jax.policies.static import evenly_spread, most_frequent


@pytest.fixture
def calibration(tmp_path):
    counts = np.random.default_rng(0).integers(0, 1000, (3, 16)).astype(float)
    path = tmp_path / "counts.npz"
    np.savez(path, counts=counts)
    return path, counts


@pytest.mark.parametrize("name", ["ktransformers", "fiddler"])
def test_calibrated_pages_are_staged_and_never_change(name, calibration):
    path, counts = calibration
    policy = make_policy(f"{name}:calibration={path}", context())
    driver = Driver(policy)
    best = sorted(np.argsort(-counts.ravel(), kind="stable")[:18].tolist())
    for step in random_passes(1, 40):
        driver.run_pass(step)
        assert np.flatnonzero(driver.resident).tolist() == best
    assert len(driver.staged) == 18
    assert policy.notes == []
    assert policy.capacities().tolist() == np.bincount(np.array(best) // 16, minlength=3).tolist()


@pytest.mark.parametrize("name", ["ktransformers", "fiddler"])
def test_without_calibration_the_first_prefill_decides(name):
    policy = make_policy(name, context())
    assert "first prefill" in policy.notes[0]
    passes = random_passes(2, 60)
    driver = Driver(policy).run(passes[:1])
    counts = np.stack([passes[0].loads(layer, 16) for layer in range(3)])
    placed = most_frequent(counts.astype(float), 18)
    assert np.array_equal(driver.resident, placed)
    driver.run(passes[1:])
    assert np.array_equal(driver.resident, placed)


def test_a_prompt_in_chunks_is_counted_as_a_whole():
    chunks = [
        make_pass([[[0, 1], [0, 1]]], kind=PassKind.PREFILL, begins_request=True),
        make_pass([[[2, 3], [2, 3], [2, 4]]], kind=PassKind.PREFILL),
        make_pass([[[5, 6]]]),
    ]
    driver = Driver(make_policy("ktransformers", context(num_layers=1, total_slots=2))).run(chunks)
    # Tokens: 0 and 1 two each, 2 three, 3 two, 4 one: 2 and the lowest of the ties.
    assert np.flatnonzero(driver.resident[0]).tolist() == [0, 2]


def test_a_request_without_prefill_learns_from_its_first_pass():
    passes = [make_pass([[[3, 4]]], begins_request=True), make_pass([[[5, 6]]]), make_pass([[[5, 6]]])]
    driver = Driver(make_policy("ktransformers", context(num_layers=1, total_slots=2))).run(passes)
    assert driver.staged == [(0, 3), (0, 4)]
    assert np.flatnonzero(driver.resident[0]).tolist() == [3, 4]


@pytest.mark.parametrize("name", ["ktransformers", "kt-uniform", "kt-dynamic"])
def test_nothing_is_transferred_while_decoding(name):
    driver = Driver(make_policy(name, context())).run(random_passes(3, 50))
    for routing, decision in driver.log:
        if routing.info.kind is not PassKind.PREFILL:
            assert decision.to_gpu.size == 0
            assert decision.to_cpu.tolist() == routing.misses.tolist()


def test_kt_dynamic_follows_every_prefill():
    passes = random_passes(5, 40)
    driver = Driver(make_policy("kt-dynamic", context()))
    placements = []
    for step in passes:
        driver.run_pass(step)
        if step.info.kind is PassKind.PREFILL:
            counts = np.stack([step.loads(layer, 16) for layer in range(3)])
            placements.append(most_frequent(counts.astype(float), 18))
        assert np.array_equal(driver.resident, placements[-1])
    assert len({placed.tobytes() for placed in placements}) == len(placements) == 3


def test_spread_and_frequent_by_hand():
    spread = evenly_spread(context(total_slots=13))
    assert [np.flatnonzero(row).tolist() for row in spread] == [
        [0, 3, 6, 9, 12],
        [0, 4, 8, 12],
        [0, 4, 8, 12],
    ]
    counts = np.zeros((2, 4))
    counts[0, 3], counts[1, 2] = 5, 9
    # The rest is tied at 0 and goes to both layers alike.
    assert [np.flatnonzero(row).tolist() for row in most_frequent(counts, 4)] == [[0, 3], [0, 2]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"counts": np.zeros((2, 16))}, "shape"),
        ({"other": np.zeros((3, 16))}, "counts"),
        ({"counts": np.full((3, 16), -1.0)}, "negative"),
        ({"counts": np.full((3, 16), np.nan)}, "finite"),
    ],
)
def test_bad_calibration_is_a_users_mistake(tmp_path, content, words):
    np.savez(tmp_path / "bad.npz", **content)
    with pytest.raises(UsageError, match=words):
        make_policy(f"ktransformers:calibration={tmp_path / 'bad.npz'}", context())


def test_missing_or_foreign_calibration(tmp_path):
    (tmp_path / "text").write_text("hello")
    np.save(tmp_path / "plain.npy", np.zeros((3, 16)))
    for name in ("absent.npz", "text", "plain.npy"):
        with pytest.raises(UsageError, match=name):
            make_policy(f"fiddler:calibration={tmp_path / name}", context())


def test_fiddler_sends_each_miss_where_it_is_done_sooner(calibration):
    driver = Driver(make_policy(f"fiddler:calibration={calibration[0]}", context())).run(random_passes(3, 40))
    sides = set()
    for routing, decision in driver.log:
        if routing.info.kind is not PassKind.PREFILL:
            for expert in routing.misses:
                on_cpu = COSTS.cpu_us(float(routing.loads[expert])) <= COSTS.h2d_us
                assert (expert in decision.to_cpu) == on_cpu
                sides.add(on_cpu)
    assert sides == {True, False}


# TIDE


def refreshed(driver):
    """Per denoise pass: whether the resident set was allowed to change."""
    return [
        bool(decision.to_gpu.size or not np.array_equal(decision.keep, routing.resident))
        for routing, decision in driver.log
    ]


@pytest.mark.parametrize(
    ("interval", "second_block"),
    [(2, [True, False, True, False]), (3, [True, False, False, True]), (1, [True] * 4)],
)
def test_tide_refreshes_every_pass_of_the_first_block_then_every_interval(interval, second_block):
    policy = make_policy(f"tide:interval={interval}", context(num_layers=1, total_slots=2))
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7)]
    blocks = [
        make_pass([[pair]], begins_request=first and number == 0, begins_block=number == 0)
        for first in (True, False)
        for number, pair in enumerate(pairs)
    ]
    assert refreshed(Driver(policy).run(blocks)) == [True] * 4 + second_block
    commit = Driver(policy).run([make_pass([[[8, 9]]], kind=PassKind.COMMIT)])
    assert refreshed(commit) == [False]


def test_tide_keeps_the_busiest():
    driver = Driver(make_policy("tide", context())).run(random_passes(4, 50))
    for routing, decision in driver.log:
        if decision.to_gpu.size == 0:
            continue
        kept = routing.loads[decision.keep]
        dropped = routing.loads[routing.activated & ~decision.keep]
        assert dropped.size == 0 or kept.min() >= dropped.max()
        if routing.info.kind is not PassKind.PREFILL:
            assert np.all(decision.keep[decision.to_gpu])
