"""Pages, work and the float64 reference that the CPU expert tests share."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from oled_jax import native
from oled_jax.offload.cpu_experts import CpuExperts, CpuWork, make_cpu_experts
from oled_jax.offload.cpu_experts.base import LayerPages

DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
# Float32 sums of up to a few hundred products, relative to the sum of their sizes; XLA carries the activation
# of a bfloat16 model in 16 bits (2^-17 = 7.6e-6). Rounding it to bfloat16 would give 2^-9 = 2e-3.
TOLERANCE = 2e-5


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros at a 64-byte boundary, as the store allocates them."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def make_pages(dtype: np.dtype, *, L: int = 2, E: int = 6, D: int = 64, F: int = 32, seed: int = 0) -> list[LayerPages]:
    rng = np.random.default_rng(seed)
    pages = []
    for _ in range(L):
        gate_up, down = aligned((E, 2 * F, D), dtype), aligned((E, D, F), dtype)
        gate_up[:] = rng.standard_normal(gate_up.shape) / np.sqrt(D)
        down[:] = rng.standard_normal(down.shape) / np.sqrt(F)
        pages.append((gate_up, down))
    return pages


def make_work(pages: list[LayerPages], *, N: int, H: int, K: int = 3, layer: int = 0, seed: int = 0) -> CpuWork:
    rng = np.random.default_rng(seed)
    E, D, _ = pages[layer][1].shape
    return CpuWork(
        layer=layer,
        hidden=rng.standard_normal((N, D)).astype(pages[layer][1].dtype),
        experts=rng.permutation(E)[:H],
        expert_ids=np.stack([rng.permutation(E)[:K] for _ in range(N)]),
        gates=rng.random((N, K), np.float32),
        token_mask=rng.random(N) < 0.8,
    )


def reference(pages: list[LayerPages], work: CpuWork) -> tuple[np.ndarray, np.ndarray]:
    """The layer's share in float64, and the sum of the sizes of the products that make it up."""
    out = np.zeros(work.hidden.shape)
    size = np.zeros(work.hidden.shape)
    for token, ids in enumerate(work.expert_ids):
        for k, expert in enumerate(ids):
            if work.token_mask[token] and expert in work.experts:
                down = pages[work.layer][1][expert].astype(np.float64)
                both = pages[work.layer][0][expert].astype(np.float64) @ work.hidden[token].astype(np.float64)
                gate, up = np.split(both, 2)
                activation = gate / (1 + np.exp(-gate)) * up
                out[token] += work.gates[token, k] * (down @ activation)
                size[token] += work.gates[token, k] * (np.abs(down) @ np.abs(activation))
    return out, size


def run(experts: CpuExperts, work: CpuWork) -> np.ndarray:
    experts.submit(work)
    return experts.collect(work.layer)


def check(pages: list[LayerPages], work: CpuWork, result: np.ndarray) -> None:
    expected, size = reference(pages, work)
    assert result.dtype == np.float32
    assert result.shape == expected.shape
    assert (np.abs(result - expected) <= TOLERANCE * size).all(), np.max(np.abs(result - expected) / (size + 1e-30))


def make(name: str, pages: list[LayerPages], threads: int = 2) -> CpuExperts:
    if name == "numba":
        pytest.importorskip("numba")
    if name == "native" and native.extension is None:
        pytest.skip(native.UNAVAILABLE)
    return make_cpu_experts(name, pages, threads=threads)


def raising(error: BaseException) -> Callable[..., np.ndarray]:
    def compute(*_: object) -> np.ndarray:
        raise error

    return compute
