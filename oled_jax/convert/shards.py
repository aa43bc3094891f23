"""Which safetensors files make up a checkpoint, and which tensors they hold together. Reads headers
and the index, no data."""

import dataclasses
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

from oled_jax.convert.problems import Problems, read_json_object
from oled_jax.convert.tensors import StoredTensor, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """What the headers of all files say.

    `excused` names tensors whose absence is explained by a problem already noted (a shard that is not there).
    `complete` is False if a file that may hold any tensor was unreadable: then nothing can be called missing.
    """

    tensors: dict[str, StoredTensor]
    excused: frozenset[str]
    complete: bool


def collect_shards(directory: Path, problems: Problems) -> Shards:
    """Reads the headers of every shard of `directory`; notes every fault found.

    Files are chosen as transformers does: `model.safetensors`, else those in the index. Without either, all
    safetensors files count.
    """
    index_file = directory / INDEX_NAME
    if (directory / SINGLE_NAME).exists() or not index_file.exists():
        return _collect_files(_files_without_index(directory, problems), problems)
    index = read_json_object(index_file, problems)
    weight_map = (index or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        if index is not None:
            problems.add(f"{INDEX_NAME} has no weight_map")
        return _collect_files([], problems)
    return _collect_indexed(directory, weight_map, problems)


def _files_without_index(directory: Path, problems: Problems) -> list[Path]:
    if (directory / SINGLE_NAME).exists():
        return [directory / SINGLE_NAME]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        other = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in directory.glob(pattern))
        held = f", only {other[0]}{' and others' if other[1:] else ''}: convert it to safetensors" if other else ""
        problems.add(f"no safetensors files{held}")
    return files


def _collect_files(files: list[Path], problems: Problems) -> Shards:
    tensors: dict[str, StoredTensor] = {}
    complete = bool(files)
    for file in files:
        header = read_header(file, problems)
        complete = complete and header is not None
        for name, tensor in (header or {}).items():
            if name in tensors:
                problems.add(f"{name} is in both {tensors[name].file.name} and {file.name}", "tensors in two shards")
            tensors[name] = tensor
    return Shards(tensors=tensors, excused=frozenset(), complete=complete)


def _collect_indexed(directory: Path, weight_map: dict[str, Any], problems: Problems) -> Shards:
    placed = {name: _shard_path(directory, file) for name, file in weight_map.items()}
    for name, path in placed.items():
        if path is None:
            problems.add(f"{INDEX_NAME} places {name} in {weight_map[name]!r}, not a file here", "bad index entries")
    tensors: dict[str, StoredTensor] = {}
    excused = {name for name, path in placed.items() if path is None}
    for file in sorted({path for path in placed.values() if path is not None}):
        here = [name for name, path in placed.items() if path == file]
        header = _indexed_header(file, here, problems)
        if header is None:
            excused.update(here)
            continue
        lacking = [name for name in here if name not in header]
        excused.update(lacking)
        problems.add_all(
            (f"{INDEX_NAME} places {name} in {file.name}, which does not hold it" for name in lacking),
            f"tensors that {file.name} does not hold",
        )
        _merge(tensors, header, placed, problems)
    return Shards(tensors=tensors, excused=frozenset(excused), complete=True)


def _shard_path(directory: Path, file: Any) -> Path | None:
    if not isinstance(file, str) or not file or PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
        return None
    return directory / file


def _indexed_header(file: Path, here: Collection[str], problems: Problems) -> dict[str, StoredTensor] | None:
    if file.is_file():
        return read_header(file, problems)
    problems.add(f"shard {file.name} is missing ({INDEX_NAME} places {len(here)} tensors in it)")
    return None


def _merge(
    tensors: dict[str, StoredTensor],
    header: dict[str, StoredTensor],
    placed: dict[str, Path | None],
    problems: Problems,
) -> None:
    """Adds a shard's tensors. The index decides between two copies; tensors that it does not name are used
    all the same, as in transformers."""
    for name, tensor in header.items():
        held = tensors.get(name)
        if held is not None and placed.get(name) not in (held.file, tensor.file):
            problems.add(f"{name} is in both {held.file.name} and {tensor.file.name}", "tensors in two shards")
        if held is None or placed.get(name) != held.file:
            tensors[name] = tensor
