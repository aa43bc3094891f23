"""Weights on disk, whatever the files: a layout says where each tensor lies, the caller owns the arrays.

Hugging Face checkpoints and converted ones differ only in how they are opened; they are read by this class.
"""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

from oled_jax.config import ModelConfig
from oled_jax.convert.layout import Layout, match_tensors
from oled_jax.convert.problems import Problems, read_json_object
from oled_jax.convert.shards import Shards
from oled_jax.convert.tensors import StoredTensor, TensorReader, ValueCheck
from oled_jax.errors import CheckpointError, UsageError
from oled_jax.models.registry import Family, family_of

# Threads that share a layer in turns, so that the disk still sees one walk through the file: while one waits for it,
# others take their page faults and look for NaN. Those cost more than the copy out of the kernel's cache.
READERS = 4


Weights = TypeVar("Weights", bound="StoredWeights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """A checkpoint whose description is in order (REFERENCE sections 2 and 3).

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
    def match(
        cls: type[Weights], directory: Path, description: "Description", shards: Shards, problems: Problems, **more: Any
    ) -> Weights:
        """The weights, once the files hold every tensor that the description asks for.

        Args:
          problems: what was noted so far.
          more: fields of the subclass.

        Raises:
          CheckpointError: lists everything that is wrong.
        """
        layout = match_tensors(*description.model, shards, problems) if description.model else None
        if problems or description.model is None or layout is None:
            raise CheckpointError(str(directory), problems.lines())
        family, config = description.model
        return cls(
            directory=directory,
            raw_config=description.raw_config,
            config=config,
            family=family,
            generation_config=description.generation_config,
            layout=layout,
            **more,
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
        """Fills the pages of one MoE layer in place, cast to the arrays' dtype, in the order of the files.

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
            raise ValueError(f"pages {gate_up.shape} and {down.shape} given, need {(E, 2 * F, D)} and {(E, D, F)}")
        views = {"gate_proj": gate_up[:, :F], "up_proj": gate_up[:, F:], "down_proj": down}
        reads = []
        for tensor in self.layout.experts[moe_layer]:
            for e in range(E) if tensor.expert is None else (tensor.expert,):
                skip = e * F * D if tensor.expert is None else 0
                reads.append(_Read(tensor.stored, views[tensor.projection][e], skip))
        reads.sort(key=lambda read: read.place)
        shares = [reads[first::READERS] for first in range(READERS)]
        with ThreadPoolExecutor(READERS) as readers:
            list(readers.map(self._carry_out, shares))

    def _carry_out(self, reads: Sequence["_Read"]) -> None:
        with TensorReader(self.values) as reader:
            for read in reads:
                reader.read(read.stored, read.page, read.skip)

    def check_finite(self) -> None:
        """Says whether what was read so far can be used.

        Raises:
          CheckpointError: names every tensor with NaN, inf or values too large for the dtype.
        """
        problems = Problems()
        self.values.note(problems)
        if problems:
            raise CheckpointError(str(self.directory), problems.lines())


@dataclasses.dataclass(frozen=True)
class _Read:
    """Fills `page` from element `skip` of a tensor on."""

    stored: StoredTensor
    page: np.ndarray
    skip: int

    @property
    def place(self) -> tuple[Path, int]:
        return self.stored.file, self.stored.position(self.skip)


def _file_order(stored: StoredTensor) -> tuple[Path, int]:
    return stored.file, stored.offset


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What the JSON files of a checkpoint say. `model` is None if no model can be built from them."""

    raw_config: dict[str, Any]
    generation_config: dict[str, Any]
    model: tuple[Family, ModelConfig] | None


def read_description(directory: Path, problems: Problems, dtype: str | None = None) -> Description:
    """Reads `config.json`, and `generation_config.json` if there is one; notes every fault.

    Args:
      dtype: of the weights, if not the one that `config.json` names.
    """
    raw = _read_config(directory, problems)
    if dtype is not None and raw:
        raw = raw | {"dtype": dtype}
    has_generation = (directory / "generation_config.json").exists()
    generation = read_json_object(directory / "generation_config.json", problems) if has_generation else None
    model = _described(raw, problems) if raw is not None else None
    return Description(raw_config=raw or {}, generation_config=generation or {}, model=model)


def _read_config(directory: Path, problems: Problems) -> dict[str, Any] | None:
    if not (directory / "config.json").exists():
        problems.add("there is no config.json: is this the directory of a model?")
        return None
    return read_json_object(directory / "config.json", problems)


def _described(raw: dict[str, Any], problems: Problems) -> tuple[Family, ModelConfig] | None:
    try:
        family = family_of(raw)
        return family, family.config_from_hf(raw)
    except CheckpointError as error:
        problems.add_all((f"config.json: {problem}" for problem in error.problems), "problems of config.json")
    except UsageError as error:
        problems.add(f"config.json: {error}")
    return None
