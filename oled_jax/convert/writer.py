"""Converts a Hugging Face checkpoint: trunk, then one MoE layer after the other, each an Orbax checkpoint.

A part is complete once its list of tensors lies in `parts/`; a later run of the same job skips it. Peak memory
is twice the largest part: its arrays, and Orbax's copy of what is being written.
"""

import json
import shutil
from pathlib import Path

import oled_jax
from oled_jax.convert.arrays import save_arrays
from oled_jax.convert.files import companion_files, copy_file
from oled_jax.convert.hf import HfCheckpoint
from oled_jax.convert.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Entry,
    Manifest,
    dump_json,
    is_converted,
    parse,
)
from oled_jax.convert.parts import SAFETENSORS_CODES, Part, part_file, parts_of
from oled_jax.convert.pieces import Advance
from oled_jax.convert.staging import Staging, discard, stage
from oled_jax.errors import CheckpointError, UsageError


def converted_bytes(source: HfCheckpoint, dtype: str | None) -> int:
    """What the arrays of the converted checkpoint will occupy."""
    return sum(part.num_bytes for part in parts_of(source, SAFETENSORS_CODES[dtype] if dtype else None))


def convert_checkpoint(
    source: HfCheckpoint, target: Path, *, dtype: str | None, overwrite: bool, advance: Advance
) -> None:
    """Writes `target`, a converted checkpoint, or nothing under that name.

    Args:
      source: opened, so its headers are in order.
      dtype: of all weights but those that the model needs in float32; None: as in the source, exactly.
      overwrite: replace a converted checkpoint that is there.
      advance: called with numbers of bytes as they are done; they add up to `converted_bytes`.

    Raises:
      UsageError: the target cannot be made; what was done is kept next to it for the next run.
      CheckpointError: the weights cannot be used (NaN, inf, too large for `dtype`).
    """
    require_apart(source.directory, target)
    parts = list(parts_of(source, SAFETENSORS_CODES[dtype] if dtype else None))
    with stage(target, job=_job(source, dtype), replaces=is_converted, overwrite=overwrite) as staging:
        try:
            entries = _write_parts(parts, source, staging, advance)
        except CheckpointError:
            discard(staging)
            raise
        files = companion_files(source.directory)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            converter_version=oled_jax.__version__,
            dtype=dtype,
            trunk=tuple(entries[0]),
            experts=tuple(tuple(layer) for layer in entries[1:-1]),
            redundant=tuple(entries[-1]),
            files=tuple(copy_file(source.directory, staging.directory, name) for name in files),
        )
        staging.write_text(MANIFEST_NAME, dump_json(manifest))
        staging.publish()
        shutil.rmtree(staging.target / part_file(parts[0]).parent)


def require_apart(source: Path, target: Path) -> None:
    """Raises UsageError if writing `target` would replace `source`."""
    if source.resolve().is_relative_to(target.resolve()):
        raise UsageError(f"{target} is, or holds, the source {source}: give another target")


def _job(source: HfCheckpoint, dtype: str | None) -> str:
    """Changes with everything that the result depends on."""
    layout = source.layout
    stored = [tensor for _, tensor in layout.trunk] + [e.stored for layer in layout.experts for e in layer]
    files = sorted({tensor.file for tensor in (*stored, *layout.redundant)})
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    job = {"format_version": FORMAT_VERSION, "dtype": dtype, "config": source.raw_config, "files": stats}
    return json.dumps(job, sort_keys=True)


def _write_parts(
    parts: list[Part], source: HfCheckpoint, staging: Staging, advance: Advance
) -> list[tuple[Entry, ...]]:
    """Entries of every part, those of an earlier run included."""
    (staging.directory / part_file(parts[0])).parent.mkdir(exist_ok=True)
    entries = [_finished(staging, part) for part in parts]
    missing = [part for part, found in zip(parts, entries, strict=True) if found is None]
    staging.require_space(sum(part.num_bytes for part in missing))
    written = []
    for part, found in zip(parts, entries, strict=True):
        written.append(_write_part(part, source, staging) if found is None else found)
        advance(part.num_bytes)
    return written


def _write_part(part: Part, source: HfCheckpoint, staging: Staging) -> tuple[Entry, ...]:
    directory = staging.directory / part.name
    for left in (directory, *directory.parent.glob(f"{directory.name}.orbax-checkpoint-tmp*")):
        shutil.rmtree(left, ignore_errors=True)
    directory.parent.mkdir(exist_ok=True)
    arrays, entries = part.collect()
    source.check_finite()
    if arrays:
        save_arrays(directory, arrays)
    staging.write_text(str(part_file(part)), dump_json(entries))
    return tuple(entries)


def _finished(staging: Staging, part: Part) -> tuple[Entry, ...] | None:
    """Entries of a part that an earlier run has finished. The list is written after its arrays are on the disk."""
    file = staging.directory / part_file(part)
    if not staging.resumed or not file.exists():
        return None
    return parse(tuple[Entry, ...], json.loads(file.read_text(encoding="utf-8")))
