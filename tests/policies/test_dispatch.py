"""Where misses go: the exact minimum against enumeration, the paper's rule against a slow transcription."""

import itertools

import numpy as np
import pytest
from driver import context, make_routing

from oled_jax.cost.profile import CostProfile
from oled_jax.passes import PassKind
from oled_jax.policies.base import PassInfo
from oled_jax.policies.dispatch import (
    BalancedDispatch,
    ComputeAll,
    MakespanDispatch,
    MissCosts,
    TransferAll,
    scan_sorted,
)


def routing_of(loads, resident):
    flags = np.ones(1, bool)
    info = PassInfo(
        kind=PassKind.DENOISE,
        token_ids=np.zeros(1, np.int32),
        masked=flags,
        token_mask=flags,
        confidence=np.ones(1, np.float32),
    )
    return make_routing(
        layer=0,
        info=info,
        expert_ids=np.zeros((1, 1), np.int32),
        gates=np.ones((1, 1), np.float32),
        loads=np.asarray(loads),
        resident=np.asarray(resident, bool),
        last_use=np.zeros(len(loads), np.int64),
        capacity=4,
    )


def random_case(seed, num_experts=12):
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, 7, num_experts) * (rng.random(num_experts) < 0.85)
    costs = CostProfile(
        h2d_us=float(rng.uniform(40, 250)),
        cpu_fixed_us=float(rng.uniform(0, 200)),
        cpu_token_us=float(rng.uniform(0, 60)),
    )
    scores = rng.random(num_experts) * (loads > 0)
    if rng.random() < 0.3:
        scores = np.round(scores, 1)
    setting = context(num_layers=1, num_experts=num_experts, costs=costs)
    return setting, routing_of(loads, rng.random(num_experts) < 0.15), scores / max(scores.sum(), 1e-9)


def value(setting, routing, scores, to_gpu, to_cpu, reuse_weight):
    """J(G) by its definition."""
    costs = setting.costs
    transfer = len(to_gpu) * costs.h2d_us
    compute = sum(costs.cpu_fixed_us + costs.cpu_token_us * routing.loads[expert] for expert in to_cpu)
    scale = reuse_weight * int((routing.loads > 0).sum()) * costs.h2d_us
    return max(transfer, compute) - scale * sum(scores[expert] for expert in to_gpu)


