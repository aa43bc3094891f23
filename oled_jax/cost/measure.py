"""From a key to a hardware profile: which probes run, in which order, for how long.

`measure_quick` is what a run does by itself the first time, `measure_full` what `python -m oled_jax.profile` does.
"""

import dataclasses
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.numpy as jnp

from oled_jax.config import ModelConfig
from oled_jax.cost.probes import (
    FFN_PAGES,
    CpuProbe,
    Scratch,
    TransferLoop,
    ffn_time,
    host_read_gbs,
    transfers_alone,
)
from oled_jax.cost.profile import CpuLine, CpuTime, FfnTime, Figures, HardwareProfile, ProfileKey
from oled_jax.offload.carriers.registry import AUTO, choose
from oled_jax.offload.cpu_experts import default_threads, make_cpu_experts
from oled_jax.offload.cpu_experts.registry import physical_cores
from oled_jax.offload.pool import empty_pool

TOKENS = (1, 2, 4, 8, 16)  # per expert
FEW_TOKENS = 2  # what a missed expert usually has
FFN_TOKENS = (16, 32)  # block lengths
THREADS_S, FFN_S, READ_S = 0.4, 0.3, 0.5  # seconds for each number of threads, of tokens, and for reading

Notify = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Seconds for each part; compilation, and choosing among backends, come on top. None: left out."""

    transfer_s: float
    cpu_alone_s: float | None
    together_s: float


QUICK = Budget(transfer_s=0.1, cpu_alone_s=None, together_s=0.8)
FULL = Budget(transfer_s=1.0, cpu_alone_s=2.0, together_s=3.0)


def profile_key(config: ModelConfig, backend: str, threads: int | None, carrier: str = AUTO) -> ProfileKey:
    """What a profile on this machine depends on. Starts JAX's backend.

    Args:
      config: gives the page's size and dtype.
      backend: of the CPU experts, "auto" included.
      threads: its worker threads; None: the default.
      carrier: moves the pages, see `carriers.registry`.

    Raises:
      UsageError: the carrier cannot run here.
    """
    device = jax.local_devices()[0]
    return ProfileKey(
        platform=device.platform,
        device=device.device_kind,
        cpu=_processor(),
        cpus=len(os.sched_getaffinity(0)),
        hidden=config.hidden_size,
        width=config.moe_intermediate_size,
        dtype=config.dtype,
        carrier=choose(carrier)[0],
        backend=backend,
        threads=default_threads() if threads is None else threads,
        jax=jax.__version__,
        numba=_version("numba"),
    )


def measure_quick(key: ProfileKey) -> HardwareProfile:
    """The figures that policies need. Under three seconds, `cpu_setup_s` not counted.

    Raises:
      UsageError: the CPU backend cannot run here.
    """
    started = time.perf_counter()
    profile = _measure(key, Scratch(key), QUICK)
    return dataclasses.replace(profile, seconds=time.perf_counter() - started)


def measure_full(key: ProfileKey, notify: Notify) -> HardwareProfile:
    """Everything there is in a profile. Some ten seconds, and what must be compiled.

    Args:
      notify: told what is being measured.

    Raises:
      UsageError: the CPU backend cannot run here.
    """
    started = time.perf_counter()
    notify(f"measuring transfers and CPU experts ({key.backend})")
    scratch = Scratch(key)
    base = _measure(key, scratch, FULL)
    notify(f"measuring {base.backend} with other numbers of threads")
    threads = _thread_times(scratch, base.backend)
    notify("measuring host memory and the device's expert FFN")
    read_gbs = host_read_gbs(scratch, READ_S)
    del scratch  # the FFN has a pool of its own
    ffn = _ffn_times(key)
    seconds = time.perf_counter() - started
    return dataclasses.replace(base, quick=False, seconds=seconds, ffn=ffn, host_read_gbs=read_gbs, threads=threads)


def _measure(key: ProfileKey, scratch: Scratch, budget: Budget) -> HardwareProfile:
    """Transfers and CPU experts: what quick and full profiles have in common."""
    started = time.perf_counter()
    h2d_us = transfers_alone(scratch, budget.transfer_s)
    setup_started = time.perf_counter()
    with make_cpu_experts(key.backend, [scratch.views], threads=key.threads) as experts:
        setup_s = time.perf_counter() - setup_started
        cpu = CpuLine.fit(CpuProbe(experts).points(TOKENS, budget.cpu_alone_s)) if budget.cpu_alone_s else None
        with TransferLoop(scratch) as transfers:
            points = CpuProbe(experts).points(TOKENS, budget.together_s)
        return HardwareProfile(
            key=key,
            backend=experts.name,
            description=experts.description,
            pinned=scratch.store.pinned,
            quick=True,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=time.perf_counter() - started,
            cpu_setup_s=setup_s,
            alone=Figures(h2d_us=h2d_us, cpu=cpu),
            together=Figures(h2d_us=transfers.page_us, cpu=CpuLine.fit(points)),
        )


def _thread_times(scratch: Scratch, backend: str) -> tuple[CpuTime, ...]:
    """An expert with few tokens, while transfers run, for several numbers of worker threads."""
    found: list[CpuTime] = []
    for threads in thread_counts(os.sched_getaffinity(0)):
        with make_cpu_experts(backend, [scratch.views], threads=threads) as experts, TransferLoop(scratch):
            found += CpuProbe(experts).points((FEW_TOKENS,), THREADS_S)
    return tuple(found)


def thread_counts(cpus: set[int]) -> Sequence[int]:
    """Numbers of worker threads worth a try: shares of the physical cores, and all logical CPUs but two."""
    cores = physical_cores(cpus)
    return sorted({max(1, count) for count in (cores // 4, cores // 2, cores - 2, len(cpus) - 2)})


def _ffn_times(key: ProfileKey) -> tuple[FfnTime, ...]:
    pool = empty_pool(FFN_PAGES, key.hidden, key.width, jnp.dtype(key.dtype))
    return tuple(ffn_time(pool, tokens, FFN_S) for tokens in FFN_TOKENS)


def _processor() -> str:
    """The processor's name, as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
