"""Writes arrays as Orbax checkpoints whose files are the arrays' bytes and nothing else.

Orbax, told to use neither its own container (OCDBT) nor compression, writes each array as Zarr version 2 with a
single chunk: one file of plain bytes in C order, next to a small description. Any Orbax reads that back; we
read the bytes themselves, because Orbax would allocate what it returns (docs/checkpoints.md has the measurements).
"""

import errno
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from oled_jax.interrupts import interrupts_held

FAILED_SYSTEM_CALL = re.compile(r"os_error_code='(\d+)'")  # how TensorStore words it
LEAST_CONCURRENT_GB = 1


def chunk_file(path: tuple[str, ...], dimensions: int) -> str:
    """Where Orbax puts the only chunk of the leaf at `path`, relative to the checkpoint."""
    return f"{'.'.join(path)}/{'.'.join(['0'] * max(dimensions, 1))}"


# Orbax runs asyncio. An interrupt that meets it while it makes an event loop leaves half of one, which complains on
# standard error when it is thrown away; one that meets the garbage collector while Orbax is imported is lost in JAX's
# callback.
@interrupts_held()
def save_arrays(directory: Path, arrays: Mapping[tuple[str, ...], np.ndarray]) -> None:
    """Writes one Orbax checkpoint: nested dictionaries of arrays, complete and on the disk when this returns.

    Ctrl-C takes effect when it has returned.

    Args:
      directory: must not exist. It appears under this name when it is complete.
      arrays: by path in the tree; none is empty (Orbax refuses arrays without elements).

    Raises:
      OSError: the system refused to write.
    """
    import orbax.checkpoint as ocp  # a second and a half to import; nothing else here needs it

    largest_gb = max((array.nbytes for array in arrays.values()), default=0) // 10**9 + 1
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_compression=False, save_concurrent_gb=max(largest_gb, LEAST_CONCURRENT_GB)
    )
    with _quiet(), _system_errors(directory), ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(directory, _nested(arrays))
    for path, array in arrays.items():
        file = directory / chunk_file(path, array.ndim)
        if not file.is_file() or file.stat().st_size != array.nbytes:
            raise RuntimeError(f"Orbax {ocp.__version__} did not write {file.name} of {directory} as plain bytes")


def _nested(arrays: Mapping[tuple[str, ...], np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = array
    return tree


@contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs a traceback for each thread that fails, and a warning because there is no OCDBT to merge.

    After a failure it stays quiet: threads of Orbax still end then, and the exception says all that they would.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@contextmanager
def _system_errors(directory: Path) -> Iterator[None]:
    """TensorStore reports a full disk as a ValueError."""
    try:
        yield
    except ValueError as error:
        found = FAILED_SYSTEM_CALL.search(str(error))
        if found is None:
            raise
        number = int(found[1])
        reason = "the file is larger than allowed" if number == errno.EFBIG else os.strerror(number)
        raise OSError(number, reason, str(directory)) from error
