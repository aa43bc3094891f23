"""Converted checkpoint back to safetensors: every tensor under its name, in its dtype, in the file it came from."""

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from oled_jax.convert.checkpoint import ConvertedCheckpoint
from oled_jax.convert.files import config_with_dtype, copy_file, write_file
from oled_jax.convert.manifest import Entry, is_converted
from oled_jax.convert.pieces import Advance, damaged_entries, entry_chunks, forget_cached, format_crc
from oled_jax.convert.shards import INDEX_NAME, SINGLE_NAME
from oled_jax.convert.staging import Staging, discard, stage
from oled_jax.convert.tensors import READABLE, file_header
from oled_jax.convert.writer import require_apart
from oled_jax.errors import CheckpointError

CONFIG_NAME = "config.json"


def write_hf(checkpoint: ConvertedCheckpoint, target: Path, *, overwrite: bool, verify: bool, advance: Advance) -> None:
    """Writes `target`, a Hugging Face checkpoint, or nothing under that name. Memory: a few megabytes.

    Bytes are those of the source. If the conversion cast them (`--dtype`), the cast values are written and
    `config.json` names their dtype. Checksums of everything read are compared.

    Args:
      overwrite: replace a Hugging Face checkpoint that is there.
      verify: re-read what was written, too.
      advance: called with numbers of bytes of `checkpoint` as they are done (read back: again).

    Raises:
      UsageError: the target cannot be made.
      CheckpointError: tensors of `checkpoint` are damaged, all are named; or those written could not be read back.
    """
    require_apart(checkpoint.directory, target)
    manifest = checkpoint.manifest
    shards: dict[str, list[Entry]] = {}
    for entry in manifest.entries:
        shards.setdefault(entry.source_file, []).append(entry)
    with stage(target, job=None, replaces=_is_hf, overwrite=overwrite) as staging:
        staging.require_space(sum(_target_bytes(entry, manifest.dtype) for entry in manifest.entries))
        try:
            writer = _ShardWriter(checkpoint, staging.directory, advance)
            written = [entry for name in sorted(shards) for entry in writer.write(name, shards[name])]
            writer.require_sound()
            if verify:
                _read_back(staging, written, advance)
        except CheckpointError:
            discard(staging)
            raise
        _write_index(staging.directory, written)
        for copied in manifest.files:
            copy_file(checkpoint.directory, staging.directory, copied.name)
        if manifest.dtype is not None:
            content = config_with_dtype(_raw_config(checkpoint), manifest.dtype)
            write_file(staging.directory, CONFIG_NAME, content)
        staging.publish()


def _is_hf(directory: Path) -> bool:
    return (directory / CONFIG_NAME).exists() and not is_converted(directory)


def _raw_config(checkpoint: ConvertedCheckpoint) -> dict[str, Any]:
    return json.loads((checkpoint.directory / CONFIG_NAME).read_text(encoding="utf-8"))


def _target_dtype(entry: Entry, cast: str | None) -> str:
    return entry.source_dtype if cast is None else entry.dtype


def _target_bytes(entry: Entry, cast: str | None) -> int:
    code = _target_dtype(entry, cast)
    if code == entry.dtype:
        return entry.nbytes
    return entry.nbytes // READABLE[entry.dtype].itemsize * READABLE[code].itemsize


class _ShardWriter:
    """Writes safetensors files tensor by tensor, and keeps the names of those whose checksum was wrong."""

    def __init__(self, checkpoint: ConvertedCheckpoint, target: Path, advance: Advance) -> None:
        self._source = checkpoint.directory
        self._cast = checkpoint.manifest.dtype
        self._target = target
        self._advance = advance
        self._damaged: list[str] = []

    def write(self, name: str, entries: Sequence[Entry]) -> list[Entry]:
        """One file; returns what it holds, with places and checksums in that file."""
        # Wider elements first, as the safetensors library does, so that each tensor is aligned to its elements.
        ordered = sorted(entries, key=lambda entry: (-self._itemsize(entry), entry.source_offset))
        header = file_header([(e.name, _target_dtype(e, self._cast), e.shape, self._bytes(e)) for e in ordered])
        begin = len(header)
        path = self._target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        written = []
        with path.open("wb") as stream:
            stream.write(header)
            for entry in ordered:
                crc = self._copy(entry, stream)
                written.append(_written(entry, name, begin, self._cast, crc))
                begin += written[-1].nbytes
            stream.flush()
            os.fsync(stream.fileno())
        return written

    def require_sound(self) -> None:
        """Raises CheckpointError that names the damaged tensors that were met."""
        if self._damaged:
            problems = [f"{name} is damaged: its bytes differ from those that were written" for name in self._damaged]
            raise CheckpointError(str(self._source), problems)

    def _bytes(self, entry: Entry) -> int:
        return _target_bytes(entry, self._cast)

    def _itemsize(self, entry: Entry) -> int:
        code = _target_dtype(entry, self._cast)
        return READABLE[code].itemsize if code in READABLE else 1

    def _copy(self, entry: Entry, stream: BinaryIO) -> int:
        read_crc = written_crc = 0
        code = _target_dtype(entry, self._cast)
        for chunk in entry_chunks(self._source, entry):
            read_crc = zlib.crc32(chunk, read_crc)
            # The source's values in a wider dtype; going back is exact.
            data = chunk if code == entry.dtype else _cast_bytes(chunk, entry.dtype, code)
            written_crc = zlib.crc32(data, written_crc)
            stream.write(data)
            self._advance(len(chunk))
        if format_crc(read_crc) != entry.crc32:
            self._damaged.append(entry.name)
        return written_crc


def _cast_bytes(chunk: bytearray, code: str, target: str) -> bytes:
    return np.frombuffer(chunk, READABLE[code]).astype(READABLE[target]).tobytes()


def _written(entry: Entry, file: str, offset: int, cast: str | None, crc: int) -> Entry:
    return Entry(
        name=entry.name, shape=entry.shape, source_file=file, source_offset=offset,
        source_dtype=entry.source_dtype, dtype=_target_dtype(entry, cast), file=file if entry.nbytes else None,
        offset=offset, nbytes=_target_bytes(entry, cast), pieces=1, stride=0, crc32=format_crc(crc),
    )  # fmt: skip


def _read_back(staging: Staging, written: Sequence[Entry], advance: Advance) -> None:
    for name in {entry.source_file for entry in written}:
        forget_cached(staging.directory / name)
    damaged = damaged_entries(staging.directory, written, advance)
    if damaged:
        problems = [f"{name} could not be read back as it was written" for name in damaged]
        raise CheckpointError(str(staging.target), problems)


def _write_index(directory: Path, written: Sequence[Entry]) -> None:
    files = {entry.source_file for entry in written}
    if files == {SINGLE_NAME}:
        return
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in written)},
        "weight_map": {entry.name: entry.source_file for entry in sorted(written, key=lambda e: e.name)},
    }
    write_file(directory, INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode())
