"""SDAR-MoE: the Qwen3-MoE trunk, block-causal attention, a token predicted at its own position (REFERENCE 10)."""

import functools
from collections.abc import Mapping
from typing import Any

from oled_jax.config import ModelConfig
from oled_jax.models import qwen3_moe
from oled_jax.models.family import Family
from oled_jax.models.trunk import ignored_tensors, moe_layers, named_tensors


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads `config.json`. Raises CheckpointError with everything that is wrong."""
    return qwen3_moe.read_config(raw, family=SDAR.name)


SDAR = Family(
    name="sdar",
    model_types=("sdar_moe",),
    config_from_hf=config_from_hf,
    trunk_tensors=functools.partial(named_tensors, qwen3_moe.build),
    ignored_tensors=ignored_tensors,
    build=qwen3_moe.build,
    expert_name=qwen3_moe.EXPERT_NAME,
    merged_name=qwen3_moe.MERGED_NAME,
    moe_layers=moe_layers,
    default_mask_id=151669,
    default_eos_id=151645,
    # The published default of steps is the block length: one token in every pass, which is what `steps` 32 gives.
    decoding={"rule": "dynamic", "block_length": 4, "steps": 32, "threshold": 0.85, "temperature": 1.0},
    decoding_keys={"block_size": "block_length"},
    rules=("dynamic", "static", "sequential"),
)
