"""The manifest of a converted checkpoint: where every source tensor lies, as what, and its checksum.

It is written last, so a directory without one is not finished. Knows JSON, reads no weights.
"""

import dataclasses
import json
import math
import types
import typing
from pathlib import Path, PurePosixPath
from typing import Any

from oled_jax.convert.problems import Problems, read_json_object
from oled_jax.convert.tensors import READABLE, StoredTensor
from oled_jax.errors import CheckpointError

MANIFEST_NAME = "oled_manifest.json"
FORMAT_VERSION = 1
TRUNK, EXPERTS, REDUNDANT = "trunk", "experts", "redundant"  # directories of the parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of the source.

    Attributes:
      name: in the source.
      shape: in the source.
      source_file: that held it, relative to its directory; `source_offset` orders the tensors of a file.
      source_dtype: safetensors code there.
      dtype: safetensors code here; wider where tensors of several dtypes share an array.
      file: relative to the checkpoint; None if the tensor has no elements.
      offset, nbytes, pieces, stride: see `StoredTensor`.
      crc32: of the bytes here, eight hexadecimal digits.
    """

    name: str
    shape: tuple[int, ...]
    source_file: str
    source_offset: int
    source_dtype: str
    dtype: str
    file: str | None
    offset: int
    nbytes: int
    pieces: int
    stride: int
    crc32: str

    @property
    def end(self) -> int:
        """Where its last byte lies in the file, plus one."""
        return self.offset + (self.pieces - 1) * self.stride + self.nbytes // self.pieces

    def stored(self, directory: Path) -> StoredTensor:
        """For `TensorReader`."""
        return StoredTensor(
            name=self.name, file=directory / (self.file or MANIFEST_NAME), dtype=self.dtype, shape=self.shape,
            offset=self.offset, nbytes=self.nbytes, pieces=self.pieces, stride=self.stride,
        )  # fmt: skip

    def valid(self) -> bool:
        """The numbers agree with each other."""
        if not all(_inside(name) for name in (self.source_file, self.file or self.source_file)):
            return False
        if self.offset < 0 or self.nbytes < 0 or self.pieces < 1 or min(self.shape, default=1) < 0:
            return False
        if self.pieces > 1 and self.nbytes % self.pieces:
            return False
        known = READABLE.get(self.dtype)
        return known is None or self.nbytes == math.prod(self.shape) * known.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopiedFile:
    """A file that is no weights, taken over as it was."""

    name: str
    nbytes: int
    crc32: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a converted checkpoint consists of.

    Attributes:
      format_version: `FORMAT_VERSION` of the converter.
      converter_version: of oled_jax.
      dtype: that all weights were cast to, by its NumPy name; None: each has the dtype of the source.
      trunk, experts (by MoE layer), redundant: the tensors, see `Layout`.
      files: configuration, tokenizer and whatever else the source had.
    """

    format_version: int
    converter_version: str
    dtype: str | None
    trunk: tuple[Entry, ...]
    experts: tuple[tuple[Entry, ...], ...]
    redundant: tuple[Entry, ...]
    files: tuple[CopiedFile, ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All tensors."""
        return (*self.trunk, *self.redundant, *(entry for layer in self.experts for entry in layer))

    def array_sizes(self) -> dict[str, int]:
        """Bytes of each array file, by its name relative to the checkpoint."""
        sizes: dict[str, int] = {}
        for entry in self.entries:
            if entry.file is not None:
                sizes[entry.file] = max(sizes.get(entry.file, 0), entry.end)
        return sizes


def is_converted(directory: Path) -> bool:
    """A converted checkpoint, or what is left of one."""
    arrays = (directory / TRUNK).is_dir() and (directory / EXPERTS).is_dir()
    return arrays or (directory / MANIFEST_NAME).exists()


def dump_json(value: Any) -> str:
    """A dataclass of this module, or a list of such, as JSON text."""
    plain = [dataclasses.asdict(item) for item in value] if isinstance(value, list | tuple) else None
    return json.dumps(dataclasses.asdict(value) if plain is None else plain) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a converted checkpoint.

    Raises:
      CheckpointError: it is missing, damaged, or of another version of the format.
    """
    file = directory / MANIFEST_NAME
    if not file.exists():
        reason = f"there is no {MANIFEST_NAME}: the conversion did not finish, or the file was lost; convert again"
        raise CheckpointError(str(directory), [reason])
    problems = Problems()
    raw = read_json_object(file, problems)
    if raw is None:
        raise CheckpointError(str(directory), problems.lines())
    version = raw.get("format_version")
    if version != FORMAT_VERSION:
        written = (
            f"{MANIFEST_NAME} is of format version {version!r}, written by oled_jax {raw.get('converter_version')}"
        )
        reason = f"{written}; this oled_jax reads version {FORMAT_VERSION}: convert again, or use that oled_jax"
        raise CheckpointError(str(directory), [reason])
    manifest = parse(Manifest, raw)
    if (
        manifest is None
        or not all(entry.valid() for entry in manifest.entries)
        or not all(_inside(copied.name) for copied in manifest.files)
    ):
        raise CheckpointError(str(directory), [f"{MANIFEST_NAME} is damaged: convert again"])
    return manifest


def parse(kind: Any, value: Any) -> Any:
    """`value` (of JSON) as a dataclass, tuple, str or int `kind`; None if it is none, or if it is null."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            return None
        fields = {name: parse(hint, value[name]) for name, hint in hints.items()}
        lost = [n for n, field in fields.items() if field is None and not _may_be_null(hints[n], value[n])]
        return None if lost else kind(**fields)
    if typing.get_origin(kind) is tuple:
        items = [parse(typing.get_args(kind)[0], item) for item in value] if isinstance(value, list) else [None]
        return None if any(item is None for item in items) else tuple(items)
    if typing.get_origin(kind) is types.UnionType:
        kind = typing.get_args(kind)[0]
    return value if type(value) is kind else None


def _inside(name: str) -> bool:
    """A relative name that stays in its directory."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _may_be_null(hint: Any, value: Any) -> bool:
    return value is None and type(None) in typing.get_args(hint)
