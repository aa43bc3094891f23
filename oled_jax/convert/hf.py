"""Opens Hugging Face checkpoints: reads the configuration and all headers and finds every fault they show."""

import dataclasses
from pathlib import Path

from oled_jax.convert.layout import match_tensors
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
        layout = match_tensors(*described.model, shards, problems) if described.model else None
        if problems or described.model is None or layout is None:
            raise CheckpointError(str(directory), problems.lines())
        family, config = described.model
        return cls(
            directory=directory,
            raw_config=described.raw_config,
            config=config,
            family=family,
            generation_config=described.generation_config,
            layout=layout,
        )
