"""Measures folded commits: the same prompts with and without `fold_commits`, in alternation on one engine.

    python scripts/bench_fold.py --expert-cache 16,32 --policies all,oled:dispatch=gpu,oled+ --json fold.json
    python scripts/bench_fold.py --size llada2-mini --expert-cache 40,100

Without --size the model is the one in the package and the prompts are held-out questions of its families. With it the
weights are random, which route almost uniformly: then times say something, hit rates nothing about a trained model.
"""

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Sequence

from oled_jax.models.published import PUBLISHED

COLUMNS = (
    "policy", "capacity", "folded", "tokens", "iterations", "commits", "ms_per_pass", "decode_s", "tpot_ms", "cpu_s",
    "hit_rate", "misses", "h2d_mb", "same_tokens",
)  # fmt: skip


def main() -> None:
    args = parse()
    from oled_jax.machine import prepare_runtime, use_compilation_cache
    from oled_jax.memory import store_bytes
    from oled_jax.models.registry import config_from_hf

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.size:
        prepare_runtime(store_bytes(config_from_hf(raw_config(args))))
    use_compilation_cache()
    rows = measure(args)
    if args.json:
        from oled_jax.report import write_json

        write_json({"machine": describe(), "settings": vars(args), "rows": rows}, args.json)
    print(" | ".join(COLUMNS))
    for row in rows:
        print(" | ".join(f"{row[key]:.4g}" if isinstance(row[key], float) else str(row[key]) for key in COLUMNS))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=PUBLISHED, help="random weights of this shape instead of the small model")
    parser.add_argument("--layers", type=int, help="use only this many layers of it")
    parser.add_argument("--expert-cache", default="16,32", help="capacities, comma-separated")
    parser.add_argument("--policies", default="oled:dispatch=gpu", help="comma-separated; POLICY@BACKEND uses the CPU")
    parser.add_argument("--cpu-threads", type=int)
    parser.add_argument("--carrier", default="auto")
    parser.add_argument("--items", type=int, default=2, help="questions of each family; prompts with --size")
    parser.add_argument("--batch", type=int, default=1, help="prompts that are decoded together")
    parser.add_argument("--gen-length", type=int, default=96)
    parser.add_argument("--block-length", type=int, help="default: the model's")
    parser.add_argument("--passes-per-block", type=int, default=8, help="with --size")
    parser.add_argument("--prompt-length", type=int, default=128, help="with --size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def raw_config(args: argparse.Namespace) -> dict:
    raw = dict(PUBLISHED[args.size])
    return raw | {"num_hidden_layers": args.layers or raw["num_hidden_layers"]}


def describe() -> dict:
    import jax

    from oled_jax.machine import describe_machine

    return describe_machine(jax.local_devices()[0])


def model_and_prompts(args: argparse.Namespace) -> tuple:
    """The test bed, the prompts and how they are decoded."""
    import numpy as np

    from oled_jax.bench.bed import TestBed
    from oled_jax.config import DecodingConfig
    from oled_jax.decoding_options import decoding_for
    from oled_jax.demo.families import DEMO_FAMILIES, held_out_items
    from oled_jax.loading import open_model
    from oled_jax.models.registry import config_from_hf

    if args.size:
        decoding = DecodingConfig(
            mask_id=156895, eos_id=-1, gen_length=args.gen_length, block_length=args.block_length or 32,
            steps=args.passes_per_block, threshold=2.0,
        )  # fmt: skip
        prompts = np.random.default_rng(0).integers(0, 150_000, (args.items, args.prompt_length)).tolist()
        return TestBed(config_from_hf(raw_config(args))), prompts, decoding
    model = open_model(None, None, None)
    flags = {"gen_length": args.gen_length} | ({"block_length": args.block_length} if args.block_length else {})
    decoding, _ = decoding_for(model, flags)
    items = [item for family in DEMO_FAMILIES for item in held_out_items(family, args.items)]
    prompts = [model.codec.encode_prompt(item.prompt) for item in items]
    return TestBed(model.config, source=model.weights), prompts, decoding


def measure(args: argparse.Namespace) -> list[dict]:
    from oled_jax.bench.bed import Case

    bed, prompts, decoding = model_and_prompts(args)
    ways = {folded: dataclasses.replace(decoding, fold_commits=folded) for folded in (False, True)}
    rows = []
    for capacity in map(int, args.expert_cache.split(",")):
        for policy in args.policies.split(","):
            case = Case.parse(policy, capacity=capacity, carrier=args.carrier, threads=args.cpu_threads)
            runs: dict[bool, list[dict]] = {folded: [] for folded in ways}
            with bed.engine(case) as engine:
                for _ in range(1 + args.repeats):  # the first compiles and fills the cache
                    for folded, way in ways.items():
                        runs[folded].append(run(engine, prompts, way, args.batch))
            same = runs[False][0]["ids"] == runs[True][0]["ids"]
            for folded in ways:
                row = {"policy": policy, "capacity": capacity, "folded": folded, "same_tokens": same}
                rows.append(row | summarise(runs[folded][1:]))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def run(engine, prompts: Sequence[Sequence[int]], decoding, batch: int) -> dict:
    """All prompts once: what it took, and what the cache did in all passes but prefill. decode_s: of all requests."""
    from oled_jax.passes import PassKind

    engine.statistics.restart()
    cpu_started = time.process_time()
    results = engine.generate(prompts, decoding, batch=batch)
    cpu_s = time.process_time() - cpu_started
    iterations, commit = (PassKind.DENOISE, PassKind.EDIT), PassKind.COMMIT
    cache = engine.statistics.summary(*iterations, commit)
    decode_s = sum(result.decode_s for result in results)
    passes = sum(result.passes[kind] for result in results for kind in (*iterations, commit))
    return {
        "ids": [result.output_ids for result in results],
        "tokens": sum(len(result.output_ids) for result in results),
        "iterations": engine.statistics.summary(*iterations).passes,
        "commits": engine.statistics.summary(commit).passes,
        "decode_s": decode_s, "cpu_s": cpu_s, "ms_per_pass": decode_s * 1e3 / passes,
        "hits": cache.hits, "misses": cache.misses, "to_cpu": cache.to_cpu, "bytes_h2d": cache.bytes_h2d,
    }  # fmt: skip


def summarise(runs: Sequence[dict]) -> dict:
    """Medians over the repeats."""
    row = {name: statistics.median(run[name] for run in runs) for name in runs[0] if name != "ids"}
    spread = max(run["decode_s"] for run in runs) - min(run["decode_s"] for run in runs)
    return row | {
        "decode_spread_s": spread,
        "tpot_ms": row["decode_s"] * 1e3 / row["tokens"],
        "hit_rate": row["hits"] / (row["hits"] + row["misses"]),
        "h2d_mb": row["bytes_h2d"] / 1e6,
    }


if __name__ == "__main__":
    main()
