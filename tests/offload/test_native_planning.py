"""The compiled planning functions decide what the NumPy functions decide, to the bit."""

import importlib
import os
import subprocess
import sys

import numpy as np
import pytest
from manager_cases import E, K, L, info, outcome, packed, routes

from oled_jax import native
from oled_jax.cost.profile import CostProfile
from oled_jax.offload.manager import CacheManager
from oled_jax.offload.plan import PlanLayout
from oled_jax.offload.residency import Residency
from oled_jax.ops.grouping import ItemShape
from oled_jax.passes import PassKind
from oled_jax.policies.base import PolicyContext
from oled_jax.policies.registry import POLICIES, make_policy

MODULES = [
    importlib.import_module(f"oled_jax.{name}")
    for name in (
        "offload.manager",
        "offload.residency",
        "offload.schedule",
        "offload.statistics",
        "policies.base",
        "policies.retention",
        "policies.dispatch",
        "policies.lasting",
        "policies.marginal",
        "policies.reuse",
        "sim.replay",
    )
]
needs_extension = pytest.mark.skipif(native.extension is None, reason=f"no extension: {native.UNAVAILABLE}")

# tokens, top_k, experts, spare slots: passes of one item a page and of several, one round and several
SHAPES = [
    (1, 1, 1, 1),
    (3, 2, 7, 2),
    (16, 8, 256, 32),
    (64, 3, 33, 1),
    (65, 2, 3, 1),
    (100, 5, 255, 9),
    (1024, 8, 256, 32),
]
LAYERS = 2


class Planner:
    """Everything that planning does, with one set of functions, on random passes. Decides at random, but legally."""

    def __init__(self, functions, shape, seed):
        self.f = functions
        self.N, self.K, self.E, spare = shape
        self.rng = np.random.default_rng(seed)
        self.capacity = int(self.rng.integers(0, self.E + 1))
        self.residency = Residency(num_layers=LAYERS, num_experts=self.E, num_slots=LAYERS * self.capacity + spare)
        self.layout = PlanLayout(items=ItemShape(num_tokens=self.N, top_k=self.K, num_experts=self.E), spare=spare)
        self.scores = np.zeros((LAYERS, self.E))
        self.ids = np.zeros((LAYERS, self.N, self.K), np.int32)
        self.gates = np.zeros((LAYERS, self.N, self.K), np.float32)
        self.arrived = np.zeros((LAYERS, self.E), bool)

    def plan(self, number, layer):
        """Plans a layer; returns all that was computed."""
        f, rng, E, table = self.f, self.rng, self.E, self.residency
        pool = rng.permutation(E)[: max(self.K, int(rng.integers(1, E + 1)))]
        ids = np.stack([rng.permutation(pool)[: self.K] for _ in range(self.N)]).astype(np.int32)
        # Few different gates and weights: sums tie.
        gates = (rng.integers(0, 3, ids.shape) / 3 if number % 2 else rng.random(ids.shape)).astype(np.float32)
        mask = rng.random(self.N) < rng.choice([0.0, 0.6, 1.0, 1.0])
        weights = mask * rng.integers(0, 3, self.N) / 7
        expert_ids, copied = np.empty_like(ids), np.empty_like(gates)
        loads, resident = np.empty(E, np.int64), np.empty(E, bool)
        route = np.concatenate([ids, gates.view(np.int32)], axis=1)
        tables = table.slot, table.last_use, resident
        hit, missed = f["unpack_activated"](layer, number, route, mask, expert_ids, copied, loads, *tables)
        again = f["split_activated"](layer, number, loads, *tables)  # as a replay has it, from the loads
        np.testing.assert_array_equal(np.concatenate(again), np.concatenate([hit, missed]))
        f["score_layer"](layer, expert_ids, copied, weights, self.ids, self.gates, self.scores)
        scores = self.scores[layer]
        to_gpu, to_cpu = missed, missed[:0]
        if missed.size and rng.random() < 0.7:
            costs, reuse, swaps = rng.uniform(1, 100, 3), float(rng.choice([0.0, 400.0])), int(rng.integers(0, 9))
            to_gpu, to_cpu = f["split_balanced"](missed, loads, scores, *costs.tolist(), reuse, swaps)
        keep = f["best_residents"](resident, to_gpu, scores, table.last_use[layer], self.capacity)
        used = f["exchange_arrivals"](layer, hit, to_gpu, keep, self.arrived)
        ends = np.zeros(E + 1, np.int32)
        decision = missed, to_gpu, to_cpu, keep, self.capacity
        fault, rounds, table.free_slots, slots = f["move_pages"](
            layer, table.free_slots, hit, *decision, table.slot, table._free, ends
        )
        plan = self.layout.empty()
        f["write_layer"](
            expert_ids, mask, hit, to_gpu, slots, ends[:rounds], self.layout.items, self.layout.bounds, plan
        )
        table.check()
        assert np.count_nonzero(table.slot[layer] >= 0) == np.count_nonzero(keep) <= self.capacity
        return {
            "numbers": (fault, used, rounds, table.free_slots),
            "arrays": (expert_ids, copied, loads, resident, hit, missed, to_gpu, to_cpu, keep, slots, plan),
            "state": (self.ids, self.gates, self.scores, self.arrived, table.slot, table.last_use, table._free),
        }

    def end_pass(self):
        weights = self.rng.random(self.N)
        self.f["score_layers"](self.ids, self.gates, weights, self.scores)
        return {"scores": (self.scores,)}


