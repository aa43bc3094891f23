"""Safetensors files: headers. And, for any file of plain bytes, reads straight into the caller's arrays.

Files are open only for the length of a call. The format is 8 bytes of header length (little endian), a JSON
header, then the data. The header is parsed here because reading in place needs the byte offsets, which the
safetensors library keeps to itself; its mapped pages would count as resident memory next to the final copy.
"""

import dataclasses
import json
import math
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from oled_jax.convert.problems import Problems
from oled_jax.errors import CheckpointError

READABLE: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
METADATA = {"format": "pt"}  # transformers refuses safetensors files without it
ALIGNMENT = 8  # of the data; the safetensors library pads its headers alike
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
CHUNK_BYTES = 1 << 20  # small enough that a chunk is still in cache when it is examined and cast


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies: `offset` bytes from the start of `file`. `dtype` is the safetensors code.

    A tensor may lie in `pieces` of equal size that begin every `stride` bytes (experts that were stacked in
    the source, and whose gate and up share a page here).
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    pieces: int = 1
    stride: int = 0

    def position(self, element: int) -> int:
        """Where in the file the element of this number begins, counted in C order."""
        byte = element * READABLE[self.dtype].itemsize
        if self.pieces == 1:
            return self.offset + byte
        piece, rest = divmod(byte, self.nbytes // self.pieces)
        return self.offset + piece * self.stride + rest


def read_header(file: Path, problems: Problems) -> dict[str, StoredTensor] | None:
    """Tensors of a safetensors file by name. Notes every fault; None if the file has no readable header."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if start == b"version ":
                problems.add(f"{file.name} is a Git LFS pointer, not the weights: fetch them with git lfs pull")
                return None
            length = int.from_bytes(start, "little")
            if len(start) < 8 or size < 8 + length <= 8 + MAX_HEADER_BYTES:
                problems.add(f"{file.name} is truncated: its {size} bytes do not hold its header")
                return None
            header = json.loads(stream.read(length)) if length <= MAX_HEADER_BYTES else None
    except OSError as error:
        problems.add(f"{file.name} cannot be read ({error.strerror})")
        return None
    except ValueError:
        header = None
    if not isinstance(header, dict):
        problems.add(f"{file.name} is not a safetensors file: its header is not readable")
        return None
    return _stored_tensors(file, size, 8 + length, header, problems)


def _stored_tensors(
    file: Path, size: int, data_start: int, header: dict[str, Any], problems: Problems
) -> dict[str, StoredTensor]:
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensor = _stored_tensor(name, file, data_start, entry)
        if tensor is None:
            problems.add(
                f"{file.name}: the header entry of {name} is damaged",
                f"damaged header entries in {file.name}",
            )
        else:
            tensors[name] = tensor
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset < end:
            problems.add(f"{file.name}: {tensor.name} overlaps another tensor", f"overlapping tensors in {file.name}")
        end = max(end, tensor.offset + tensor.nbytes)
    if end > size:
        cut = sum(t.offset + t.nbytes > size for t in tensors.values())
        problems.add(f"{file.name} is truncated: {size} bytes instead of {end}, {cut} tensors are cut off or missing")
    return tensors


def _stored_tensor(name: str, file: Path, data_start: int, entry: Any) -> StoredTensor | None:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (begin, end, *shape))
    except (KeyError, TypeError, ValueError):
        return None
    if not isinstance(dtype, str) or not whole or end < begin:
        return None
    if dtype in READABLE and end - begin != math.prod(shape) * READABLE[dtype].itemsize:
        return None
    return StoredTensor(
        name=name, file=file, dtype=dtype, shape=tuple(shape), offset=data_start + begin, nbytes=end - begin
    )


def file_header(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """The start of a safetensors file, up to its data.

    Args:
      tensors: name, dtype code, shape and number of bytes, in the order in which their data follows.
    """
    header: dict[str, Any] = {"__metadata__": METADATA}
    offset = 0
    for name, code, shape, num_bytes in tensors:
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class ValueCheck:
    """Counts the values no model can run with, while they pass by. Threads may share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[str, int]] = {}

    def examine(self, name: str, stored: np.ndarray, kept: np.ndarray) -> None:
        """Looks at a chunk of tensor `name`: as it lay in the file, and as it is kept."""
        if _all_finite(kept):
            return
        nan, inf = int(np.isnan(stored).sum()), int(np.isinf(stored).sum())
        overflow = int(np.isinf(kept).sum()) - inf
        with self._lock:
            counts = self._counts.setdefault(name, {})
            for what, count in (("NaN", nan), ("inf", inf), (f"too large for {kept.dtype}", overflow)):
                if count:
                    counts[what] = counts.get(what, 0) + count

    def note(self, problems: Problems) -> None:
        """Adds one problem for each tensor with such values."""
        for name, counts in sorted(self._counts.items()):
            found = " and ".join(f"{count} {what}" for what, count in counts.items())
            problems.add(f"{name} holds {found}", "tensors with NaN, inf or overflowing values")


def _all_finite(values: np.ndarray) -> bool:
    # Ordered as integers, NaN and inf come last: as signed numbers above all positive values, as unsigned
    # ones above all negative. Two reductions, no temporaries: 32 GB/s where isfinite on bfloat16 reaches 1.7.
    if values.size == 0:
        return True
    signed, unsigned = (np.int16, np.uint16) if values.dtype.itemsize == 2 else (np.int32, np.uint32)
    inf, minus_inf = np.array([np.inf, -np.inf], values.dtype).view(unsigned)
    return bool(values.view(signed).max() < inf and values.view(unsigned).max() < minus_inf)


class TensorReader:
    """Reads tensors into arrays; a context manager that keeps the files it met open."""

    def __init__(self, check: ValueCheck):
        self._check = check
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read(self, tensor: StoredTensor, destination: np.ndarray, skip: int = 0) -> None:
        """Fills `destination` with as many elements of `tensor` as it holds, from element `skip` on.

        Equal dtypes: from disk to their place, without a copy between. Else cast chunk by chunk, to nearest.

        Args:
          destination: C-contiguous, a float dtype. Of a tensor in pieces, it lies within one.

        Raises:
          CheckpointError: the file has become unreadable or shorter since its header was read.
        """
        if not destination.flags.c_contiguous:
            raise RuntimeError(f"destination of {tensor.name} is not contiguous")
        stored = READABLE[tensor.dtype]
        flat = destination.reshape(-1)
        step = CHUNK_BYTES // stored.itemsize
        staging = None if flat.dtype == stored else np.empty(min(step, flat.size), stored)
        for begin in range(0, flat.size, step):
            kept = flat[begin : begin + step]
            chunk = kept if staging is None else staging[: kept.size]
            self._fill(tensor, chunk, tensor.position(skip + begin))
            if staging is not None:
                with np.errstate(over="ignore", invalid="ignore"):  # the check names the tensor instead
                    kept[...] = chunk
            self._check.examine(tensor.name, chunk, kept)

    def _fill(self, tensor: StoredTensor, chunk: np.ndarray, offset: int) -> None:
        view = chunk.view(np.uint8).data
        try:
            if tensor.file not in self._descriptors:
                self._descriptors[tensor.file] = os.open(tensor.file, os.O_RDONLY)
            while view:
                count = os.preadv(self._descriptors[tensor.file], [view], offset)
                if count == 0:
                    raise CheckpointError(str(tensor.file), [f"ends before the data of {tensor.name}"])
                view, offset = view[count:], offset + count
        except OSError as error:
            raise CheckpointError(str(tensor.file), [f"cannot be read ({error.strerror})"]) from error
