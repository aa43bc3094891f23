"""Reads Hugging Face checkpoints. Opening reads the configuration and all headers and finds every fault they
show; the weights are then read layer by layer into arrays that the caller owns."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from oled_jax.config import ModelConfig
from oled_jax.convert.layout import Layout, match_tensors
from oled_jax.convert.problems import Problems, read_json_object
from oled_jax.convert.shards import collect_shards
from oled_jax.convert.tensors import StoredTensor, TensorReader, ValueCheck
from oled_jax.errors import CheckpointError, UsageError
from oled_jax.models.registry import Family, family_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfCheckpoint:
    """A checkpoint whose headers are in order (REFERENCE sections 2 and 3).

    `total_bytes` counts the model's weights as stored in the files. Layers may be read from several threads.
    """

    directory: Path
    raw_config: dict[str, Any]
    config: ModelConfig
    family: Family
    generation_config: dict[str, Any]
    layout: Layout
    values: ValueCheck = dataclasses.field(default_factory=ValueCheck)

    @classmethod
    def open(cls, directory: Path) -> "HfCheckpoint":
        """Reads `config.json`, `generation_config.json` if there is one, the index and every shard's header.

        Raises:
          CheckpointError: lists everything that is wrong.
        """
        if not directory.is_dir():
            raise CheckpointError(str(directory), ["there is no such directory"])
        problems = Problems()
        raw_config, described = _read_config(directory, problems)
        has_generation = (directory / "generation_config.json").exists()
        generation = (
            read_json_object(directory / "generation_config.json", problems) if has_generation else None
        )
        shards = collect_shards(directory, problems)
        layout = match_tensors(*described, shards, problems) if described else None
        if problems or described is None or layout is None:
            raise CheckpointError(str(directory), problems.lines())
        family, config = described
        return cls(
            directory=directory,
            raw_config=raw_config,
            config=config,
            family=family,
            generation_config=generation or {},
            layout=layout,
        )

    @property
    def total_bytes(self) -> int:
        return self.layout.total_bytes

    def read_trunk(self, dtype: np.dtype) -> dict[tuple[str | int, ...], np.ndarray]:
        """Everything but the routed experts, by path in the model; each array owns its memory.

        Args:
          dtype: of the arrays; those that the model needs in float32 are float32 whatever it is.

        Raises:
          CheckpointError: a file became unreadable. NaN and inf are reported by `check_finite`.
        """
        trunk = {}
        with TensorReader(self.values) as reader:
            for needed, stored in sorted(self.layout.trunk, key=lambda pair: _file_order(pair[1])):
                array = np.empty(needed.shape, np.float32 if needed.float32 else dtype)
                reader.read(stored, array)
                trunk[tuple(needed.path)] = array
        return trunk

    def read_pages(
        self, moe_layer: int, gate_up: Float[np.ndarray, "E twoF D"], down: Float[np.ndarray, "E D F"]
    ) -> None:
        """Fills the pages of one MoE layer in place, cast to the arrays' dtype.

        Args:
          moe_layer: index among the MoE layers, from 0 (the dense first layers are not counted).
          gate_up: gate in rows 0..F-1, up in rows F..2F-1 of each expert.
          down: HF orientation, [out, in].

        Raises:
          ValueError: the arrays do not have the model's shape.
          CheckpointError: a file became unreadable. NaN and inf are reported by `check_finite`.
        """
        E, F, D = self.config.num_experts, self.config.moe_intermediate_size, self.config.hidden_size
        if gate_up.shape != (E, 2 * F, D) or down.shape != (E, D, F):
            raise ValueError(
                f"pages {gate_up.shape} and {down.shape} given, need {(E, 2 * F, D)} and {(E, D, F)}"
            )
        views = {"gate_proj": gate_up[:, :F], "up_proj": gate_up[:, F:], "down_proj": down}
        with TensorReader(self.values) as reader:
            for tensor in sorted(self.layout.experts[moe_layer], key=lambda t: _file_order(t.stored)):
                pages = views[tensor.projection]
                if tensor.expert is not None:
                    reader.read(tensor.stored, pages[tensor.expert])
                    continue
                for e in range(E):
                    reader.read(tensor.stored, pages[e], skip=e * F * D)

    def check_finite(self) -> None:
        """Says whether what was read so far can be used.

        Raises:
          CheckpointError: names every tensor with NaN, inf or values too large for the dtype.
        """
        problems = Problems()
        self.values.note(problems)
        if problems:
            raise CheckpointError(str(self.directory), problems.lines())


def _file_order(stored: StoredTensor) -> tuple[Path, int]:
    return stored.file, stored.offset


def _read_config(
    directory: Path, problems: Problems
) -> tuple[dict[str, Any], tuple[Family, ModelConfig] | None]:
    """The raw configuration, and what it describes if it describes a model that can be built."""
    if not (directory / "config.json").exists():
        problems.add("there is no config.json: is this the directory of a model?")
        return {}, None
    raw = read_json_object(directory / "config.json", problems)
    if raw is None:
        return {}, None
    try:
        family = family_of(raw)
        return raw, (family, family.config_from_hf(raw))
    except CheckpointError as error:
        problems.add_all((f"config.json: {problem}" for problem in error.problems), "problems of config.json")
    except UsageError as error:
        problems.add(f"config.json: {error}")
    return raw, None
