"""Builds checkpoints on disk from the golden ones."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

INDEX = "model.safetensors.index.json"


@dataclasses.dataclass
class Source:
    """A checkpoint in memory; tests change it and write it somewhere."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]

    def write(self, directory: Path, shards: Sequence[Sequence[str]] | None = None) -> Path:
        """As a single file, or as shards with an index; tensors in the order given."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        if shards is None:
            save_file(self.tensors, directory / "model.safetensors")
            return directory
        weight_map = {}
        for i, names in enumerate(shards):
            file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            save_file({name: self.tensors[name] for name in names}, directory / file)
            weight_map.update(dict.fromkeys(names, file))
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return directory

    def write_shuffled(self, directory: Path, count: int, seed: int = 0) -> Path:
        """As `count` shards over which the tensors are spread at random."""
        names = np.random.default_rng(seed).permutation(list(self.tensors))
        return self.write(directory, [[str(name) for name in names[i::count]] for i in range(count)])


@pytest.fixture
def source(golden: Path) -> Callable[[str], Source]:
    """source("llada2-tiny") or source("variants/tied"): a golden checkpoint as a `Source` of its own."""

    def load(name: str) -> Source:
        tensors: dict[str, np.ndarray] = {}
        for file in sorted((golden / name).glob("*.safetensors")):
            tensors |= load_file(file)
        return Source(json.loads((golden / name / "config.json").read_text()), tensors)

    return load


@pytest.fixture
def expected_pages() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """(tensors, config, layer, dtype) -> gate_up, down, stacked from single expert tensors."""

    def stack(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], layer: int, dtype: Any) -> Any:
        def one(e: int, projection: str) -> np.ndarray:
            return tensors[f"model.layers.{layer}.mlp.experts.{e}.{projection}.weight"].astype(dtype)

        experts = range(config["num_experts"])
        gate_up = np.stack([np.concatenate([one(e, "gate_proj"), one(e, "up_proj")]) for e in experts])
        return gate_up, np.stack([one(e, "down_proj") for e in experts])

    return stack
