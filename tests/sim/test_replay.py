"""Replays of a small trace: the oracles are bounds, prefetches are told apart, everything resident hits."""

import numpy as np
import pytest
from made_traces import HEADER, made_trace

from oled_jax.errors import UsageError
from oled_jax.passes import PassKind
from oled_jax.policies.registry import POLICIES
from oled_jax.sim.cells import Cell
from oled_jax.sim.grid import CellResult, Machine, simulate
from oled_jax.sim.hardware import of_bandwidths
from oled_jax.sim.replay import BEFORE, ManagedReplay, future_of, pass_loads
from oled_jax.sim.timing import Carrier, TimeOptions
from oled_jax.traces.trace import MemoryTrace

TRACE = made_trace(rows=2)
L, E = HEADER.num_layers, HEADER.num_experts
MACHINE = Machine(hardware=of_bandwidths(24_576))
CAPACITIES = (1, 3, 8)
ON_DEMAND = (
    "lru", "lfu", "lfu-decay", "moe-infinity-lfu", "oled:allocation=uniform:dispatch=gpu",
    "oled:retention=lru:allocation=uniform:dispatch=gpu",
)  # fmt: skip


def replayed(policy: str, capacity: int, trace: MemoryTrace = TRACE, **options) -> CellResult:
    machine = Machine(hardware=MACHINE.hardware, options=TimeOptions(**options))
    return simulate(trace, Cell(policy=policy, capacity=capacity), machine)


def everything(result: CellResult):
    return result.statistics.summary(*PassKind)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_belady_moves_no_more_than_any_policy_on_demand(capacity):
    least = everything(replayed("belady", capacity)).to_gpu
    assert least > 0
    for policy in ON_DEMAND:
        assert everything(replayed(policy, capacity)).to_gpu >= least, policy


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_no_policy_hits_more_than_the_oracle(capacity):
    most = everything(replayed("oracle", capacity)).hits
    slots = capacity * L
    activated = (future_of(TRACE).activated.sum(axis=(1, 2))).tolist()
    assert most == sum(min(slots, count) for count in activated)
    for policy, entry in POLICIES.items():
        if not entry.is_reference:
            assert everything(replayed(policy, capacity)).hits <= most, policy


def test_the_future_is_what_the_passes_activate():
    future = future_of(TRACE).activated
    assert future.shape == (len(TRACE), L, E)
    for row, step in zip(future, TRACE, strict=True):
        for layer in range(L):
            real = step.expert_ids[layer][step.info.token_mask]
            assert np.flatnonzero(row[layer]).tolist() == np.unique(real).tolist()


def test_padding_is_no_load():
    prefill = TRACE.passes[0]
    assert not prefill.info.token_mask.all()
    loads = pass_loads(prefill, E)
    assert loads.sum() == L * prefill.info.token_mask.sum() * HEADER.top_k


def test_with_everything_resident_all_hits():
    result = replayed("all", E)
    summary = everything(result)
    assert summary.misses == summary.bytes_h2d == 0
    assert summary.hits == future_of(TRACE).activated.sum()
    assert result.capacities == [E] * L
    assert sum(result.times[kind].demand for kind in PassKind) == 0
    assert result.times[PassKind.DENOISE].ffn > 0
    planned = replayed("all", E, planning_us=1000.0)
    assert planned.times == result.times, "nobody is asked"


def test_passes_and_tokens_are_those_of_the_trace():
    result = replayed("lru", 3)
    kinds = [step.info.kind for step in TRACE]
    assert result.passes == {kind: kinds.count(kind) for kind in PassKind}
    assert result.tokens == sum(int(step.outcome.written.sum()) for step in TRACE) > 0


def test_what_a_pass_asked_for_adds_up_to_the_statistics():
    replay = ManagedReplay(_policy("tide", 3), page_bytes=1)
    work = [replay.run_pass(step) for step in TRACE]
    total = replay.statistics.summary(*PassKind)
    layers = [layer for one in work for layer in one.layers]
    assert sum(layer.moved for layer in layers) == total.to_gpu > 0
    assert sum(layer.cpu_experts for layer in layers) == total.to_cpu > 0
    assert all(layer.cpu_tokens >= layer.cpu_experts for layer in layers)
    assert sum(layer.resident_items for layer in layers) == total.hits  # one item each: few tokens
    assert sum(layer.moved_items for layer in layers) == total.to_gpu


def test_long_passes_need_several_items_of_a_page():
    trace = made_trace(requests=1, prefill_tokens=1025)
    work = ManagedReplay(_policy("lru", E), page_bytes=1).run_pass(trace.passes[0])
    loads = pass_loads(trace.passes[0], E)
    assert work.rows == 64
    assert [layer.moved_items for layer in work.layers] == np.ceil(loads / 64).sum(axis=1).tolist()


@pytest.mark.parametrize("carrier", list(Carrier))
def test_prefetches_name_the_layer_that_asked(carrier):
    replay = ManagedReplay(_policy("finemoe:distance=2", 8), page_bytes=1, overlapping=carrier is Carrier.NATIVE)
    ahead = [page for step in TRACE for page in replay.run_pass(step).ahead]
    ahead += replay.run_pass(made_trace(requests=1, rows=2).passes[0]).ahead  # takes what the last pass staged
    assert len(ahead) == replay.statistics.summary(*PassKind).prefetched
    assert {layer - asker for asker, layer in ahead if asker != BEFORE} == {2}
    assert {layer for asker, layer in ahead if asker == BEFORE} == {0, 1}


def test_pages_staged_for_a_block_count_for_decoding():
    summary = replayed("sida", 8).statistics.summary(PassKind.DENOISE)
    assert summary.prefetched >= summary.prefetch_used > 0


@pytest.mark.parametrize("policy", ["moe-infinity", "finemoe", "swapmoe", "sida", "kt-dynamic"])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_no_more_prefetches_are_used_than_made(policy, capacity):
    result = replayed(policy, capacity)
    for kind in PassKind:
        summary = result.statistics.summary(kind)
        assert summary.prefetch_used <= summary.prefetched


def test_without_a_cpu_policies_that_need_one_are_refused():
    machine = Machine(hardware=MACHINE.hardware, cpu_available=False)
    with pytest.raises(UsageError, match="'tide' computes misses on the CPU"):
        simulate(TRACE, Cell(policy="tide", capacity=3), machine)
    assert everything(simulate(TRACE, Cell(policy="oled", capacity=3), machine)).to_cpu == 0
    assert everything(replayed("oled", 3)).to_cpu > 0


def _policy(spec: str, capacity: int):
    from oled_jax.policies.registry import make_policy
    from oled_jax.sim.grid import context_of

    return make_policy(spec, context_of(HEADER, Cell(policy=spec, capacity=capacity), MACHINE))
