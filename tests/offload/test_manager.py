"""The manager without JAX: rules are enforced, plans are carried out as written, pages land where they should."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from manager_cases import E, K, L, N, info, outcome, packed, routes

from oled_jax.cost.profile import UNMEASURED
from oled_jax.errors import PolicyError
from oled_jax.offload.manager import CacheManager
from oled_jax.passes import PassKind
from oled_jax.policies.base import (
    Decision,
    LayerRouting,
    PageRequest,
    Policy,
    PolicyContext,
    top_scored,
)
from oled_jax.policies.registry import make_policy

CONTEXT = PolicyContext(num_layers=L, num_experts=E, top_k=K, total_slots=4 * L, costs=UNMEASURED)


class Scripted(Policy):
    """Least recently used, with whatever a test changes about its decisions."""

    name = "scripted"

    def __init__(self, change=None, capacities=(4, 4, 4), stage=()):
        super().__init__(CONTEXT)
        self.change = change
        self.own = np.array(capacities)
        self.stage = stage

    def on_route(self, routing: LayerRouting) -> Decision:
        misses = routing.misses
        candidates = routing.resident.copy()
        candidates[misses] = True
        keep = top_scored(candidates, self.scores(routing.layer), routing.last_use, routing.capacity)
        decision = Decision(to_gpu=misses, to_cpu=misses[:0], keep=keep)
        return self.change(routing, decision) if self.change else decision

    def end_iteration(self, outcome):
        return self.stage

    def capacities(self):
        return self.own

    def scores(self, layer):
        return np.arange(E, dtype=float)


def carry_out(contents: np.ndarray, manager: CacheManager, layer: int, ids: np.ndarray, plan: np.ndarray) -> None:
    """What the device does with a plan, on a pool of labels; checks that every pair meets its own page."""
    layout = manager.layout(ids.shape[0])
    fields = layout.fields(plan)
    rows = layout.items.rows
    seen = np.full(ids.size, -1)
    first_move = first_item = 0
    for index in range(int(fields["num_rounds"][0])):
        for move in range(first_move, fields["transfer_end"][index]):
            contents[fields["transfer_slot"][move]] = layer * E + fields["transfer_expert"][move]
        for item in range(first_item, fields["item_end"][index]):
            mine = (fields["pair_row"] >= item * rows) & (fields["pair_row"] < (item + 1) * rows)
            seen[mine] = contents[fields["item_slot"][item]]
        first_move, first_item = fields["transfer_end"][index], fields["item_end"][index]
    for move in range(int(fields["prefetch_count"][0])):
        contents[fields["prefetch_slot"][move]] = (layer + 1) * E + fields["prefetch_expert"][move]
    np.testing.assert_array_equal(seen, layer * E + ids.ravel())


@pytest.mark.parametrize("policy", ["lru", "oled"])
@pytest.mark.parametrize("spare", [1, 3, 16])
def test_every_pair_meets_its_own_page_in_every_round(policy, spare):
    rng = np.random.default_rng(0)
    manager = CacheManager(make_policy(policy, CONTEXT), spare=spare, page_bytes=1)
    contents = np.full(manager.residency.num_slots, -1)
    for _ in range(40):
        manager.begin_pass(info())
        for layer in range(L):
            ids = routes(rng)
            carry_out(contents, manager, layer, ids, manager.on_route(layer, packed(ids)))
            table = manager.residency.slot[layer]
            np.testing.assert_array_equal(contents[table[table >= 0]], layer * E + np.flatnonzero(table >= 0))
        manager.end_pass()
        manager.end_iteration(outcome())
        manager.residency.check()


def test_the_pages_of_a_round_need_no_slot_of_the_round_before():
    """So a carrier can move them while that one computes."""
    rng, rounds = np.random.default_rng(0), 0
    manager = CacheManager(make_policy("lru", CONTEXT), spare=2, page_bytes=1)
    for _ in range(20):
        manager.begin_pass(info())
        for layer in range(L):
            plan = manager.layout(N).fields(manager.on_route(layer, packed(routes(rng))))
            moves, items = [0, *plan["transfer_end"]], [0, *plan["item_end"]]
            for index in range(1, int(plan["num_rounds"][0])):
                moved = plan["transfer_slot"][moves[index] : moves[index + 1]]
                computing = plan["item_slot"][items[index - 1] : items[index]]
                assert moved.size > 0
                assert not set(moved) & set(computing)
                rounds += 1
        manager.end_iteration(outcome())
    assert rounds > 20


def test_padding_is_no_load():
    manager = CacheManager(Scripted(), spare=4, page_bytes=1)
    manager.begin_pass(info(real=1))
    ids = routes(np.random.default_rng(0))
    plan = manager.layout(N).fields(manager.on_route(0, packed(ids)))
    assert np.count_nonzero(plan["pair_row"] >= 0) == K
    manager.account()
    assert manager.statistics.summary(PassKind.DENOISE).misses == K


def illegal(name):
    def change(routing, decision):
        if name == "miss forgotten":
            return dataclasses.replace(decision, to_gpu=decision.to_gpu[1:], keep=decision.keep & False)
        if name == "miss twice":
            return dataclasses.replace(decision, to_gpu=np.append(decision.to_gpu, decision.to_gpu[0]))
        if name == "both ways":
            return dataclasses.replace(decision, to_cpu=decision.to_gpu[:1])
        if name == "no expert of that number":
            return dataclasses.replace(decision, to_gpu=np.append(decision.to_gpu, E))
        if name == "keeps a stranger":
            return dataclasses.replace(decision, keep=routing.loads == 0)
        if name == "keeps too many":
            return dataclasses.replace(decision, keep=routing.loads > 0)
        if name == "uses a CPU that is not there":
            return dataclasses.replace(
                decision, to_gpu=decision.to_gpu[1:], to_cpu=decision.to_gpu[:1], keep=decision.keep & False
            )
        return dataclasses.replace(decision, prefetch=[PageRequest(layer=0, expert=1, priority=1.0)])

    return change


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("miss forgotten", "exactly the misses"),
        ("miss twice", "exactly the misses"),
        ("both ways", "exactly the misses"),
        ("no expert of that number", "exactly the misses"),
        ("keeps a stranger", "neither resident nor transferred"),
        ("keeps too many", "the capacity is 4"),
        ("uses a CPU that is not there", "no CPU backend"),
        ("prefetches backwards", "does not come later"),
    ],
)
def test_an_illegal_decision_names_policy_layer_and_rule(name, message):
    manager = CacheManager(Scripted(illegal(name)), spare=4, page_bytes=1)
    manager.begin_pass(info())
    plan = manager.on_route(0, packed(routes(np.random.default_rng(0))))
    np.testing.assert_array_equal(plan, manager.layout(N).empty())
    with pytest.raises(PolicyError, match=f"'scripted', layer 0: .*{message}"):
        manager.end_pass()


def test_after_a_failure_the_rest_of_the_pass_does_nothing_and_the_next_starts_empty():
    failing = [True]

    def change(routing, decision):
        if routing.layer == 1 and failing[0]:
            raise KeyError("the policy's own error")
        return decision

    rng = np.random.default_rng(0)
    manager = CacheManager(Scripted(change), spare=4, page_bytes=1)
    manager.begin_pass(info())
    plans = [manager.on_route(layer, packed(routes(rng))) for layer in range(L)]
    assert plans[0].any()
    np.testing.assert_array_equal(plans[2], manager.layout(N).empty())
    with pytest.raises(KeyError, match="the policy's own error"):
        manager.end_pass()
    assert manager.residency.counts().tolist() == [0] * L
    failing[0] = False
    manager.begin_pass(info())
    manager.on_route(0, packed(routes(rng)))
    manager.end_pass()
    assert manager.residency.counts()[0] == 4


def test_a_layer_that_loses_slots_drops_its_lowest_ranked():
    policy = Scripted()
    manager = CacheManager(policy, spare=8, page_bytes=1)
    manager.begin_pass(info(tokens=2))
    manager.on_route(0, packed([[3, 7], [5, 1]]))
    policy.own = np.array([2, 5, 5])
    manager.end_iteration(outcome())
    assert np.flatnonzero(manager.residency.resident(0)).tolist() == [5, 7]
    manager.residency.check()


def test_capacities_beyond_the_pool_are_refused():
    manager = CacheManager(Scripted(capacities=(5, 4, 4)), spare=8, page_bytes=1)
    manager.begin_pass(info())
    with pytest.raises(PolicyError, match="add up to 13, but 12"):
        manager.end_iteration(outcome())


def test_a_staged_page_replaces_the_lowest_ranked_resident():
    policy = Scripted(
        stage=[PageRequest(layer=0, expert=0, priority=1.0), PageRequest(layer=0, expert=9, priority=2.0)]
    )
    manager = CacheManager(policy, spare=8, page_bytes=1)
    manager.begin_pass(info(tokens=2))
    manager.on_route(0, packed([[3, 7], [5, 1]]))
    manager.end_pass()
    staged = manager.end_iteration(outcome())
    assert [(layer, expert) for layer, expert, _ in staged] == [(0, 9), (0, 0)]
    assert np.flatnonzero(manager.residency.resident(0)).tolist() == [0, 5, 7, 9]
    summary = manager.statistics.summary(PassKind.DENOISE)
    assert (summary.prefetched, summary.prefetch_used, summary.bytes_h2d) == (2, 0, 6)
    policy.stage = ()
    manager.begin_pass(info(tokens=2))
    manager.on_route(0, packed([[9, 7], [9, 7]]))
    manager.account()
    assert manager.statistics.summary(PassKind.DENOISE).prefetch_used == 1


def test_a_prefetch_leaves_with_the_plan_of_the_layer_before_its_own():
    def change(routing, decision):
        wanted = [PageRequest(layer=2, expert=11, priority=1.0)] if routing.layer == 0 else []
        return dataclasses.replace(decision, prefetch=wanted)

    manager = CacheManager(Scripted(change), spare=8, page_bytes=1)
    manager.begin_pass(info(tokens=2))
    counts = []
    for layer in range(2):
        plan = manager.layout(2).fields(manager.on_route(layer, packed([[3, 7], [5, 1]])))
        counts.append(int(plan["prefetch_count"][0]))
    assert counts == [0, 1]
    assert plan["prefetch_expert"][0] == 11
    assert manager.residency.slot[2, 11] == plan["prefetch_slot"][0]


@pytest.mark.parametrize("early", [(), (0,), (0, 1, 2), (0, 0, 2)])
def test_layers_are_counted_once_whoever_has_it_done(early):
    """early: after these layers a carrier has time to have them counted. What is lent has changed by the next layer."""
    heard = []
    manager = CacheManager(Scripted(), spare=8, page_bytes=1)
    manager.recorder = SimpleNamespace(on_route=lambda layer, ids, gates: heard.append((layer, ids.tolist())))
    manager.begin_pass(info(tokens=2))
    rng = np.random.default_rng(0)
    ids = [routes(rng, 2) for _ in range(3)]
    for layer in range(3):
        manager.on_route(layer, packed(ids[layer]))
        for _ in range(early.count(layer)):
            manager.account()
    manager.end_pass()
    manager.end_iteration(outcome(tokens=2))
    assert heard == [(layer, ids[layer].tolist()) for layer in range(3)]
    summary = manager.statistics.summary(PassKind.DENOISE)
    assert (summary.passes, summary.misses) == (1, sum(np.unique(each).size for each in ids))


def test_an_idle_pass_counts_nothing_that_a_broken_one_left_behind():
    manager = CacheManager(Scripted(), spare=8, page_bytes=1)
    manager.begin_pass(info(tokens=2))
    manager.on_route(0, packed([[3, 7], [5, 1]]))  # then the program failed
    manager.idle = True
    manager.begin_pass(info(tokens=2))
    manager.account()
    manager.on_route(0, packed([[3, 7], [5, 1]]))
    manager.end_pass()
    assert manager.statistics.summary(PassKind.DENOISE).passes == 0


def test_what_is_forgotten_includes_a_failure_that_nobody_raised():
    manager = CacheManager(Scripted(), spare=8, page_bytes=1)
    manager.on_route(0, packed([[3, 7], [5, 1]]))  # outside a pass
    assert manager.failure is not None
    manager.forget()
    manager.begin_pass(info(tokens=2))
    manager.on_route(0, packed([[3, 7], [5, 1]]))
    manager.end_pass()
    assert manager.statistics.summary(PassKind.DENOISE).passes == 1


def test_a_failure_to_count_is_the_pass_s():
    def fail(layer, ids, gates):
        raise OSError("the trace's disk is full")

    manager = CacheManager(Scripted(), spare=8, page_bytes=1)
    manager.recorder = SimpleNamespace(on_route=fail)
    for count in (manager.account, lambda: manager.on_route(1, packed([[3, 7], [5, 1]]))):
        manager.begin_pass(info(tokens=2))
        manager.on_route(0, packed([[3, 7], [5, 1]]))
        count()
        with pytest.raises(OSError, match="disk is full"):
            manager.end_pass()


def test_effective_transfers_are_those_used_by_the_next_pass():
    manager = CacheManager(Scripted(), spare=8, page_bytes=1)
    for ids in ([[3, 7], [5, 1]], [[3, 7], [9, 2]]):
        manager.begin_pass(info(tokens=2))
        manager.on_route(0, packed(ids))
        manager.end_pass()
    summary = manager.statistics.summary(PassKind.DENOISE)
    assert summary.effective_transfer_ratio == 2 / 6
    assert summary.hit_rate == 2 / 8
    assert summary.utilization == 2 / 8
    assert summary.activation_ratio == 8 / (2 * E)
