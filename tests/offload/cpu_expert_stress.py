"""1,000 iterations of a jitted CPU program that submits and collects in callbacks, on at most two cores.

Run in a process of its own, under a timeout: a deadlock must not take the test session with it.
Arguments: the backends to run, one after the other.
"""

import os
import sys

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # before JAX sizes its thread pools

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import io_callback  # noqa: E402

from oled_jax.errors import UsageError  # noqa: E402
from oled_jax.offload.cpu_experts import CpuExperts, CpuWork, make_cpu_experts  # noqa: E402

# Narrow experts: what counts is the number of calls. The device's own product is wide enough for several threads.
L, N, E, K, D, F, THREADS = 2, 8, 8, 4, 256, 32, 2


def submit_and_collect(experts: CpuExperts) -> jax.stages.Wrapped:
    """A program of L layers: each submits, works on the device's threads, collects."""
    ids = np.tile(np.arange(K, dtype=np.int32), (N, 1))
    gates = np.full((N, K), 0.25, np.float32)

    def submit(layer: int, x: jax.Array) -> np.int32:
        work = CpuWork(
            layer=int(layer),
            hidden=np.asarray(x),
            experts=np.arange(K),
            expert_ids=ids,
            gates=gates,
            token_mask=np.ones(N, bool),
        )
        experts.submit(work)
        return np.int32(layer)

    def collect(layer: int, _: jax.Array) -> np.ndarray:
        return experts.collect(int(layer))

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        for layer in range(L):
            plan = io_callback(submit, jax.ShapeDtypeStruct((), jnp.int32), layer, x)
            other = jnp.tanh(x @ jnp.ones((x.shape[1], x.shape[1])) / x.shape[1])
            x = other + io_callback(collect, jax.ShapeDtypeStruct(x.shape, x.dtype), layer, plan)
        return x

    return program


def main() -> None:
    rng = np.random.default_rng(0)
    shapes = (E, 2 * F, D), (E, D, F)
    pages = [tuple(rng.standard_normal(s, np.float32) / s[-1] ** 0.5 for s in shapes) for _ in range(L)]
    for name in sys.argv[1:]:
        try:
            experts = make_cpu_experts(name, pages, threads=THREADS)
        except UsageError as error:
            print("not usable here:", name, error)
            continue
        with experts:
            program = submit_and_collect(experts)
            x = jnp.ones((N, D))
            for _ in range(1000):
                x = program(x)  # not waited for: programs queue up, as they may in the engine
            x.block_until_ready()
            print("finished 1000", name, experts.stats.pages, flush=True)


main()
