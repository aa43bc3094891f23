"""The process and what it runs on: free and used memory, versions, and JAX's start-up settings.

The only file that reads the machine. `prepare_runtime` must run before JAX starts its backend.
"""

import math
import os
import platform
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
from jax._src import xla_bridge  # whether a backend runs: no public function tells without starting one

from oled_jax.offload.store import PINNED_LIMIT_VARIABLE

XLA_DEFAULT_PINNED_GB = 64
MEMORY_FRACTION_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
MEMORY_FRACTION = "0.92"
CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def prepare_runtime(store_bytes: int) -> None:
    """Settings that JAX reads when its backend starts; what the user has set in the environment stays.

    XLA pins at most 64 GB unless told otherwise. It reserves its share of device memory at once (JAX's
    default, kept: the pool is one big allocation and must not meet fragments or other processes later), but
    92% instead of 75%, since everything that the plan of memory counts lies in that share.
    """
    needed_gb = math.ceil(store_bytes * 1.05 / 1e9) + 1
    if _backend_runs_on_a_device() and MEMORY_FRACTION_VARIABLE not in os.environ:
        warnings.warn(
            "JAX was started before the model was opened: too late for the settings that make room for it "
            "(docs/statistics.md). Load the model before anything else uses JAX.",
            stacklevel=2,
        )
    if needed_gb > XLA_DEFAULT_PINNED_GB:
        os.environ.setdefault(PINNED_LIMIT_VARIABLE, str(needed_gb))
    os.environ.setdefault(MEMORY_FRACTION_VARIABLE, MEMORY_FRACTION)


def _backend_runs_on_a_device() -> bool:
    """JAX has started a backend whose memory is not the host's, and read its settings."""
    return xla_bridge.backends_are_initialized() and not is_unified(jax.local_devices()[0])


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, in the user's cache directory unless JAX was told of another."""
    if CACHE_VARIABLE in os.environ or jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    import platformdirs  # engines that are built without a command do not need it

    directory = Path(platformdirs.user_cache_dir("oled_jax")) / "xla"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a home that cannot be written to: compile every time
    jax.config.update("jax_compilation_cache_dir", str(directory))


def is_unified(device: jax.Device) -> bool:
    """The device's memory is the host's."""
    return device.platform == "cpu"


def device_free_bytes(device: jax.Device) -> int | None:
    """Device memory that this process can still allocate; None if the device does not say."""
    if is_unified(device):
        return None
    jax.block_until_ready(jax.device_put(np.zeros(1, np.float32), device))  # the first allocation makes the reservation
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    reserved = stats.get("pool_bytes") or stats["bytes_limit"]
    return min(reserved, stats["bytes_limit"]) - stats["bytes_in_use"]


def device_peak_bytes(device: jax.Device) -> int | None:
    """The most device memory in use so far; None if the device does not say."""
    stats = None if is_unified(device) else device.memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


def host_free_bytes() -> int | None:
    """Host memory that programs can still use without swapping; None where the kernel does not say."""
    return _meminfo("MemAvailable")


def host_peak_bytes() -> int:
    """The most host memory that this process held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def process_age_s() -> float:
    """Seconds since this process was started, whatever it did then."""
    after_boot = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot / os.sysconf("SC_CLK_TCK")


def describe_machine(device: jax.Device) -> dict[str, Any]:
    """`machine` of the statistics object."""
    stats = None if is_unified(device) else device.memory_stats()
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "device_memory_bytes": stats.get("bytes_limit") if stats else None,
        "host_memory_bytes": _meminfo("MemTotal"),
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "flax": flax.__version__,
        "numpy": np.__version__,
    }


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None
