"""Times CPU expert backends at published sizes against the rate at which this machine reads memory.

    python scripts/bench_cpu_experts.py --backends native,numba --tokens 1,2,4,8,16 --json result.json

Pages lie in more memory than any cache holds and are visited in turn. Every round reads the same memory with the same
number of threads first; the share is of that round's rate, so that a busy machine slows both. Medians over rounds.
"""

import argparse
import json
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from oled_jax import native
from oled_jax.models.published import PUBLISHED
from oled_jax.offload.cpu_experts import BACKENDS, CpuExperts, CpuWork
from oled_jax.offload.cpu_experts.native import NativeExperts

BLOCK_TOKENS = 32


def make_pages(E: int, D: int, F: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One layer's gate and up, its down, and all their bytes: random bfloat16 values."""
    raw = np.empty(3 * E * D * F * 2 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    memory = raw[start : start + 3 * E * D * F * 2]
    values = memory.view(ml_dtypes.bfloat16)
    noise = (np.random.default_rng(0).standard_normal(1 << 22, np.float32) / 50).astype(values.dtype)
    for first in range(0, values.size, noise.size):
        values[first : first + noise.size] = noise[: values.size - first]
    split = 2 * E * F * D
    return values[:split].reshape(E, 2 * F, D), values[split:].reshape(E, D, F), memory


def make_work(rng: np.random.Generator, experts: np.ndarray, D: int, tokens: int) -> CpuWork:
    """Each expert has `tokens` tokens of a block."""
    N = max(BLOCK_TOKENS, tokens)
    expert_ids = np.full((N, len(experts)), -1, np.int32)
    for column, expert in enumerate(experts):
        expert_ids[rng.permutation(N)[:tokens], column] = expert
    return CpuWork(
        layer=0,
        hidden=rng.standard_normal((N, D), np.float32).astype(ml_dtypes.bfloat16),
        experts=experts,
        expert_ids=expert_ids,
        gates=rng.random(expert_ids.shape, np.float32),
        token_mask=np.ones(N, bool),
    )


def page_us(experts: CpuExperts, works: list[CpuWork]) -> float:
    """Microseconds a page, from submit to the end of collect."""
    start = time.perf_counter()
    for work in works:
        experts.submit(work)
        experts.collect(0)
    return (time.perf_counter() - start) * 1e6 / sum(len(work.experts) for work in works)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=PUBLISHED, default="llada2-mini")
    parser.add_argument("--backends", default="native", help=f"of {', '.join(BACKENDS)}")
    parser.add_argument("--isa", help="instruction set levels of the native backend (default: the fastest)")
    parser.add_argument("--tokens", default="1,2,4,8,16", help="tokens of each expert")
    parser.add_argument("--threads", help="default: 1 and every power of two up to the usable CPUs")
    parser.add_argument("--pages", type=int, default=160, help="in memory")
    parser.add_argument("--experts", type=int, default=16, help="computed in one call")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--read-s", type=float, default=0.2, help="seconds of reading in a round")
    parser.add_argument("--pin", action="store_true", help="native threads stay on physical cores")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    args = parser.parse_args()
    raw = PUBLISHED[args.size]
    D, F = raw["hidden_size"], raw["moe_intermediate_size"]
    gate_up, down, memory = make_pages(args.pages, D, F)
    page_bytes = memory.nbytes / args.pages
    rng = np.random.default_rng(0)
    backends = [(name, None) for name in args.backends.split(",")]
    if args.isa:
        backends = [("native", isa) for isa in args.isa.split(",")]
    rows = []
    print(f"{'backend':18}{'threads':>8}{'tokens':>7}{'us a page':>11}{'GB/s':>7}{'read GB/s':>11}{'share':>7}")
    for threads in thread_counts(args.threads):
        for name, isa in backends:
            options = {"isa": isa, "pin": args.pin} if BACKENDS[name] is NativeExperts else {}
            with BACKENDS[name]([(gate_up, down)], threads=threads, **options) as experts:
                for tokens in map(int, args.tokens.split(",")):
                    visits = np.arange(args.pages // args.experts * args.experts).reshape(-1, args.experts)
                    works = [make_work(rng, visit, D, tokens) for visit in visits]
                    read, took = [], []
                    for _ in range(args.rounds):
                        read.append(native.extension.host_read_gbs(memory, threads, args.read_s))
                        took.append(page_us(experts, works))
                    gbs = page_bytes / np.array(took) / 1e3
                    row = {
                        "backend": name if isa is None else f"{name}/{isa}", "threads": threads, "tokens": tokens,
                        "page_us": float(np.median(took)), "gbs": float(np.median(gbs)),
                        "read_gbs": float(np.median(read)), "share": float(np.median(gbs / np.array(read))),
                    }  # fmt: skip
                    rows.append(row)
                    print("{backend:18}{threads:8}{tokens:7}{page_us:11.1f}{gbs:7.1f}{read_gbs:11.1f}{share:7.2f}"
                          .format(**row), flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps({"arguments": vars(args) | {"json": None}, "rows": rows}, indent=1))


def thread_counts(text: str | None) -> list[int]:
    if text:
        return [int(part) for part in text.split(",")]
    import os

    usable = len(os.sched_getaffinity(0))
    return sorted({usable, *(2**i for i in range(usable.bit_length()) if 2**i <= usable)})


if __name__ == "__main__":
    main()
