"""The Qwen3-MoE trunk and its configuration keys, for families that are made of it (REFERENCE section 10).

Decoder layers and the pass through them are those of `models/trunk.py`. What differs from LLaDA2: separate
projections, rotary over whole heads, a softmax router, no dense layer and no shared expert.

In float32 this is the reference. In bfloat16 it rounds once where the reference does several times: gates and the
sum over experts stay float32 (`moe.combine`).
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from oled_jax.config import ModelConfig
from oled_jax.models.family import Family
from oled_jax.models.hf_config import ConfigReader
from oled_jax.models.layers import Attention, Embedding, Linear, RMSNorm
from oled_jax.models.moe import MoEBlock, SoftmaxRouter
from oled_jax.models.rope import apply_rotary
from oled_jax.models.trunk import DecoderLayer, Trunk, ignored_tensors, moe_layers, named_tensors

# What the published configuration class says of keys that a file lacks.
CLASS_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 0, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 32768, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}  # fmt: skip


class SplitAttention(Attention):
    """Attention with a projection each for queries, keys and values; queries and keys are normed per head."""

    def __init__(self, config: ModelConfig):
        dtype, D = jnp.dtype(config.dtype), config.hidden_size
        Nq, Nk, Hd = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        project = functools.partial(Linear, D, dtype=dtype, bias=config.use_qkv_bias)
        self.head_dim = Hd
        self.q_proj, self.k_proj, self.v_proj = project(Nq * Hd), project(Nk * Hd), project(Nk * Hd)
        self.q_norm = RMSNorm(Hd, eps=config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(Hd, eps=config.rms_norm_eps, dtype=dtype)
        self.o_proj = Linear(Nq * Hd, D, dtype=dtype, bias=config.use_bias)

    def project(
        self, x: Float[Array, "B T D"], tables: tuple[Float[Array, "B T R"], Float[Array, "B T R"]]
    ) -> tuple[Float[Array, "B T Nq Hd"], Float[Array, "B T Nk Hd"], Float[Array, "B T Nk Hd"]]:
        """See `Attention`."""
        shape = (*x.shape[:2], -1, self.head_dim)
        queries, keys = self.q_proj(x).reshape(shape), self.k_proj(x).reshape(shape)
        values = self.v_proj(x).reshape(shape)
        return apply_rotary(self.q_norm(queries), *tables), apply_rotary(self.k_norm(keys), *tables), values

    def output(self, context: Float[Array, "B T H"]) -> Float[Array, "B T D"]:
        """See `Attention`."""
        return self.o_proj(context)


class Qwen3MoeLayer(DecoderLayer):
    """A layer under the names of Qwen3-MoE's files."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, MoEBlock(SoftmaxRouter(config)))
        self.self_attn = SplitAttention(config)

    @property
    def attention_part(self) -> Attention:
        return self.self_attn


class Qwen3Moe(Trunk):
    """The trunk under the names of Qwen3-MoE's files."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, [Qwen3MoeLayer(config) for _ in range(config.num_hidden_layers)])
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=jnp.dtype(config.dtype))

    @property
    def embedding(self) -> Embedding:
        return self.embed_tokens


def build(config: ModelConfig) -> Qwen3Moe:
    """The trunk with placeholder weights."""
    return Qwen3Moe(config)


# A family of this trunk; the ids are those of Qwen3's tokenizer with a mask token added.
qwen3_moe_family = functools.partial(
    Family,
    trunk_tensors=functools.partial(named_tensors, build),
    ignored_tensors=ignored_tensors,
    build=build,
    expert_name="model.layers.{layer}.mlp.experts.{expert}.{projection}.weight",
    merged_name="model.layers.{layer}.mlp.experts.{projection}",
    moe_layers=moe_layers,
    default_mask_id=151669,
    default_eos_id=151645,
)


def read_config(raw: Mapping[str, Any], defaults: Mapping[str, Any] = CLASS_DEFAULTS, **fields: object) -> ModelConfig:
    """Reads a `config.json` with Qwen3-MoE's keys.

    Args:
      raw: the file.
      defaults: of the keys that it lacks.
      fields: of `ModelConfig` that the family decides.

    Raises:
      CheckpointError: with every wrong type, unsupported switch and impossible combination in one message.
    """
    read = ConfigReader(raw)
    read.refuse_unsupported()
    _refuse_other_layers(read)
    bias = read.boolean("attention_bias", False)
    decided = {
        "model_type": str(raw["model_type"]), "use_qk_norm": True, "use_qkv_bias": bias, "use_bias": bias,
        "partial_rotary_factor": 1.0, "rope_scaling": read.rope_scaling(), "intermediate_size": 0,
        "first_k_dense_replace": 0, "num_shared_experts": None, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "tie_word_embeddings": read.boolean("tie_word_embeddings", False),
        "original_max_position_embeddings": read.optional_integer("original_max_position_embeddings"),
    }  # fmt: skip
    return read.finish(ModelConfig, read.dtype_and_ids() | decided | _sizes(read, defaults) | fields)


def _sizes(read: ConfigReader, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `defaults`, each read as what its default is."""
    values: dict[str, Any] = {}
    for name, default in defaults.items():
        if isinstance(default, bool):
            values[name] = read.boolean(name, default)
        else:
            values[name] = (read.integer if isinstance(default, int) else read.number)(name, default)
    values["head_dim"] = values["head_dim"] or values["hidden_size"] // max(values["num_attention_heads"], 1)
    return values


def _refuse_other_layers(read: ConfigReader) -> None:
    """Notes layers that Qwen3-MoE knows and no published block-diffusion model has."""
    if read.integer("decoder_sparse_step", 1) != 1 or read.raw.get("mlp_only_layers"):
        read.problems.append("decoder_sparse_step or mlp_only_layers asks for dense layers, which are not supported")
    if read.boolean("use_sliding_window", False):
        read.problems.append("use_sliding_window is true, attention over a window is not supported")
