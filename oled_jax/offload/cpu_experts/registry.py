"""The CPU expert backends by name, the default thread count, and the measurement behind `auto`."""

import os
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from oled_jax.errors import UsageError
from oled_jax.offload.cpu_experts.base import CpuExperts, CpuWork, LayerPages
from oled_jax.offload.cpu_experts.cores import physical_cores
from oled_jax.offload.cpu_experts.native import NativeExperts
from oled_jax.offload.cpu_experts.numba import NumbaExperts
from oled_jax.offload.cpu_experts.numpy import NumpyExperts
from oled_jax.offload.cpu_experts.xla import XlaExperts

BACKENDS: Mapping[str, type[CpuExperts]] = MappingProxyType(
    {backend.name: backend for backend in (NumpyExperts, XlaExperts, NumbaExperts, NativeExperts)}
)
AUTO = "auto"
MEASURE_S = 0.25  # at most, for each backend, compilation not counted
MEASURE_ROWS = 2  # tokens per expert: about what a missed expert has when a block of 32 is decoded
MEASURE_EXPERTS = 16  # experts per layer visit


def make_cpu_experts(name: str, pages: Sequence[LayerPages], *, threads: int | None = None) -> CpuExperts:
    """The backend called `name`, or with "auto" the one that is fastest here: `description` says why.

    Args:
      pages: per MoE layer, gate and up [E, 2F, D] and down [E, D, F]: views of the store.
      threads: worker threads; None: `default_threads()`.

    Raises:
      UsageError: an unknown name, a backend that cannot run here, threads below 1.
    """
    threads = default_threads() if threads is None else threads
    if name == AUTO:
        return _fastest(pages, threads)
    if name not in BACKENDS:
        raise UsageError(f"CPU experts {name!r} is unknown; choose {', '.join([AUTO, *BACKENDS])}")
    return BACKENDS[name](pages, threads=threads)


def default_threads() -> int:
    """Physical cores that this process may use, less two for the program and its callbacks; at least 1."""
    return max(1, physical_cores(os.sched_getaffinity(0)) - 2)


def _fastest(pages: Sequence[LayerPages], threads: int) -> CpuExperts:
    measured: dict[str, float] = {}
    unusable = []
    for name, backend in BACKENDS.items():
        try:
            # One layer is enough: its pages exceed the caches, and wrapping all layers takes time.
            with backend(pages[:1], threads=threads) as experts:
                measured[name] = page_us(experts)
        except UsageError as error:
            unusable.append(f"{name} is not usable here ({error})")
    order = sorted(measured, key=measured.__getitem__)
    experts = BACKENDS[order[0]](pages, threads=threads)
    figures = ", ".join(f"{name} {measured[name]:.0f}" for name in order)
    reasons = "; ".join([f"the fastest of those measured, in us a page: {figures}", *unusable])
    experts.description = f"{experts.description} ({reasons})"
    return experts


def page_us(experts: CpuExperts, *, rows: int = MEASURE_ROWS, limit_s: float = MEASURE_S) -> float:
    """Microseconds a page on layer 0, all threads together, as the device program would wait for it.

    Visits the experts in turn, so that pages come from memory, not from a cache. The first visit is warm-up.
    """
    gate_up, _ = experts.pages[0]
    E, _, D = gate_up.shape
    H = min(E, MEASURE_EXPERTS)
    # Zeros cost what other values do, and no weight makes them overflow.
    hidden = np.zeros((rows, D), gate_up.dtype)
    gates = np.ones((rows, H), np.float32)
    elapsed = pages = 0.0
    visit = 0
    while visit < 2 or elapsed < limit_s:
        chosen = (np.arange(H) + visit * H) % E
        ids = np.broadcast_to(chosen, (rows, H))
        started = time.perf_counter()
        experts.submit(
            CpuWork(
                layer=0,
                hidden=hidden,
                experts=chosen,
                expert_ids=ids,
                gates=gates,
                token_mask=np.ones(rows, bool),
            )
        )
        experts.collect(0)
        if visit:
            elapsed += time.perf_counter() - started
            pages += H
        visit += 1
    return elapsed * 1e6 / pages
