"""SDAR-MoE: the Qwen3-MoE trunk, block-causal attention, a token predicted at its own position (REFERENCE 10)."""

from collections.abc import Mapping
from typing import Any

from oled_jax.config import ModelConfig
from oled_jax.models import qwen3_moe


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads `config.json`. Raises CheckpointError with everything that is wrong."""
    return qwen3_moe.read_config(raw, family=SDAR.name)


SDAR = qwen3_moe.qwen3_moe_family(
    name="sdar",
    model_types=("sdar_moe",),
    config_from_hf=config_from_hf,
    # The published default of steps is the block length: a token in every pass. 32 steps are that up to blocks of 32.
    decoding={"rule": "dynamic", "block_length": 4, "steps": 32, "threshold": 0.85, "temperature": 1.0},
    decoding_keys={"block_size": "block_length"},
    rules=("dynamic", "static", "sequential"),
)
