"""Which policies the extension plans for. That it decides alike: test_native_planning.py and sim/test_agreement.py."""

import dataclasses

import numpy as np
import pytest
from manager_cases import E, K, L, info, outcome, packed, routes

from oled_jax import native
from oled_jax.cost.profile import CostProfile
from oled_jax.errors import PolicyError
from oled_jax.offload.compiled_planner import compiled_planner
from oled_jax.offload.manager import CacheManager
from oled_jax.offload.residency import Residency
from oled_jax.policies.allocation import UniformAllocation
from oled_jax.policies.base import PolicyContext
from oled_jax.policies.composed import ComposedPolicy
from oled_jax.policies.dispatch import BalancedDispatch, TransferAll
from oled_jax.policies.lru import LruPolicy
from oled_jax.policies.registry import make_policy
from oled_jax.policies.retention import Priority, Recency

pytestmark = pytest.mark.skipif(native.extension is None, reason=f"no extension: {native.UNAVAILABLE}")

CONTEXT = PolicyContext(
    num_layers=L,
    num_experts=E,
    top_k=K,
    total_slots=4 * L,
    costs=CostProfile(h2d_us=100.0, cpu_fixed_us=60.0, cpu_token_us=30.0),
    cpu_available=True,
)


class Wayward(LruPolicy):
    def on_route(self, routing):
        return super().on_route(routing)


class OtherPriority(Priority):
    pass


class OtherDispatch(BalancedDispatch):
    pass


def planner_of(policy):
    residency = Residency(num_layers=L, num_experts=E, num_slots=4 * L + 3)
    return compiled_planner(policy, residency, np.zeros(E, np.int64))


@pytest.mark.parametrize(
    "policy",
    ["oled", "oled:dispatch=gpu", "oled:dispatch=load:swaps=0", "oled:retention=lru:allocation=uniform", "lru"],
)
def test_oled_with_its_ablations_and_lru_are_planned_by_the_extension(policy):
    assert planner_of(make_policy(policy, CONTEXT)) is not None


@pytest.mark.parametrize(
    "policy", ["oled:dispatch=makespan", "oled:dispatch=cpu", "lfu", "oled+", "tide", "lru-global"]
)
def test_python_plans_for_policies_with_other_parts(policy):
    assert planner_of(make_policy(policy, CONTEXT)) is None


def test_python_plans_for_a_policy_that_decides_in_its_own_way(monkeypatch):
    assert planner_of(Wayward(CONTEXT)) is None
    patched = LruPolicy(CONTEXT)
    patched.on_route = lambda routing: None
    assert planner_of(patched) is None
    for part in ({"retention": OtherPriority(CONTEXT)}, {"dispatch": OtherDispatch(CONTEXT)}):
        parts = {
            "retention": Recency(CONTEXT),
            "allocation": UniformAllocation(CONTEXT),
            "dispatch": TransferAll(CONTEXT),
        }
        assert planner_of(ComposedPolicy(CONTEXT, name="composed", **parts)) is not None
        assert planner_of(ComposedPolicy(CONTEXT, name="composed", **(parts | part))) is None
    monkeypatch.setattr(native, "extension", None)
    assert planner_of(LruPolicy(CONTEXT)) is None


def test_a_share_that_nobody_can_compute_is_the_policy_s_error():
    context = dataclasses.replace(CONTEXT, cpu_available=False)
    parts = {
        "retention": Recency(context),
        "allocation": UniformAllocation(context),
        "dispatch": BalancedDispatch(context),
    }
    manager = CacheManager(ComposedPolicy(context, name="composed", **parts), spare=3, page_bytes=1)
    manager.begin_pass(info())
    manager.on_route(0, packed(routes(np.random.default_rng(0))))
    with pytest.raises(PolicyError, match="no CPU backend"):
        manager.end_pass()


def test_its_times_are_those_of_the_policy():
    manager = CacheManager(make_policy("oled:dispatch=gpu", CONTEXT), spare=3, page_bytes=1)
    rng = np.random.default_rng(0)
    for _ in range(3):
        manager.begin_pass(info())
        for layer in range(L):
            manager.on_route(layer, packed(routes(rng)))
        manager.end_pass()
        manager.end_iteration(outcome())
    planning = manager.statistics.summary(info().kind).planning_us
    assert planning["priority"] > 0
    assert planning["dispatch"] > 0
    assert planning["total"] > planning["priority"] + planning["dispatch"]


def test_an_expert_that_is_not_there_is_an_error_and_the_next_pass_runs():
    manager = CacheManager(make_policy("lru", CONTEXT), spare=3, page_bytes=1)
    rng = np.random.default_rng(0)
    ids = routes(rng)
    ids[0, 0] = E
    manager.begin_pass(info())
    manager.on_route(0, packed(routes(rng)))
    manager.on_route(1, packed(ids))
    with pytest.raises(ValueError, match="no such expert"):
        manager.end_pass()
    assert set(manager.policy.clock.micros.values()) == {0.0}
    manager.begin_pass(info())
    for layer in range(L):
        manager.on_route(layer, packed(routes(rng)))
    manager.end_pass()
    manager.residency.check()


def test_arrays_of_other_sizes_are_refused():
    planning = native.extension.planning
    tables = Residency(num_layers=L, num_experts=E, num_slots=9).tables()
    figures = {"h2d_us": 1.0, "cpu_fixed_us": 1.0, "cpu_token_us": 1.0, "reuse_weight": 1.0, "swaps": 1}
    with pytest.raises(ValueError, match="different numbers of experts"):
        planning.LayerPlanner(**tables, loads=np.zeros(E + 1, np.int64), **figures)
    with pytest.raises(ValueError, match="another dtype"):
        planning.LayerPlanner(**tables, loads=np.zeros(E, np.int32), **figures)


def test_a_refused_array_leaves_what_was_there():
    planner = planner_of(LruPolicy(CONTEXT))
    manager = CacheManager(LruPolicy(CONTEXT), spare=3, page_bytes=1)
    given, ids = info(), np.zeros((info().token_mask.size, K), np.int32)
    planner.begin_pass(given, 1, manager.layout(ids.shape[0]), ids, ids.astype(np.float32))
    with pytest.raises(ValueError, match="another dtype"):
        planner.begin_pass(given, 2, manager.layout(ids.shape[0]), ids.astype(np.int64), ids.astype(np.float32))
    assert planner.pass_number == 1