@pytest.mark.parametrize("reuse_weight", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(12))
def test_makespan_is_the_minimum_over_all_subsets(seed, reuse_weight):
    setting, routing, scores = random_case(seed, num_experts=10)
    to_gpu, to_cpu = MakespanDispatch(setting, reuse_weight=reuse_weight).split(routing, scores)
    misses = routing.misses.tolist()
    assert sorted([*to_gpu.tolist(), *to_cpu.tolist()]) == misses
    best = min(
        value(setting, routing, scores, chosen, set(misses) - set(chosen), reuse_weight)
        for size in range(len(misses) + 1)
        for chosen in itertools.combinations(misses, size)
    )
    found = value(setting, routing, scores, to_gpu, to_cpu, reuse_weight)
    assert found == pytest.approx(best, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_the_scan_alone_is_exact_without_reuse(seed):
    rng = np.random.default_rng(seed)
    M = int(rng.integers(1, 25))
    costs = MissCosts(h2d_us=100.0, cpu=rng.uniform(20, 400, M), reuse=np.zeros(M))
    _, found, bound = scan_sorted(costs)
    assert found == pytest.approx(bound)


@pytest.mark.parametrize("seed", range(30))
def test_the_scans_bound_holds(seed):
    setting, routing, scores = random_case(seed, num_experts=9)
    misses = routing.misses
    costs = MakespanDispatch(setting, reuse_weight=1.0).costs(routing, scores)
    chosen, found, bound = scan_sorted(costs)
    assert found == pytest.approx(value(setting, routing, scores, misses[chosen], misses[~chosen], 1.0))
    for size in range(misses.size + 1):
        for subset in itertools.combinations(misses.tolist(), size):
            rest = set(misses.tolist()) - set(subset)
            assert value(setting, routing, scores, subset, rest, 1.0) >= bound - 1e-6


def slow_balanced(setting, routing, scores, reuse_weight, swaps):
    """The paper's rule on plain lists."""
    costs, misses = setting.costs, routing.misses.tolist()
    cpu = {e: costs.cpu_fixed_us + costs.cpu_token_us * routing.loads[e] for e in misses}
    scale = reuse_weight * int((routing.loads > 0).sum()) * costs.h2d_us
    mean = sum(cpu.values()) / len(misses)
    count = int(len(misses) * mean / (mean + costs.h2d_us) + 0.5)
    ranked = sorted(misses, key=lambda e: (-scores[e], e))
    gpu, rest = ranked[:count], ranked[count:]
    started = value(setting, routing, scores, gpu, rest, reuse_weight)
    if sum(cpu[e] for e in rest) <= count * costs.h2d_us:
        return set(gpu), started
    gain = {e: cpu[e] + scale * scores[e] for e in misses}
    leaving = sorted(gpu, key=lambda e: gain[e])
    entering = sorted(rest, key=lambda e: -gain[e])
    now = started
    for out, into in itertools.islice(zip(leaving, entering, strict=False), swaps):
        tried_gpu = [into if e == out else e for e in gpu]
        tried_rest = [out if e == into else e for e in rest]
        tried = value(setting, routing, scores, tried_gpu, tried_rest, reuse_weight)
        if tried >= now - 1e-9:
            break
        gpu, rest, now = tried_gpu, tried_rest, tried
    return set(gpu), started


@pytest.mark.parametrize("reuse_weight", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(40))
def test_balanced_is_the_papers_rule(seed, reuse_weight):
    setting, routing, scores = random_case(seed, num_experts=24)
    to_gpu, to_cpu = BalancedDispatch(setting, reuse_weight=reuse_weight).split(routing, scores)
    expected, started = slow_balanced(setting, routing, scores, reuse_weight, 8)
    assert set(to_gpu.tolist()) == expected
    assert value(setting, routing, scores, to_gpu, to_cpu, reuse_weight) <= started + 1e-6


def test_balanced_by_hand():
    # Misses of 1, 1, 1 and 9 tokens; cpu 20 + 20 n = 40, 40, 40, 200; mean 80; rho = 80 / 240; one transfer.
    costs = CostProfile(h2d_us=160.0, cpu_fixed_us=20.0, cpu_token_us=20.0)
    setting = context(num_layers=1, num_experts=4, costs=costs)
    routing = routing_of([1, 1, 1, 9], [False] * 4)
    scores = np.array([0.3, 0.2, 0.2, 0.3])
    # Expert 0 starts on the GPU: max(160, 280). Exchanged for expert 3: max(160, 120), and no reuse lost.
    to_gpu, to_cpu = BalancedDispatch(setting).split(routing, scores)
    assert (to_gpu.tolist(), sorted(to_cpu.tolist())) == ([3], [0, 1, 2])
    unchanged, _ = BalancedDispatch(setting, swaps=0).split(routing, scores)
    assert unchanged.tolist() == [0]


def test_extremes():
    setting, routing, scores = random_case(3)
    assert TransferAll(setting).split(routing, scores)[0].tolist() == routing.misses.tolist()
    assert ComputeAll(setting).split(routing, scores)[1].tolist() == routing.misses.tolist()


@pytest.mark.parametrize("rule", [BalancedDispatch, MakespanDispatch, TransferAll, ComputeAll])
def test_no_misses(rule):
    to_gpu, to_cpu = rule(context()).split(routing_of([1, 0], [True, False]), np.zeros(2))
    assert to_gpu.size == to_cpu.size == 0
