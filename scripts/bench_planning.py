"""Times the planning of a layer, `CacheManager.on_route`, without a device.

    python scripts/bench_planning.py --policy oled [--policy lru] [--cpu-threads 14] [--cold-mb 64] [--json FILE|-]

Routes a synthetic trace of LLaDA2.0-mini through a manager and prints microseconds per layer: of `on_route`, and of the
parts that the statistics tell apart, which include what is done once a pass. Every run routes the same; a figure is the
mean over layers and passes of the least time that any run took there, so that other work of the machine does not count.
With `--cpu-threads` the native kernel computes what is left to the CPU, and each layer waits for it once it is planned:
planning then includes the start of that work. Else nobody computes it. `OLED_JAX_NATIVE=off` times the NumPy functions.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from oled_jax import native
from oled_jax.cost.profile import UNMEASURED
from oled_jax.offload.cpu_experts.base import CpuExperts
from oled_jax.offload.cpu_experts.native import NativeExperts
from oled_jax.offload.manager import CacheManager
from oled_jax.offload.residency import DEFAULT_SPARE
from oled_jax.passes import PassKind
from oled_jax.policies.base import PolicyContext
from oled_jax.policies.registry import make_policy
from oled_jax.traces.spec import make_spec
from oled_jax.traces.synthetic import synthesise
from oled_jax.traces.trace import TraceHeader, TracePass


class NoExperts(CpuExperts):
    """Takes work and computes nothing."""

    name = "none"

    def __init__(self) -> None:
        pass

    def submit(self, work):
        pass

    def collect(self, layer):
        return np.zeros(0, np.float32)

    def reset(self):
        pass

    def close(self):
        pass


def cpu_experts_for(header: TraceHeader, threads: int | None) -> CpuExperts:
    if threads is None:
        return NoExperts()
    E, F, D = header.num_experts, header.moe_intermediate_size, header.hidden_size
    dtype = np.dtype(ml_dtypes.bfloat16)
    pages = np.ones((E, 2 * F, D), dtype), np.ones((E, D, F), dtype)
    return NativeExperts([pages] * header.num_layers, threads=threads)


def manager_for(header: TraceHeader, policy: str, capacity: int, cpu_experts: CpuExperts) -> CacheManager:
    context = PolicyContext(
        num_layers=header.num_layers,
        num_experts=header.num_experts,
        top_k=header.top_k,
        total_slots=capacity * header.num_layers,
        costs=UNMEASURED,
        cpu_available=True,
    )
    return CacheManager(make_policy(policy, context), spare=DEFAULT_SPARE, page_bytes=1, cpu_experts=cpu_experts)


def packed_routes(step: TracePass) -> list[np.ndarray]:
    """What a carrier passes to the manager, per layer; read-only, as callbacks get it."""
    pairs = zip(step.expert_ids, step.gates, strict=True)
    layers = [np.concatenate([ids, gates.view(np.int32)], axis=1) for ids, gates in pairs]
    for packed in layers:
        packed.flags.writeable = False
    return layers


def run(
    manager: CacheManager,
    passes: Sequence[TracePass],
    routes: Sequence[list[np.ndarray]],
    cold: np.ndarray,
    hidden_size: int,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """One run over the trace.

    Returns:
      microseconds of `on_route` [passes, layers], and of each part of planning, by name [passes].
    """
    layers = len(routes[0])
    taken = np.zeros((len(passes), layers))
    parts: dict[str, list[float]] = {}
    seen: dict[str, float] = {}
    for number, (step, packed) in enumerate(zip(passes, routes, strict=True)):
        for prompt in step.prompts:
            manager.begin_request(prompt)
        for _ in range(step.new_blocks):
            manager.begin_block()
        tokens = packed[0].shape[0]
        hidden, layout = np.ones((tokens, hidden_size), ml_dtypes.bfloat16), manager.layout(tokens)
        manager.begin_pass(step.info)
        for layer in range(layers):
            manager.account()  # as the native carrier has it done while the device computes
            np.add(cold, 1, out=cold)  # what the callback's core did meanwhile: its caches hold something else
            start = time.perf_counter()
            plan = manager.on_route(layer, packed[layer], hidden)
            taken[number, layer] = (time.perf_counter() - start) * 1e6
            if layout.fields(plan)["cpu_pairs"][0]:
                manager.collect(layer, hidden.shape)
        manager.end_pass()
        manager.end_iteration(step.outcome)
        now = planning_us(manager)
        for part, total in now.items():
            parts.setdefault(part, []).append(total - seen.get(part, 0.0))
        seen = now
    return taken, {part: np.array(values) for part, values in parts.items()}


def planning_us(manager: CacheManager) -> dict[str, float]:
    """By part, summed over all passes so far."""
    summary = manager.statistics.summary(*PassKind)
    return {part: mean * summary.passes for part, mean in (summary.planning_us or {}).items()}


def measure(header: TraceHeader, passes: Sequence[TracePass], policy: str, args: argparse.Namespace) -> dict[str, Any]:
    routes = [packed_routes(step) for step in passes]
    cold = np.zeros(args.cold_mb << 20, np.uint8)
    taken, parts = None, {}
    cpu_experts = cpu_experts_for(header, args.cpu_threads)
    for _ in range(args.runs):
        manager = manager_for(header, policy, args.capacity, cpu_experts)
        once, once_parts = run(manager, passes, routes, cold, header.hidden_size)
        taken = once if taken is None else np.minimum(taken, once)
        parts = {name: np.minimum(parts.get(name, np.inf), values) for name, values in once_parts.items()}
    cpu_experts.close()
    decoding = [step.info.kind is not PassKind.PREFILL for step in passes]
    summary = manager.statistics.summary(PassKind.DENOISE, PassKind.EDIT)
    layer_passes = summary.passes * header.num_layers
    return {
        "policy": policy,
        "activated": (summary.hits + summary.misses) / layer_passes,
        "misses": summary.misses / layer_passes,
        "to_cpu": summary.to_cpu / layer_passes,
        "on_route_us": float(taken[decoding].mean()),
        "on_route_us_p99": float(np.quantile(taken[decoding], 0.99)),
        "parts_us": {name: float(values[decoding].mean()) / header.num_layers for name, values in parts.items()},
        "prefill_on_route_us": float(taken[np.logical_not(decoding)].mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", action="append", help="may be repeated; default: oled:dispatch=gpu and oled")
    parser.add_argument("--capacity", type=int, default=40, help="pages per layer, on average")
    parser.add_argument("--tokens", type=int, default=16, help="block length, 16 or more")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--cold-mb", type=int, default=0, help="megabytes to write before each layer, to empty caches")
    parser.add_argument("--cpu-threads", type=int, help="of the native kernel; default: nobody computes")
    parser.add_argument("--json", metavar="FILE|-", help="write the figures as one object")
    args = parser.parse_args()
    # Blocks that change a little faster than the published figures say: 50 experts, of which some 20 miss at 40.
    targets = {"distinct_experts": 50.0, "adjacent_overlap": 0.79, "boundary_overlap": 0.6}
    shape = {"block_length": args.tokens, "iterations": args.iterations, "prompt_tokens": 128}
    spec = make_spec("llada2-mini", targets, **shape)
    trace = synthesise(spec)
    passes = list(trace)
    rows = [measure(trace.header, passes, name, args) for name in args.policy or ["oled:dispatch=gpu", "oled"]]
    result = {
        "native": not native.UNAVAILABLE,
        "capacity": args.capacity,
        "tokens": args.tokens,
        "cold_mb": args.cold_mb,
        "cpu_threads": args.cpu_threads,
        "policies": rows,
    }
    text = json.dumps(result, indent=2)
    if args.json and args.json != "-":
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.json == "-":
        print(text)
        return
    print("planning in C++" if result["native"] else f"planning in NumPy: {native.UNAVAILABLE}")
    for row in rows:
        parts = ", ".join(f"{name} {us:.1f}" for name, us in row["parts_us"].items())
        print(
            f"{row['policy']}: on_route {row['on_route_us']:.1f} us a layer, 99% under {row['on_route_us_p99']:.1f}, "
            f"in prefill {row['prefill_on_route_us']:.1f}; with the ends of passes {parts}; {row['activated']:.1f} "
            f"activated, {row['misses']:.1f} misses, {row['to_cpu']:.1f} on the CPU"
        )


if __name__ == "__main__":
    main()
