"""Profiles passes of a published size on a GPU: their times, and the kernels of one pass.

    python scripts/profile_pass.py --layers 8 all oled:dispatch=gpu/100

A case is POLICY[@BACKEND][/CAPACITY]. Random weights, and the routes of the trace of `bench speed` with two blocks,
commits folded. Prints the median milliseconds of a denoise pass, then, of one that JAX's profiler watched, its kernels
by name and, with --order, in order. XLA's own flags are taken from XLA_FLAGS.
"""

import argparse
import collections
import dataclasses
import gzip
import itertools
import json
import statistics
import tempfile
from pathlib import Path

import jax

from oled_jax.bench.bed import Case, TestBed
from oled_jax.bench.replay import EngineReplay, greedy_sampling
from oled_jax.machine import prepare_runtime, use_compilation_cache
from oled_jax.memory import store_bytes
from oled_jax.models.published import PUBLISHED
from oled_jax.models.registry import config_from_hf
from oled_jax.offload.residency import DEFAULT_SPARE
from oled_jax.passes import PassKind
from oled_jax.traces.folded import fold_commits
from oled_jax.traces.spec import make_spec
from oled_jax.traces.synthetic import synthesise
from oled_jax.traces.trace import MemoryTrace

TARGETS = {"distinct_experts": 55.0, "adjacent_overlap": 0.84}
PAUSE_US = 300  # between the kernels of two passes


def kernels_of(folder: Path) -> list[dict]:
    """What ran on the device's streams, in order: name, ts and dur in microseconds."""
    (path,) = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e.get("ph") == "M" and "name" in e["args"]}
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}

    def on_device(event: dict) -> bool:
        stream = named.get((event.get("pid"), event.get("tid")), "")
        return event.get("ph") == "X" and "GPU" in processes.get(event["pid"], "") and "Stream" in stream

    found = filter(on_device, events)
    return sorted(found, key=lambda e: e["ts"])


def last_pass(kernels: list[dict]) -> list[dict]:
    """Those of the last pass. What runs between two passes is shorter than half of one."""
    runs = [[kernels[0]]]
    for before, kernel in itertools.pairwise(kernels):
        if kernel["ts"] - before["ts"] - before["dur"] > PAUSE_US:
            runs.append([])
        runs[-1].append(kernel)
    most = max(len(run) for run in runs)
    return [run for run in runs if len(run) > most // 2][-1]


def show(kernels: list[dict], *, in_order: bool) -> None:
    end = kernels[-1]["ts"] + kernels[-1]["dur"]
    busy = sum(kernel["dur"] for kernel in kernels)
    print(f"{len(kernels)} kernels in {end - kernels[0]['ts']:.0f} us, of them {busy:.0f} busy")
    by_name = collections.defaultdict(list)
    for kernel in kernels:
        by_name[kernel["name"].split("<")[0]].append(kernel["dur"])
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:30]:
        print(f"{sum(times):9.1f} us {len(times):5d} x {name[:80]}")
    if in_order:
        for before, kernel in itertools.pairwise(kernels):
            start, gap = kernel["ts"] - kernels[0]["ts"], kernel["ts"] - before["ts"] - before["dur"]
            print(f"{start:9.1f} after {gap:6.1f} for {kernel['dur']:6.1f}  {kernel['name'][:80]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", metavar="POLICY[@BACKEND][/CAPACITY]")
    parser.add_argument("--size", choices=PUBLISHED, default="llada2-mini")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--order", action="store_true", help="print the kernels of a pass in order, too")
    parser.add_argument("--times", action="store_true", help="print times alone, without the profiler")
    args = parser.parse_args()
    config = dataclasses.replace(config_from_hf(PUBLISHED[args.size]), num_hidden_layers=args.layers)
    prepare_runtime(store_bytes(config))
    use_compilation_cache()
    if jax.default_backend() != "gpu" and not args.times:
        parser.error("there is no GPU whose kernels could be listed; --times prints the times of passes here")
    shape = {"num_layers": config.num_moe_layers, "block_length": 16, "requests": 1, "iterations": None}
    made = synthesise(make_spec(args.size, TARGETS, **shape, blocks=2, prompt_tokens=128))
    trace = fold_commits(MemoryTrace(made.header, tuple(made)))
    split = [case.partition("/") for case in args.cases]
    largest = max(int(capacity or 1) for _, _, capacity in split)
    bed = TestBed(config, slots=largest * config.num_moe_layers + DEFAULT_SPARE)
    for policy, _, capacity in split:
        case = Case.parse(policy, capacity=int(capacity or 1), carrier="native", threads=None)
        with bed.engine(case) as engine:
            replay = EngineReplay(engine, trace, greedy_sampling(config))
            list(replay.run())
            passes = [each for each in replay.run() if each.kind is PassKind.DENOISE]
            whole = statistics.median(each.total_s for each in passes) * 1e3
            forward = statistics.median(each.forward_s for each in passes) * 1e3
            print(f"{policy} at {capacity or 'all'}: {whole:.2f} ms a pass, forward {forward:.2f}", flush=True)
            if args.times:
                continue
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    list(replay.run())
                show(last_pass(kernels_of(Path(folder))), in_order=args.order)


if __name__ == "__main__":
    main()