def compiled():
    return {name: getattr(native.extension.planning, name) for name in native.NUMPY}


def assert_same(mine, other):
    for part in mine:
        for one, two in zip(mine[part], other[part], strict=True):
            np.testing.assert_array_equal(one, two, strict=True, err_msg=part)


class Reuse:
    """What `oled+` computes, with one of the two sets of functions, from random routes."""

    def __init__(self, functions, shape, seed):
        self.f, self.rng = functions, np.random.default_rng(seed)
        self.N, self.K, self.E, _ = shape
        table = (LAYERS, self.E)
        self.lasting = [np.full(table, -20), np.zeros(table), np.zeros(table, np.int64)]
        self.scores, self.activated = np.zeros(table), np.zeros(table, bool)
        self.ids, self.chosen = np.zeros((LAYERS, self.N, self.K), np.int32), np.zeros(table, bool)
        self.values = [np.zeros(table), np.zeros(table)]

    def end_pass(self, number):
        rng, table = self.rng, self.scores.shape
        ages, rates = np.sort(rng.integers(0, 5, 31)), np.append(np.sort(rng.integers(0, 4, 200)), 3)
        absent, opening = rng.random(self.ids.shape), rng.random(table)
        active, idle = rng.random(table), rng.random(table)
        for layer in range(LAYERS):
            ids = rng.integers(0, self.E, (self.N, self.K), np.int32)
            loads = np.bincount(ids[: rng.integers(0, self.N + 1)].ravel(), minlength=self.E)
            share, weight, as_shares = float(rng.choice([0.0, 0.7])), 0.3, bool(rng.integers(0, 2))
            inputs = ids, loads, absent, opening, share, active, idle, weight, as_shares
            self.f["score_reuse"](layer, *inputs, self.ids, self.activated, self.scores)
        self.f["note_uses"](number, self.activated, float(rng.random()), ages, rates, *self.lasting)
        last, rate, _ = self.lasting
        self.f["value_experts"](number + 1, rng.random((5, 4)), last, rate, ages, rates, *self.values)
        keys = np.where(rng.random(table) < 0.5, np.round(self.scores, 1), -np.inf)  # many are tied
        self.f["mark_greatest"](keys, int(rng.integers(1, self.E + 1)), self.chosen)
        tables = self.ids, self.activated, self.scores, *self.lasting, *self.values, self.chosen
        return {"tables": [array.copy() for array in tables]}


@needs_extension
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_both_expect_the_same_reuse(shape, seed):
    planners = [Reuse(functions, shape, seed) for functions in (native.NUMPY, compiled())]
    for number in range(6):
        assert_same(*(planner.end_pass(number) for planner in planners))


@needs_extension
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_both_plan_alike(shape, seed):
    planners = [Planner(functions, shape, seed) for functions in (native.NUMPY, compiled())]
    for number in range(6):
        for layer in range(LAYERS):
            assert_same(*(planner.plan(number, layer) for planner in planners))
        assert_same(*(planner.end_pass() for planner in planners))


@needs_extension
@pytest.mark.parametrize("num_experts", [1, 5, 64, 255])
def test_both_choose_the_same_residents_for_any_count(num_experts):
    E = num_experts
    rng = np.random.default_rng(E)
    for count in range(E + 2):
        scores = rng.integers(0, 4, E) / 3
        scores[rng.random(E) < 0.1] = np.nan
        last_use, resident = rng.integers(-1, 3, E), rng.random(E) < 0.7
        entering = rng.permutation(E)[: rng.integers(0, 3)]
        arguments = resident, entering, scores, last_use, count
        np.testing.assert_array_equal(
            native.NUMPY["best_residents"](*arguments), compiled()["best_residents"](*arguments), strict=True
        )


