"""`python -m oled_jax.bench speed`: the time of a pass at a published size, under replayed routing.

Random weights, and the routes of a trace in the place of the router's, so that activation and overlap are those of a
trained model. Everything is measured in one run on one machine.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from oled_jax.bench.bed import Case, TestBed, fitting_layers
from oled_jax.bench.replay import EngineReplay, PassTime, greedy_sampling
from oled_jax.cli import CommandParser, note, number, whole_number
from oled_jax.config import ModelConfig
from oled_jax.engine import Engine
from oled_jax.errors import UsageError
from oled_jax.machine import (
    describe_machine,
    device_peak_bytes,
    host_peak_bytes,
    prepare_runtime,
    use_compilation_cache,
)
from oled_jax.memory import store_bytes
from oled_jax.models.published import PUBLISHED
from oled_jax.models.registry import config_from_hf
from oled_jax.offload.carriers.native import NativeMover
from oled_jax.offload.carriers.registry import AUTO, MOVERS, choose
from oled_jax.offload.residency import DEFAULT_SPARE
from oled_jax.offload.statistics import CacheSummary
from oled_jax.passes import PassKind
from oled_jax.policies.base import FutureRouting
from oled_jax.policies.registry import POLICIES, parse_policy
from oled_jax.report import STDOUT, check_json_target, write_json
from oled_jax.sim.replay import future_of
from oled_jax.traces.files import open_trace
from oled_jax.traces.folded import fold_commits
from oled_jax.traces.spec import make_spec
from oled_jax.traces.synthetic import synthesise
from oled_jax.traces.trace import MemoryTrace, Trace

SUMMARY = "time of a pass at a published size, under replayed routing"
MEASURED = (PassKind.DENOISE, PassKind.EDIT)
COLUMNS = (
    "policy", "cpu", "carrier", "capacity", "folded", "decode_ms", "ms", "ms_spread", "forward_ms", "utilization",
    "hit_rate", "misses", "to_cpu", "h2d_gbs", "plan_us", "transport_us", "issue_us", "collect_us",
)  # fmt: skip


def build_parser() -> CommandParser:
    """The flags; defaults are those of docs/performance.md."""
    parser = CommandParser(prog="python -m oled_jax.bench speed", description=SUMMARY)
    parser.add_argument("--size", choices=PUBLISHED, default="llada2-mini")
    parser.add_argument("--layers", type=whole_number(2), help="use only this many layers (default: as many as fit)")
    parser.add_argument("--block-length", type=whole_number(1), default=16)
    parser.add_argument("--trace", metavar="FILE", help="routes to replay (default: a synthetic trace of the size)")
    parser.add_argument("--blocks", type=whole_number(2), default=4, help="blocks of the synthetic trace")
    parser.add_argument("--prompt-tokens", type=whole_number(0), default=128, help="of the synthetic trace")
    parser.add_argument("--overlap", type=number(0.0), default=0.84, help="adjacent overlap of the synthetic trace")
    parser.add_argument("--distinct", type=number(1.0), default=55.0, help="activated experts of the synthetic trace")
    parser.add_argument(
        "--fold-commits", action="store_true", help="measure each case with folded commits, too (docs/design.md)"
    )
    parser.add_argument("--expert-cache", default="40,100", help="capacities, comma-separated (default: 40,100)")
    parser.add_argument(
        "--policies", default="oled:dispatch=gpu", help="comma-separated; POLICY@BACKEND uses a CPU expert backend"
    )
    parser.add_argument("--carriers", default=AUTO, help=f"comma-separated of {AUTO}, {', '.join(MOVERS)}")
    parser.add_argument("--cpu-threads", type=whole_number(1))
    parser.add_argument("--repeats", type=whole_number(1), default=3)
    parser.add_argument("--json", metavar="FILE|-")
    return parser


def command(argv: Sequence[str]) -> None:
    """Runs the bench and prints its table."""
    options = build_parser().parse(argv)
    check_json_target(options.json)
    config = config_from_hf(PUBLISHED[options.size])
    layers = options.layers or fitting_layers(config)
    config = dataclasses.replace(config, num_hidden_layers=layers)
    prepare_runtime(store_bytes(config))
    use_compilation_cache()
    cases = _cases(options)  # asks JAX for its devices: what it reads when it starts is set by now
    trace = _trace(options, config)
    note(f"{layers} layers of {options.size}, {len(trace)} passes")
    largest = max(case.capacity for case in cases)
    bed = TestBed(config, slots=largest * config.num_moe_layers + DEFAULT_SPARE)
    note(f"weights in memory after {bed.load_s:.1f} s")
    traces = {False: trace, True: fold_commits(trace)} if options.fold_commits else {False: trace}
    futures = dict.fromkeys(traces)
    if any(POLICIES[parse_policy(case.policy)[0]].needs_future for case in cases):
        futures = {folded: _future(replayed, options.repeats) for folded, replayed in traces.items()}
    rows = []
    for case in cases:
        for folded, replayed in traces.items():
            measured = _measure(bed, case, replayed, options.repeats, futures[folded])
            rows.append({"folded": folded, **measured})
            note(_line(rows[-1]))
    report = {
        "version": 1,
        "bench": "speed",
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(jax.local_devices()[0]),
        "settings": vars(options) | {"layers": layers, "trace": dataclasses.asdict(trace.header)},
        "load_s": bed.load_s,
        "host_peak_bytes": host_peak_bytes(),
        "rows": rows,
    }
    if options.json is not None:
        write_json(report, options.json)
    if options.json != STDOUT:
        print(" | ".join(COLUMNS))
        for row in rows:
            print(_line(row))


def _cases(options: argparse.Namespace) -> list[Case]:
    """Every policy x capacity x carrier. Raises UsageError for what cannot be."""
    capacities = [int(word) for word in options.expert_cache.split(",")]
    cases = [
        Case.parse(policy, capacity=capacity, carrier=choose(carrier)[0], threads=options.cpu_threads)
        for capacity in capacities
        for policy in options.policies.split(",")
        for carrier in options.carriers.split(",")
    ]
    # `all` is one case, whatever the capacities.
    first_all = next((case for case in cases if case.is_reference), None)
    return [case for case in cases if case is first_all or not case.is_reference]


def _trace(options: argparse.Namespace, config: ModelConfig) -> Trace:
    """In memory, so that reading it is not part of a pass."""
    if options.trace is not None:
        trace: Trace = open_trace(Path(options.trace))
        shape = (trace.header.num_layers, trace.header.num_experts, trace.header.top_k)
        wanted = (config.num_moe_layers, config.num_experts, config.num_experts_per_tok)
        if shape != wanted:
            raise UsageError(f"--trace {options.trace}: layers, experts and top-k are {shape}, the model's {wanted}")
    else:
        trace = synthesise(
            make_spec(
                options.size,
                {"distinct_experts": options.distinct, "adjacent_overlap": options.overlap},
                num_layers=config.num_moe_layers,
                block_length=options.block_length,
                requests=1,
                iterations=None,
                blocks=options.blocks,
                prompt_tokens=options.prompt_tokens,
            )
        )
    return MemoryTrace(trace.header, tuple(trace))


def _future(trace: Trace, repeats: int) -> FutureRouting:
    """Of all replays of the trace, the first included."""
    return FutureRouting(activated=np.concatenate([future_of(trace).activated] * (1 + repeats)))


def _measure(bed: TestBed, case: Case, trace: Trace, repeats: int, future: FutureRouting | None) -> dict[str, Any]:
    """One row. The first replay compiles and fills the cache, and is not counted."""
    sampling = greedy_sampling(bed.config)
    with bed.engine(case, future) as engine:
        replay = EngineReplay(engine, trace, sampling)
        list(replay.run())
        engine.statistics.restart()
        moved = _pager(engine)
        runs = [list(replay.run()) for _ in range(repeats)]
        found, moved_after = engine.statistics.summary(*MEASURED), _pager(engine)
        cpu = engine.cpu_experts
        return {
            "policy": case.policy,
            "cpu": cpu.name if cpu else "off",
            "carrier": engine.mover.name if engine.mover else None,
            "capacity": bed.config.num_experts if case.is_reference else case.capacity,
            **_times(runs),
            **_counts(found, bed.config, runs),
            **_pager_times(moved, moved_after),
            "cpu_stats": dataclasses.asdict(cpu.stats) if cpu else None,
            "pool_bytes": sum(array.nbytes for array in engine.pool),
            "device_peak_bytes": device_peak_bytes(jax.local_devices()[0]),
        }


def _times(runs: Sequence[Sequence[PassTime]]) -> dict[str, Any]:
    """Milliseconds of a pass: mean over the passes of a run, then median and spread over the runs.

    decode_ms: of all passes but prefill together, commit passes too: what a run that folds them is compared by.
    """
    decode = [[each for each in run if each.kind in MEASURED] for run in runs]
    means = [statistics.mean(each.total_s for each in run) * 1e3 for run in decode]
    flat = [each for run in decode for each in run]
    prefill = [sum(each.forward_s for each in run if each.kind is PassKind.PREFILL) for run in runs]
    whole = [sum(each.total_s for each in run if each.kind is not PassKind.PREFILL) for run in runs]
    return {
        "decode_ms": statistics.median(whole) * 1e3,
        "ms": statistics.median(means),
        "ms_spread": max(means) - min(means),
        "forward_ms": statistics.mean(each.forward_s for each in flat) * 1e3,
        "sample_ms": statistics.mean(each.sample_s for each in flat) * 1e3,
        "end_ms": statistics.mean(each.end_s for each in flat) * 1e3,
        "prefill_s": statistics.median(prefill),
        "passes": len(flat),
    }


def _counts(found: CacheSummary, config: ModelConfig, runs: Sequence[Any]) -> dict[str, Any]:
    """Per layer and pass, over the measured replays."""
    layers = found.passes * config.num_moe_layers
    seconds = sum(each.forward_s for run in runs for each in run if each.kind in MEASURED)
    counts = {name: getattr(found, name) / layers for name in ("hits", "misses", "to_gpu", "to_cpu", "prefetched")}
    planning_us = found.planning_us["total"] if found.planning_us else 0.0
    return {
        **counts,
        "hit_rate": found.hit_rate,
        "utilization": found.utilization,
        "h2d_gbs": found.bytes_h2d / seconds / 1e9,
        "plan_us": planning_us / config.num_moe_layers,
    }


def _pager(engine: Engine) -> dict[str, float] | None:
    return engine.mover.statistics if isinstance(engine.mover, NativeMover) else None


def _pager_times(before: dict[str, float] | None, after: dict[str, float] | None) -> dict[str, Any]:
    """Microseconds per route of the native carrier, all kinds of passes; None for another carrier."""
    names = ("transport_us", "planning_us", "issue_us", "collect_us", "moved_us")
    if before is None or after is None:
        return {f"{name}": None for name in names} | {"link_gbs": None}
    change = {name: after[name] - before[name] for name in (*names, "routes", "moved_bytes")}
    per_route = {name: change[name] / change["routes"] for name in names}
    return per_route | {"link_gbs": change["moved_bytes"] / change["moved_us"] / 1e3 if change["moved_us"] else None}


def _line(row: dict[str, Any]) -> str:
    values = (row[name] for name in COLUMNS)
    return " | ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in values)


if __name__ == "__main__":
    command(sys.argv[1:])
