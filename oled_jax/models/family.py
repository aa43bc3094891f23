"""What a model family tells the rest: how to read its configuration, name its tensors and build its trunk.

A family is one file in `models/` that makes a `Family`, and one line in `registry.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

from flax import nnx

from oled_jax.config import ModelConfig

StatePath = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrunkTensor:
    """One Hugging Face tensor that is not a routed expert, and the NNX state leaf that holds it.

    `shape` is the shape in the file and in the state: linear weights stay [out, in]. `float32` tensors stay
    float32 whatever the model's dtype (the router's bias decides between experts by differences that bfloat16
    cannot hold).
    """

    name: str
    path: StatePath
    shape: tuple[int, ...]
    float32: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of checkpoints that one network and one set of tensor names serves.

    Attributes:
      name: unique in the registry; `ModelConfig.family` repeats it.
      model_types: values of `model_type` in `config.json` that belong here.
      config_from_hf: reads `config.json`; raises CheckpointError with every problem found.
      trunk_tensors: every tensor that must stand in a checkpoint, routed experts excepted.
      ignored_tensors: names that may stand in a checkpoint and are redundant.
      build: the trunk with zero weights; call it under `nnx.eval_shape` to allocate nothing.
      expert_name: format string of {layer}, {expert} and {projection}, one matrix of one routed expert.
      merged_name: format string of {layer} and {projection}, that matrix of all experts of a layer, stacked.
      moe_layers: model layer numbers of the layers with routed experts, in order.
      default_mask_id, default_eos_id: where neither configuration nor tokenizer names them.
      decoding: what the model card recommends, as fields of `DecodingConfig`.
      modes: named sets of such fields that the model card offers to choose from.
      rules: acceptance rules that the models can be decoded with (`decode/registry.py`).
      decoding_keys: keys of `config.json` and `generation_config.json` that set a field of `DecodingConfig`.
      chat_template: takes the place of the tokenizer's, if the published code does not use that.
    """

    name: str
    model_types: tuple[str, ...]
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    trunk_tensors: Callable[[ModelConfig], list[TrunkTensor]]
    ignored_tensors: Callable[[ModelConfig], tuple[str, ...]]
    build: Callable[[ModelConfig], nnx.Module]
    expert_name: str
    merged_name: str
    moe_layers: Callable[[ModelConfig], range]
    default_mask_id: int
    default_eos_id: int
    decoding: Mapping[str, object]
    rules: tuple[str, ...]
    modes: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)
    decoding_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chat_template: str | None = None


@functools.lru_cache(maxsize=8)
def abstract_trunk(
    build: Callable[[ModelConfig], nnx.Module], config: ModelConfig
) -> tuple[nnx.GraphDef, dict[StatePath, nnx.Variable]]:
    """Definition and leaves of a trunk: the leaves have shape and dtype, but no memory.

    Cached: it walks all modules, and opening a checkpoint and filling its trunk both need it. Do not change the leaves.
    """
    graphdef, state = nnx.split(nnx.eval_shape(functools.partial(build, config)))
    # Flax types a path as hashable keys; attribute names and list indices are all that occurs.
    return graphdef, {cast(StatePath, path): leaf for path, leaf in nnx.to_flat_state(state)}
