"""Golden checkpoints as models with resident experts, read with safetensors alone.

The real loader has its own tests; this reads the files in the plainest way, so that a parity failure points
at the network.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open

from oled_jax.config import ModelConfig
from oled_jax.models.moe import DenseExperts
from oled_jax.models.registry import Family, assemble, family_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model in `dtype`, its experts (None if all layers are dense), and the tensors of its files."""

    config: ModelConfig
    family: Family
    tensors: dict[str, np.ndarray]
    model: nnx.Module
    experts: DenseExperts | None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's call, compiled."""
        graphdef, state = nnx.split(self.model)
        return _compiled_call(graphdef, state, inputs, named)

    def logits(self, case: Mapping[str, np.ndarray]) -> np.ndarray:
        hidden, _, _ = self.model(*model_inputs(case), experts=self.experts)
        return np.asarray(self.model.logits(hidden))


def compiled(function: Callable[..., Any], *inputs: Any) -> Any:
    """The result of a part of a model, in one program: called as it is, each of its operations would be compiled."""
    return jax.jit(function)(*inputs)


@functools.partial(jax.jit, static_argnums=0)
def _compiled_call(graphdef: nnx.GraphDef, state: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return nnx.merge(graphdef, state)(*inputs, **named)


def model_inputs(case: Mapping[str, np.ndarray]) -> tuple[Any, Any, Any]:
    """Token ids, positions and mask of a golden case."""
    return (
        jnp.asarray(case["input_ids"], jnp.int32),
        jnp.asarray(case["position_ids"], jnp.int32),
        jnp.asarray(case["attention_mask"][:, 0]).astype(bool),
    )


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def load_checkpoint(folder: Path, dtype: str = "float32") -> Checkpoint:
    raw = json.loads((folder / "config.json").read_text()) | {"dtype": dtype}
    family, tensors = family_of(raw), read_tensors(folder)
    config = family.config_from_hf(raw)
    trunk = {
        tensor.path: jnp.asarray(tensors[tensor.name]).astype(jnp.float32 if tensor.float32 else dtype)
        for tensor in family.trunk_tensors(config)
    }
    return Checkpoint(
        config=config,
        family=family,
        tensors=tensors,
        model=nnx.merge(*assemble(config, trunk)),
        experts=_experts(family, config, tensors) if config.num_moe_layers else None,
    )


def _experts(family: Family, config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> DenseExperts:
    def stacked(layer: int, projection: str) -> np.ndarray:
        merged = family.merged_name.format(layer=layer, projection=projection)
        if merged in tensors:
            return tensors[merged]
        names = [
            family.expert_name.format(layer=layer, expert=expert, projection=projection)
            for expert in range(config.num_experts)
        ]
        return np.stack([tensors[name] for name in names])

    layers = family.moe_layers(config)
    gate, up, down = (
        np.stack([stacked(layer, name) for layer in layers]) for name in ("gate_proj", "up_proj", "down_proj")
    )
    return DenseExperts(
        gate_up=jnp.asarray(np.concatenate([gate, up], axis=2)).astype(config.dtype),
        down=jnp.asarray(down).astype(config.dtype),
    )