@needs_extension
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_count_the_same_loads_of_a_share_of_a_chunk(shape):
    N, K, E, _ = shape
    rng = np.random.default_rng(E)
    chunk = rng.integers(0, E, (LAYERS, 3 * N, K)).astype(np.int32)
    for real in (np.ones(N, bool), rng.random(N) < 0.5):
        mine, other = np.full((LAYERS, E), -1), np.full((LAYERS, E), -1)
        native.NUMPY["count_loads"](chunk[:, N : 2 * N], real, mine)
        compiled()["count_loads"](chunk[:, N : 2 * N], real, other)
        np.testing.assert_array_equal(mine, other)
        assert mine.sum() == LAYERS * K * real.sum()


@needs_extension
@pytest.mark.parametrize("seed", range(20))
def test_both_scan_to_the_same_split(seed):
    rng = np.random.default_rng(seed)
    for M in (1, 2, 17, 60):
        cpu, reuse = 40.0 + 7.3 * rng.integers(1, 5, M), rng.integers(0, 3, M) * rng.choice([0.0, 31.7])
        h2d_us = float(rng.uniform(10, 200))
        mine, other = np.empty(M, bool), np.empty(M, bool)
        assert native.NUMPY["scan_paths"](h2d_us, cpu, reuse, mine) == compiled()["scan_paths"](
            h2d_us, cpu, reuse, other
        )
        np.testing.assert_array_equal(mine, other)


@needs_extension
@pytest.mark.parametrize("seed", range(200))
def test_both_find_the_same_faults(seed):
    rng = np.random.default_rng(seed)
    resident = rng.random(E) < 0.4
    activated = rng.random(E) < 0.7
    hits, misses = np.flatnonzero(resident & activated), np.flatnonzero(~resident & activated)
    handled = rng.permutation(misses)
    if rng.random() < 0.5:
        handled = np.append(handled[1:], rng.integers(-2, E + 2, rng.integers(0, 3)))
    count = int(rng.integers(0, handled.size + 1))
    present = resident.copy()
    present[misses] = True
    keep = present & (rng.random(E) < 0.8) | (rng.random(E) < 0.05)
    decision = misses, handled[:count], handled[count:], keep, int(rng.integers(2, 7))
    found = []
    for functions in (native.NUMPY, compiled()):
        slot = np.where(resident, np.arange(E), -1).astype(np.int32)[None]
        before, free, ends = slot.copy(), np.arange(E, 2 * E, dtype=np.int32), np.zeros(E + 1, np.int32)
        fault, *_, slots = functions["move_pages"](0, E, hits, *decision, slot, free, ends)
        assert fault == 0 or (np.array_equal(slot, before) and slots.size == 0)
        found.append(fault)
    assert found[0] == found[1]


@needs_extension
def test_arrays_of_a_policy_may_have_any_dtype_and_layout_of_their_kind():
    scores = np.arange(12, dtype=np.float32)[::2] % 4
    last_use = np.array([3, 1, 2, 3, 1, 0], np.int32)
    resident = np.arange(12)[::-2] > 3
    arguments = resident, np.array([5], np.int16), scores, last_use, 3
    mine, other = native.NUMPY["best_residents"](*arguments), compiled()["best_residents"](*arguments)
    np.testing.assert_array_equal(mine, other)
    with pytest.raises(TypeError):
        compiled()["best_residents"](resident, np.array([0.5]), scores, last_use, 3)


@needs_extension
def test_arrays_that_are_written_are_of_their_very_dtype_layout_and_byte_order():
    route = np.array([[0, 0], [1, 0]], np.int32)
    ids, gates, loads = np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32), np.zeros(2, np.int64)
    slot, last_use, resident = np.full((1, 2), -1, np.int32), np.full((1, 2), -1), np.zeros(2, bool)
    unpack = compiled()["unpack_activated"]
    hits, misses = unpack(0, 7, route, np.ones(2, bool), ids, gates, loads, slot, last_use, resident)
    assert (hits.tolist(), misses.tolist()) == ([], [0, 1])
    frozen = loads.copy()
    frozen.flags.writeable = False
    for wrong in (loads.astype(np.int32), np.zeros(4, np.int64)[::2], loads.astype(">i8"), frozen, [0, 0], loads[None]):
        with pytest.raises(TypeError):
            unpack(0, 7, route, np.ones(2, bool), ids, gates, wrong, slot, last_use, resident)
    swapped = route.astype(">i4"), np.ones(2, bool)  # what is only read is converted
    unpack(0, 8, *swapped, ids, gates, loads, slot, last_use, resident)
    assert loads.tolist() == [1, 1]
    assert last_use.tolist() == [[8, 8]]
    none = np.zeros((0, 2), np.int32), np.ones(0, bool), np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32)
    hits, misses = unpack(0, 9, *none, loads, slot, last_use, resident)  # NumPy gives an empty array strides of 0
    assert hits.size == misses.size == loads.sum() == 0


