"""A recorded run, replayed: every hit, miss, transfer, eviction and slot is the engine's, under every policy."""

import dataclasses

import numpy as np
import pytest
from engines import GREEDY, build_plain, context, open_golden, run

from oled_jax.config import DecodingConfig
from oled_jax.offload.manager import CacheManager
from oled_jax.offload.statistics import CacheStatistics
from oled_jax.passes import PassKind
from oled_jax.policies.base import Decision, LayerRouting
from oled_jax.policies.registry import POLICIES, make_policy
from oled_jax.sim.replay import ManagedReplay, ResidentReplay
from oled_jax.sim.tokens import OutputTokens
from oled_jax.traces.files import open_trace

# 2 MoE layers of 8 experts. Fewer spare slots than a prefill misses, so that it takes rounds.
CAPACITY, SPARE = 3, 2
DECODING = dataclasses.replace(GREEDY, mask_id=95, eos_id=-1, gen_length=18)
BATCHES = [[[5, 6, 7, 8, 9], list(range(40, 59))], [list(range(20, 39)), [1, 2, 3]]]  # of one shape, compiled once
GENERATING = [name for name, entry in POLICIES.items() if not (entry.needs_future or entry.is_reference)]
NEEDS_CPU = [name for name in GENERATING if POLICIES[name].needs_cpu]
OPTIONS = ["oled:retention=lfu:allocation=uniform", "finemoe:distance=1", "oled+:stage=8:certainty=0.1"]
ON_CPU = [*NEEDS_CPU, "oled", "oled:dispatch=makespan"]


@pytest.fixture(scope="module")
def model(golden):
    return open_golden(golden / "variants" / "base-float32")


def watched(manager: CacheManager) -> list[tuple]:
    """What the manager decides from now on, with the slot table after it. The engine's may do it in compiled code."""
    count, log = manager._count, []

    def listen(routing: LayerRouting, decision: Decision) -> None:
        log.append(
            (
                routing.layer,
                routing.info.kind,
                routing.capacity,
                routing.hits.tolist(),
                routing.misses.tolist(),
                decision.to_gpu.tolist(),
                decision.to_cpu.tolist(),
                np.flatnonzero(decision.keep).tolist(),
                list(decision.prefetch),
                manager.residency.slot.tolist(),
            )
        )
        count(routing, decision)

    manager._count = listen
    return log


def counted(statistics: CacheStatistics) -> dict[str, object]:
    """Everything that is counted, by kind of pass; no times."""
    return {kind: dataclasses.replace(statistics.summary(kind), planning_us=None) for kind in PassKind}


def check_agreement(
    model, tmp_path, policy: str, cpu: str | None, decoding: DecodingConfig = DECODING
) -> CacheStatistics:
    engine = build_plain(*model, policy, CAPACITY, spare=SPARE, cpu=cpu)
    recorded = watched(engine.manager)
    with engine.record(tmp_path / "run.trace", decoding):
        results = [result for batch in BATCHES for result in run(engine, batch, decoding)]
    engine.close()
    trace = open_trace(tmp_path / "run.trace")
    same = make_policy(policy, context(model[0], CAPACITY, cpu_available=cpu is not None))
    replay = ManagedReplay(same, page_bytes=engine.manager.statistics.page_bytes, spare=SPARE)
    replayed = watched(replay.manager)
    tokens = OutputTokens(trace.header)
    for step in trace:
        replay.run_pass(step)
        tokens.add(step)
    assert tokens.count() == sum(len(result.output_ids) for result in results)
    assert len(recorded) == len(trace) * trace.header.num_layers
    assert replayed == recorded
    np.testing.assert_array_equal(replay.manager.residency.slot, engine.manager.residency.slot)
    assert counted(replay.statistics) == counted(engine.statistics)
    assert replay.capacities() == engine.manager.policy.capacities().tolist()
    return replay.statistics


@pytest.mark.parametrize("policy", [*(name for name in GENERATING if name not in NEEDS_CPU), *OPTIONS])
def test_a_replay_is_the_run_where_every_miss_is_transferred(model, tmp_path, policy):
    statistics = check_agreement(model, tmp_path, policy, None)
    assert statistics.summary(PassKind.PREFILL).to_gpu > 0
    assert statistics.summary(PassKind.DENOISE).to_gpu > 0


@pytest.mark.parametrize("policy", ON_CPU)
def test_a_replay_is_the_run_where_the_cpu_helps(model, tmp_path, policy):
    statistics = check_agreement(model, tmp_path, policy, "numpy")
    assert statistics.summary(PassKind.DENOISE).to_cpu > 0


@pytest.mark.parametrize(("policy", "cpu"), [("oled", None), ("finemoe", None), (OPTIONS[-1], None), ("oled", "numpy")])
def test_a_replay_is_the_run_where_commits_are_folded(model, tmp_path, policy, cpu):
    folding = dataclasses.replace(DECODING, fold_commits=True)
    statistics = check_agreement(model, tmp_path, policy, cpu, folding)
    assert statistics.summary(PassKind.COMMIT).passes == 0
    assert any(step.info.folds is not None for step in open_trace(tmp_path / "run.trace"))


@pytest.mark.slow
def test_a_replay_of_a_run_with_everything_resident(model, tmp_path):
    engine = build_plain(*model, "all")
    with engine.record(tmp_path / "run.trace", DECODING):
        run(engine, BATCHES[0], DECODING)
    trace = open_trace(tmp_path / "run.trace")
    replay = ResidentReplay(trace.header)
    for step in trace:
        replay.run_pass(step)
    assert counted(replay.statistics) == counted(engine.statistics)
    assert replay.statistics.summary(PassKind.DENOISE).hits > 0


def test_what_a_policy_learned_is_kept_when_its_engine_is_closed(model, tmp_path):
    engine = build_plain(*model, f"oled+:table={tmp_path / 'learned.npz'}", CAPACITY, spare=SPARE)
    assert not list(tmp_path.iterdir())
    engine.close()
    assert [file.name for file in tmp_path.iterdir()] == ["learned.npz"]
