"""Opens Hugging Face checkpoints: reads the configuration and all headers and finds every fault they show."""

import dataclasses
from pathlib import Path

from oled_jax.convert.problems import Problems
from oled_jax.convert.shards import collect_shards
from oled_jax.convert.weights import StoredWeights, read_description
from oled_jax.errors import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfCheckpoint(StoredWeights):
    """A directory with `config.json` and safetensors files whose headers are in order."""

    @classmethod
    def open(cls, directory: Path) -> "HfCheckpoint":
        """Reads `config.json`, `generation_config.json` if there is one, the index and every shard's header.

        Raises:
          CheckpointError: lists everything that is wrong.
        """
        if not directory.is_dir():
            raise CheckpointError(str(directory), ["there is no such directory"])
        problems = Problems()
        described = read_description(directory, problems)
        shards = collect_shards(directory, problems)
        return cls.match(directory, described, shards, problems)