@pytest.mark.parametrize(
    "functions", [pytest.param(native.NUMPY, id="numpy"), pytest.param(None, id="compiled", marks=needs_extension)]
)
class TestRefusals:
    """What no caller does is refused before anything is written where it does not belong."""

    @pytest.mark.parametrize("expert", [-1, 4])
    def test_an_expert_that_is_not_there(self, functions, expert):
        ids, gates, loads = np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32), np.zeros(4, np.int64)
        route = np.array([[0, 0], [expert, 0]], np.int32)
        tables = np.full((1, 4), -1, np.int32), np.full((1, 4), -1), np.zeros(4, bool)
        with pytest.raises(ValueError, match=r"no such expert|negative"):
            (functions or compiled())["unpack_activated"](0, 0, route, np.ones(2, bool), ids, gates, loads, *tables)
        with pytest.raises(ValueError, match=r"no such expert|negative|reshape"):
            (functions or compiled())["count_loads"](route[None, :, :1], np.ones(2, bool), loads[None])

    def test_no_free_slot(self, functions):
        table, free = np.full((1, 4), -1, np.int32), np.zeros(0, np.int32)
        nobody, missed = np.zeros(0, np.int64), np.array([2])
        decision = missed, missed, nobody, np.eye(4, dtype=bool)[2], 4
        with pytest.raises(RuntimeError, match="no slot is free"):
            (functions or compiled())["move_pages"](0, 0, nobody, *decision, table, free, np.zeros(5, np.int32))


def run_manager(policy):
    """Every plan and the counts of some random passes."""
    costs = CostProfile(h2d_us=100.0, cpu_fixed_us=60.0, cpu_token_us=30.0)
    context = PolicyContext(num_layers=L, num_experts=E, top_k=K, total_slots=4 * L, costs=costs, cpu_available=True)
    manager = CacheManager(make_policy(policy, context), spare=3, page_bytes=1, cpu_experts=Nobody())
    rng, plans = np.random.default_rng(0), []
    manager.begin_request(np.arange(5, dtype=np.int32))
    for number in range(24):
        kind = PassKind.PREFILL if number == 0 else PassKind.DENOISE
        tokens = 70 if number == 0 else 8
        manager.begin_pass(info(kind, tokens=tokens, real=tokens - number % 3))
        for layer in range(L):
            hidden = np.zeros((tokens, 1), np.float32)
            plans.append(manager.on_route(layer, packed(routes(rng, tokens)), hidden).copy())
        manager.end_pass()
        manager.end_iteration(outcome(kind, tokens=tokens))
    summary = manager.statistics.summary(*PassKind)
    return plans, {name: value for name, value in vars(summary).items() if name != "planning_us"}


class Nobody:
    """CPU experts that compute nothing."""

    def submit(self, work):
        assert work.experts.size > 0


REPLAYED = [name for name, entry in POLICIES.items() if not (entry.is_reference or entry.needs_future)]


@needs_extension
@pytest.mark.parametrize("policy", [*REPLAYED, "oled:dispatch=makespan", "oled:psi=square:confidence=previous"])
def test_a_manager_plans_alike_under_every_policy(policy, monkeypatch):
    plans, counts = run_manager(policy)
    # From here on Python decides, with NumPy's functions.
    monkeypatch.setattr("oled_jax.offload.manager.compiled_planner", lambda *_: None)
    for module in MODULES:
        for name in native.NUMPY.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, native.NUMPY[name])
    slow_plans, slow_counts = run_manager(policy)
    assert counts == slow_counts
    for mine, other in zip(plans, slow_plans, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_sources_beside_an_installed_package_say_so(monkeypatch, tmp_path):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.delenv("OLED_JAX_NATIVE", raising=False)
    monkeypatch.setattr(native.importlib, "import_module", missing)
    monkeypatch.setattr(native.sys, "path", [str(tmp_path)])
    assert native._load() == (None, "No module named 'oled_jax._native'")
    (tmp_path / "oled_jax").mkdir()
    (tmp_path / "oled_jax" / "_native.cpython-311-x86_64-linux-gnu.so").touch()
    assert native._load() == (None, "these are the sources: python -P takes the installed package")


def test_the_extension_can_be_switched_off():
    program = (
        "from oled_jax import native; from oled_jax.policies.base import best_residents as f;"
        "assert native.extension is None and f is native.NUMPY[f.__name__]; print(native.UNAVAILABLE)"
    )
    environment = {**os.environ, "OLED_JAX_NATIVE": "off"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "OLED_JAX_NATIVE=off" in done.stdout
