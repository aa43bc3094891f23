"""Passes the bytes of tensors by in small chunks: checksums of what is in memory or on disk, and copies."""

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from oled_jax.convert.manifest import CopiedFile, Entry, Manifest
from oled_jax.convert.tensors import CHUNK_BYTES
from oled_jax.errors import CheckpointError

Advance = Callable[[int], object]


def format_crc(crc: int) -> str:
    return f"{crc:08x}"


def array_crc(pieces: Iterable[np.ndarray]) -> str:
    """CRC-32 of the bytes of C-contiguous arrays, one after the other."""
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece.reshape(-1).view(np.uint8).data, crc) if piece.size else crc
    return format_crc(crc)


def entry_chunks(directory: Path, entry: Entry) -> Iterator[bytearray]:
    """The bytes of a tensor in its own order, at most `CHUNK_BYTES` at a time. Whole elements.

    Raises:
      CheckpointError: the file is missing, unreadable or too short.
    """
    if entry.file is None:
        return
    file, size = directory / entry.file, entry.nbytes // entry.pieces
    try:
        with file.open("rb", buffering=0) as stream:
            for piece in range(entry.pieces):
                begin = entry.offset + piece * entry.stride
                for offset in range(begin, begin + size, CHUNK_BYTES):
                    yield _read(stream.fileno(), offset, min(CHUNK_BYTES, begin + size - offset), entry, file)
    except OSError as error:
        raise CheckpointError(str(file), [f"cannot be read ({error.strerror})"]) from error


def _read(descriptor: int, offset: int, count: int, entry: Entry, file: Path) -> bytearray:
    chunk = bytearray(count)
    view = memoryview(chunk)
    while view:
        read = os.preadv(descriptor, [view], offset)
        if read == 0:
            raise CheckpointError(str(file), [f"ends before the data of {entry.name}"])
        view, offset = view[read:], offset + read
    return chunk


def damaged_entries(directory: Path, entries: Iterable[Entry], advance: Advance) -> list[str]:
    """Names of the tensors whose bytes are no longer those that were written, in the order of the files."""
    found = []
    for entry in sorted(entries, key=lambda entry: (entry.file or "", entry.offset)):
        crc = 0
        for chunk in entry_chunks(directory, entry):
            crc = zlib.crc32(chunk, crc)
            advance(len(chunk))
        if format_crc(crc) != entry.crc32:
            found.append(entry.name)
    return found


def verify_checkpoint(directory: Path, manifest: Manifest, advance: Advance) -> None:
    """Re-reads everything from the disk and compares checksums.

    Args:
      advance: called with the number of bytes that were just read.

    Raises:
      CheckpointError: names every tensor and file that differs.
    """
    for name in manifest.array_sizes():
        forget_cached(directory / name)
    damaged = damaged_entries(directory, manifest.entries, advance)
    problems = [f"{name} is damaged: its bytes differ from those that were written" for name in damaged]
    for copied in manifest.files:
        if describe_file(directory, copied.name) != copied:
            problems.append(f"{copied.name} differs from the file that was written")
    if problems:
        raise CheckpointError(str(directory), problems)


def describe_file(directory: Path, name: str) -> CopiedFile | None:
    """Size and checksum of a small file; None if there is none."""
    try:
        content = (directory / name).read_bytes()
    except OSError:
        return None
    return CopiedFile(name=name, nbytes=len(content), crc32=format_crc(zlib.crc32(content)))


def forget_cached(file: Path) -> None:
    """Has the kernel drop what it keeps of a file, so that the next read is one from the disk."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return  # reading will say what is wrong
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
