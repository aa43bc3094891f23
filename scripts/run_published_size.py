"""Generates with random weights of a published model's real shape and prints what it cost.

    python scripts/run_published_size.py --size llada2-mini --expert-cache 40 --policies oled:dispatch=gpu,oled@numba

Random weights route almost uniformly and change their mind between iterations, so the hit rates here say nothing about
a trained model; load time, memory, transfer rate and the time of a pass do.
"""

import argparse
import json
import os
import resource
import sys
import time

from oled_jax.models.published import PUBLISHED

GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=PUBLISHED, default="llada2-mini")
    parser.add_argument("--layers", type=int, help="use only this many layers")
    parser.add_argument("--expert-cache", default="40,100", help="capacities, comma-separated")
    parser.add_argument(
        "--policies",
        default="oled:dispatch=gpu",
        help="comma-separated; POLICY@BACKEND uses a CPU expert backend",
    )
    parser.add_argument("--cpu-threads", type=int)
    parser.add_argument("--carrier", default="auto")
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--gen-length", type=int, default=64)
    parser.add_argument("--passes-per-block", type=int, default=8)
    args = parser.parse_args()

    raw = dict(PUBLISHED[args.size])
    raw["num_hidden_layers"] = args.layers or raw["num_hidden_layers"]
    from oled_jax.machine import prepare_runtime
    from oled_jax.memory import store_bytes
    from oled_jax.models.registry import config_from_hf

    config = config_from_hf(raw)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # so that the peak is what was in use
    prepare_runtime(store_bytes(config))
    rows = measure(args, config)
    for row in rows:
        print(json.dumps(row))
    columns = [key for key in rows[0] if not isinstance(rows[0][key], dict)]
    print(" | ".join(columns))
    for row in rows:
        print(" | ".join(f"{row[key]:.3f}" if isinstance(row[key], float) else str(row[key]) for key in columns))


def measure(args: argparse.Namespace, config) -> list[dict]:
    import jax
    import numpy as np

    from oled_jax.bench.bed import Case, TestBed
    from oled_jax.config import DecodingConfig
    from oled_jax.models.kv_cache import kv_bytes
    from oled_jax.passes import PassKind
    from oled_jax.session import kv_capacity

    device = jax.local_devices()[0]
    decoding = DecodingConfig(
        mask_id=156895, eos_id=156892, gen_length=args.gen_length, block_length=args.block_length,
        steps=args.passes_per_block, threshold=2.0,
    )  # fmt: skip
    prompt = np.random.default_rng(0).integers(0, 150_000, args.prompt_length).tolist()
    rows: list[dict] = []
    bed = TestBed(config)
    cases = [
        Case.parse(choice, capacity=capacity, carrier=args.carrier, threads=args.cpu_threads)
        for capacity in map(int, args.expert_cache.split(","))
        for choice in args.policies.split(",")
    ]
    for case in cases:
        with bed.engine(case) as engine:
            cpu = engine.cpu_experts
            compile_started = time.perf_counter()
            engine.generate([prompt], decoding)
            compile_s = time.perf_counter() - compile_started
            before = engine.statistics.summary(PassKind.DENOISE)
            prefill_before = engine.statistics.summary(PassKind.PREFILL)
            result = engine.generate([prompt], decoding)[0]
            after = engine.statistics.summary(PassKind.DENOISE)
            prefill = engine.statistics.summary(PassKind.PREFILL)
            passes = after.passes - before.passes
            seconds = result.decode_s
            moved = after.bytes_h2d - before.bytes_h2d
            pool_bytes = sum(array.nbytes for array in engine.pool)
            trunk_bytes = sum(array.nbytes for array in bed.trunk)
            kv = kv_bytes(config, 1, kv_capacity([len(prompt)], decoding))
            peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
            rows.append(
                {
                    "policy": case.policy, "cpu": cpu.name if cpu else "off", "capacity": case.capacity,
                    "load_s": bed.load_s, "compile_s": compile_s,
                    "ms_per_pass": seconds * 1e3 / (passes + result.passes[PassKind.COMMIT]),
                    "misses_per_layer": (after.misses - before.misses) / passes / config.num_moe_layers,
                    "to_gpu": (after.to_gpu - before.to_gpu) / passes / config.num_moe_layers,
                    "to_cpu": (after.to_cpu - before.to_cpu) / passes / config.num_moe_layers,
                    "decode_h2d_gbs": moved / seconds / GB,
                    "prefill_s": result.ttft_prefill_s,
                    "prefill_h2d_gbs": (prefill.bytes_h2d - prefill_before.bytes_h2d) / result.ttft_prefill_s / GB,
                    "plan_us_layer": after.planning_us["total"] / config.num_moe_layers,
                    "device_peak_gb": peak / GB,
                    "pool_trunk_kv_gb": (pool_bytes + trunk_bytes + kv) / GB,
                    "host_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB,
                    "store_gb": bed.store.num_bytes / GB, "pinned": bed.store.pinned,
                    "planning_us": after.planning_us,
                    "cpu_stats": vars(cpu.stats) if cpu else {},
                }
            )  # fmt: skip
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    main()
