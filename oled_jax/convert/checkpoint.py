"""Converted checkpoints as weights to run from, and the one place that tells them from Hugging Face's.

The manifest says where each tensor lies; it is matched with what the model needs exactly as the headers of
safetensors files are, so a changed `config.json` or a lost tensor is told in the same words.
"""

import dataclasses
from pathlib import Path

from oled_jax.convert.hf import HfCheckpoint
from oled_jax.convert.manifest import MANIFEST_NAME, Manifest, is_converted, read_manifest
from oled_jax.convert.problems import Problems
from oled_jax.convert.shards import Shards
from oled_jax.convert.staging import is_unfinished
from oled_jax.convert.weights import StoredWeights, read_description
from oled_jax.errors import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertedCheckpoint(StoredWeights):
    """A directory that `python -m oled_jax.convert` made. The model's dtype is that of `--dtype`, if one was given."""

    manifest: Manifest

    @classmethod
    def open(cls, directory: Path) -> "ConvertedCheckpoint":
        """Reads the manifest and the configuration; looks whether every array is there in its full size.

        Raises:
          CheckpointError: lists everything that is wrong.
        """
        if is_unfinished(directory) and not (directory / MANIFEST_NAME).exists():
            reason = "is an unfinished conversion: run the same conversion again to complete it"
            raise CheckpointError(str(directory), [reason])
        manifest = read_manifest(directory)
        problems = Problems()
        described = read_description(directory, problems, manifest.dtype)
        _check_sizes(directory, manifest, problems)
        stored = {entry.name: entry.stored(directory) for entry in manifest.entries}
        shards = Shards(tensors=stored, excused=frozenset(), complete=True)
        return cls.match(directory, described, shards, problems, manifest=manifest)


def open_checkpoint(directory: Path) -> HfCheckpoint | ConvertedCheckpoint:
    """Whichever of the two it is. Raises CheckpointError with everything that is wrong."""
    if is_converted(directory) or is_unfinished(directory):
        return ConvertedCheckpoint.open(directory)
    return HfCheckpoint.open(directory)


def _check_sizes(directory: Path, manifest: Manifest, problems: Problems) -> None:
    for name, size in manifest.array_sizes().items():
        file = directory / name
        if not file.is_file():
            problems.add(f"the array {name} is missing", "missing arrays")
        elif file.stat().st_size < size:
            held = file.stat().st_size
            problems.add(f"the array {name} is truncated: {held} bytes instead of {size}", "truncated arrays")
        elif file.stat().st_size > size:
            problems.add(f"the array {name} is {file.stat().st_size} bytes long instead of {size}", "long arrays")
