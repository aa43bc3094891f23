"""The model families, and how a trunk is put together from arrays. A family is one entry of `FAMILIES`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from oled_jax.config import ModelConfig
from oled_jax.errors import UsageError
from oled_jax.models import llada2, rnd1, sdar
from oled_jax.models.family import Family, StatePath, TrunkTensor, abstract_trunk
from oled_jax.models.random_init import random_arrays

__all__ = [
    "FAMILIES", "Family", "StatePath", "TrunkTensor", "assemble", "config_from_hf", "decoding_modes",
    "family_named", "family_of", "random_trunk", "siblings",
]  # fmt: skip

FAMILIES: tuple[Family, ...] = (llada2.LLADA2, llada2.LLADA21, sdar.SDAR, rnd1.RND1)


def family_of(raw: Mapping[str, Any]) -> Family:
    """The family of a `config.json`, by its `model_type`. Raises UsageError for an unknown one."""
    model_type = raw.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise UsageError(f"model_type {model_type!r} is not supported, known are: {known}")


def family_named(name: str) -> Family:
    """The family that `ModelConfig.family` names."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise UsageError(f"model family {name!r} is unknown, known are: {', '.join(f.name for f in FAMILIES)}")


def siblings(family: Family) -> tuple[Family, ...]:
    """Families whose checkpoints are the same network and tensors, the family itself included."""
    shared = family.build, family.trunk_tensors, family.expert_name
    return tuple(other for other in FAMILIES if (other.build, other.trunk_tensors, other.expert_name) == shared)


def decoding_modes() -> tuple[str, ...]:
    """Every name of a mode that some family has."""
    return tuple(dict.fromkeys(name for family in FAMILIES for name in family.modes))


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads a `config.json`. Raises UsageError: unknown model_type, or all problems of the file at once."""
    return family_of(raw).config_from_hf(raw)


def assemble(config: ModelConfig, arrays: Mapping[StatePath, Any]) -> tuple[nnx.GraphDef, nnx.State[Any, Any]]:
    """Definition and filled state of a trunk; the arrays are taken as they are, nothing else is allocated.

    Args:
      config: names the family.
      arrays: one array (NumPy or JAX) for each `TrunkTensor.path`.

    Raises:
      RuntimeError: a leaf has no array, an array no leaf, or a shape or dtype differs.
    """
    family = family_named(config.family)
    graphdef, leaves = abstract_trunk(family.build, config)
    for path in leaves.keys() ^ arrays.keys():
        raise RuntimeError(f"trunk state {path}: {'no array for it' if path in leaves else 'no such leaf'}")
    for path, leaf in leaves.items():
        array = arrays[path]
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise RuntimeError(
                f"trunk state {path} is {leaf.dtype} {leaf.shape}, its array {array.dtype} {array.shape}"
            )
    filled: dict[Any, Any] = {path: leaf.replace(arrays[path]) for path, leaf in leaves.items()}
    return graphdef, nnx.from_flat_state(filled)


def random_trunk(config: ModelConfig, seed: int) -> dict[StatePath, np.ndarray]:
    """Arrays for `assemble`, random and not degenerate; see `models/random_init.py`."""
    return random_arrays(family_named(config.family).trunk_tensors(config), config.dtype, seed)
