"""Writes a trained state as a Hugging Face checkpoint (REFERENCE section 3) that `--model` reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from oled_jax.config import ModelConfig
from oled_jax.demo.training.step import BIAS, TrainState
from oled_jax.demo.training.vocabulary import EOS_ID, MASK_ID, write_tokenizer
from oled_jax.models.registry import config_from_hf, family_named

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def export_checkpoint(
    directory: Path,
    state: TrainState,
    tokenizer: Tokenizer,
    raw_config: Mapping[str, Any],
    generation: Mapping[str, Any],
) -> None:
    """Writes weights (bfloat16, the routers' bias float32), configurations and tokenizer.

    Args:
      raw_config: `config.json`; its dtype is set to bfloat16.
      generation: `generation_config.json`; the ids are added.
    """
    directory.mkdir(parents=True, exist_ok=True)
    described = {**raw_config, "dtype": "bfloat16"}
    ids = {"mask_token_id": MASK_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
    tensors = hf_tensors(config_from_hf(described), state)
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # the library makes files that only their owner may read
    _write_json(directory / "config.json", {"architectures": ["LLaDA2MoeModelLM"], **described, **ids})
    _write_json(directory / "generation_config.json", {**generation, **ids})
    write_tokenizer(tokenizer, directory)


def hf_tensors(config: ModelConfig, state: TrainState) -> dict[str, np.ndarray]:
    """Every tensor by its Hugging Face name."""
    family, F = family_named(config.family), config.moe_intermediate_size
    moe_layers = list(family.moe_layers(config))
    tensors: dict[str, np.ndarray] = {}
    for tensor in family.trunk_tensors(config):
        if tensor.name.endswith(BIAS):
            tensors[tensor.name] = np.asarray(state.bias[moe_layers.index(int(tensor.path[1]))], np.float32)
        else:
            tensors[tensor.name] = _narrow(state.params[tensor.name])
    for number, layer in enumerate(moe_layers):
        gate_up, down = (_narrow(state.params[f"experts.{number}.{name}"]) for name in ("gate_up", "down"))
        parts = {"gate_proj": gate_up[:, :F], "up_proj": gate_up[:, F:], "down_proj": down}
        for projection, pages in parts.items():
            for expert, page in enumerate(pages):
                name = family.expert_name.format(layer=layer, expert=expert, projection=projection)
                tensors[name] = np.ascontiguousarray(page)
    return tensors


def _narrow(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32).astype(BFLOAT16)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
