"""Times the expert feed-forward at published sizes against the bytes it must read.

    python scripts/bench_ffn.py --size llada2-mini --pages 64 --tokens 16

Prints microseconds and GB/s of page bytes for each implementation and tile, beside the device's copy bandwidth.
"""

import argparse
import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np

from oled_jax.models.published import PUBLISHED
from oled_jax.ops import grouped_ffn_triton
from oled_jax.ops.grouped_ffn import grouped_ffn
from oled_jax.ops.grouping import ItemShape

SLOTS = 512  # more pages than any cache of the device holds


def seconds(function, *operands, repeats: int = 20) -> float:
    """Median time of one call, operands on the device."""
    jax.block_until_ready(function(*operands))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*operands))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=PUBLISHED, default="llada2-mini")
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--chain", type=int, default=8, help="calls in one program, so that launching is not timed")
    parser.add_argument("--tiles", action="store_true", help="try tile sizes of the Triton kernels")
    args = parser.parse_args()
    raw = PUBLISHED[args.size]
    D, F = raw["hidden_size"], raw["moe_intermediate_size"]
    items = ItemShape(num_tokens=args.tokens, top_k=8, num_experts=256)
    rng = np.random.default_rng(0)
    key = jax.random.key(0)
    gate_up = jax.random.normal(key, (SLOTS, 2 * F, D), jnp.bfloat16)
    down = jax.random.normal(key, (SLOTS, D, F), jnp.bfloat16)
    x = jax.random.normal(key, (args.tokens, D), jnp.bfloat16)
    used = [np.resize(rng.permutation(SLOTS)[: args.pages], items.max_items) for _ in range(args.chain)]
    numbers = jnp.asarray([[0, args.pages, *slots] for slots in used], jnp.int32)  # first item, end, slots
    page_bytes = 3 * D * F * 2

    def chain(ffn, x, numbers, gate_up, down):
        out = jnp.zeros((items.max_items, args.tokens, D), x.dtype)
        for index in range(args.chain):
            out = ffn(x[None] + out[0] * 0, numbers[index], gate_up, down, out, span_at=0, slots_at=2)
        return out[0, 0]

    def report(name, ffn):
        took = seconds(jax.jit(functools.partial(chain, ffn)), x, numbers, gate_up, down) / args.chain
        print(f"{name:40} {took * 1e6:9.1f} us {args.pages * page_bytes / took / 1e9:8.0f} GB/s", flush=True)

    copied = seconds(jax.jit(lambda a: a + 1), gate_up)
    print(f"device copy bandwidth {2 * gate_up.nbytes / copied / 1e9:.0f} GB/s (read and written)")
    report("xla", functools.partial(grouped_ffn, implementation="xla"))
    default = (
        grouped_ffn_triton.TILE_OUT,
        grouped_ffn_triton.TILE_IN,
        grouped_ffn_triton.WARPS,
        grouped_ffn_triton.STAGES,
    )
    choices = itertools.product((32, 64, 128), (64, 128, 256), (4, 8), (3, 4)) if args.tiles else [default]
    for choice in choices:
        for name, value in zip(("TILE_OUT", "TILE_IN", "WARPS", "STAGES"), choice, strict=True):
            setattr(grouped_ffn_triton, name, value)
        try:
            report(
                f"triton out {choice[0]} in {choice[1]} warps {choice[2]} stages {choice[3]}",
                grouped_ffn_triton.grouped_ffn,
            )
        except Exception as error:  # a tile that does not fit the device's shared memory is a result too
            print(f"triton {choice}: {str(error).splitlines()[0][:90]}")


if __name__ == "__main__":
    main()
