"""Hugging Face checkpoints of random weights, of any size, for tests and benchmarks of loading and converting."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from oled_jax.convert.layout import PROJECTIONS
from oled_jax.convert.shards import INDEX_NAME
from oled_jax.convert.tensors import READABLE, file_header
from oled_jax.models.registry import family_of
from oled_jax.random_weights import RandomWeights


def write_random_hf(raw_config: Mapping[str, Any], directory: Path, seed: int = 0) -> None:
    """Writes a checkpoint, one shard for the trunk and one for each MoE layer. Memory: one shard.

    Args:
      raw_config: of a family that can be read; its dtype is that of the weights.
      directory: made if it is not there; files of the same names are replaced.
      seed: equal seeds give equal weights.
    """
    family = family_of(raw_config)
    config = family.config_from_hf(raw_config)
    weights, dtype = RandomWeights(config, seed), jnp.dtype(config.dtype)
    E, F, D = config.num_experts, config.moe_intermediate_size, config.hidden_size
    directory.mkdir(parents=True, exist_ok=True)
    trunk = weights.read_trunk(dtype)
    named = {tensor.name: trunk[tensor.path] for tensor in family.trunk_tensors(config)}
    weight_map = _save(directory, named, "model-trunk")
    del trunk, named
    for moe_layer, layer in enumerate(family.moe_layers(config)):
        gate_up, down = np.empty((E, 2 * F, D), dtype), np.empty((E, D, F), dtype)
        weights.read_pages(moe_layer, gate_up, down)
        views = dict(zip(PROJECTIONS, (gate_up[:, :F], gate_up[:, F:], down), strict=True))
        tensors = {
            family.expert_name.format(layer=layer, expert=e, projection=projection): pages[e]
            for e in range(E)
            for projection, pages in views.items()
        }
        weight_map |= _save(directory, tensors, f"model-layer-{layer:03d}")
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(dict(raw_config)), encoding="utf-8")


def _save(directory: Path, tensors: dict[str, np.ndarray], name: str) -> dict[str, str]:
    codes = {dtype: code for code, dtype in READABLE.items()}
    with (directory / f"{name}.safetensors").open("wb") as stream:
        stream.write(file_header((name, codes[t.dtype], t.shape, t.nbytes) for name, t in tensors.items()))
        for tensor in tensors.values():
            stream.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    return dict.fromkeys(tensors, f"{name}.safetensors")
