"""LLaDA2.0 and LLaDA2.1: the network (one for both), its configuration keys and its tensor names.

Specification: REFERENCE sections 2 to 5. The two versions differ only in how text is decoded, so they are two
`Family` entries that share everything else.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from oled_jax.config import ModelConfig
from oled_jax.models.family import Family
from oled_jax.models.hf_config import ConfigReader
from oled_jax.models.layers import MLP, Attention, Embedding, Linear, RMSNorm
from oled_jax.models.moe import MoEBlock, SigmoidRouter
from oled_jax.models.rope import apply_rotary
from oled_jax.models.trunk import DecoderLayer, Trunk, ignored_tensors, moe_layers, named_tensors


class FusedAttention(Attention):
    """Attention with one fused projection, rows: all query, all key, all value heads (REFERENCE 3)."""

    def __init__(self, config: ModelConfig):
        dtype = jnp.dtype(config.dtype)
        Nq, Nk, Hd = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads = (Nq, Nk, Hd)
        rows = (Nq + 2 * Nk) * Hd
        self.query_key_value = Linear(config.hidden_size, rows, dtype=dtype, bias=config.use_qkv_bias)
        norm_of = functools.partial(RMSNorm, Hd, eps=config.rms_norm_eps, dtype=dtype)
        self.query_layernorm = norm_of() if config.use_qk_norm else None
        self.key_layernorm = norm_of() if config.use_qk_norm else None
        self.dense = Linear(Nq * Hd, config.hidden_size, dtype=dtype, bias=config.use_bias)

    def project(
        self, x: Float[Array, "B T D"], tables: tuple[Float[Array, "B T R"], Float[Array, "B T R"]]
    ) -> tuple[Float[Array, "B T Nq Hd"], Float[Array, "B T Nk Hd"], Float[Array, "B T Nk Hd"]]:
        """See `Attention`."""
        B, T, _ = x.shape
        Nq, Nk, Hd = self.heads
        fused = self.query_key_value(x).reshape(B, T, Nq + 2 * Nk, Hd)
        queries, keys, values = jnp.split(fused, [Nq, Nq + Nk], axis=2)
        if self.query_layernorm is not None and self.key_layernorm is not None:
            queries, keys = self.query_layernorm(queries), self.key_layernorm(keys)
        return apply_rotary(queries, *tables), apply_rotary(keys, *tables), values

    def output(self, context: Float[Array, "B T H"]) -> Float[Array, "B T D"]:
        """See `Attention`."""
        return self.dense(context)


class LLaDA2Layer(DecoderLayer):
    """A layer under the names of LLaDA2's files; the first ones are dense."""

    def __init__(self, config: ModelConfig, *, dense: bool):
        dtype, D = jnp.dtype(config.dtype), config.hidden_size
        super().__init__(config, MLP(D, config.intermediate_size, dtype=dtype) if dense else _moe_block(config))
        self.attention = FusedAttention(config)

    @property
    def attention_part(self) -> Attention:
        return self.attention


class LLaDA2(Trunk):
    """The trunk under the names of LLaDA2's files."""

    def __init__(self, config: ModelConfig):
        layers = range(config.num_hidden_layers)
        super().__init__(config, [LLaDA2Layer(config, dense=n < config.first_k_dense_replace) for n in layers])
        self.word_embeddings = Embedding(config.vocab_size, config.hidden_size, dtype=jnp.dtype(config.dtype))

    @property
    def embedding(self) -> Embedding:
        return self.word_embeddings


def _moe_block(config: ModelConfig) -> MoEBlock:
    """Sigmoid router with bias and groups; a shared expert beside the routed ones."""
    D, F, shared = config.hidden_size, config.moe_intermediate_size, config.num_shared_experts
    expert = None if shared is None else MLP(D, shared * F, dtype=jnp.dtype(config.dtype))
    return MoEBlock(SigmoidRouter(config), expert)


def build(config: ModelConfig) -> LLaDA2:
    """The trunk with placeholder weights."""
    return LLaDA2(config)


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads `config.json`; defaults are those of the published configuration class (REFERENCE section 2).

    Raises:
      CheckpointError: with every wrong type, missing size and impossible combination in one message.
    """
    read = ConfigReader(raw)
    read.refuse_unsupported()
    model_type = str(raw.get("model_type", LLADA2.model_types[0]))
    fields = {
        "family": LLADA21.name if model_type in LLADA21.model_types else LLADA2.name,
        "model_type": model_type,
        **read.dtype_and_ids(),
    }
    return read.finish(ModelConfig, fields | _attention_fields(read) | _feed_forward_fields(read))


def _attention_fields(read: ConfigReader) -> dict[str, Any]:
    hidden, heads = read.integer("hidden_size", 1024), read.integer("num_attention_heads", 16)
    return {
        "vocab_size": read.integer("vocab_size", 30592),
        "hidden_size": hidden,
        "num_hidden_layers": read.integer("num_hidden_layers", 24),
        "num_attention_heads": heads,
        "num_key_value_heads": read.integer("num_key_value_heads", 0) or heads,
        "head_dim": read.integer("head_dim", 0) or hidden // max(heads, 1),
        "rms_norm_eps": read.number("rms_norm_eps", 1e-5),
        "rope_theta": read.number("rope_theta", 10000.0),
        "partial_rotary_factor": read.number("partial_rotary_factor", 0.5),
        "rope_scaling": read.rope_scaling(),
        "use_qk_norm": read.boolean("use_qk_norm", True),
        "use_qkv_bias": read.boolean("use_qkv_bias", False),
        "use_bias": read.boolean("use_bias", True),
        "tie_word_embeddings": read.boolean("tie_word_embeddings", False),
        "max_position_embeddings": read.integer("max_position_embeddings", 16384),
        "original_max_position_embeddings": read.optional_integer("original_max_position_embeddings"),
    }


def _feed_forward_fields(read: ConfigReader) -> dict[str, Any]:
    # null means no shared expert; a missing key means 0: width 0, with empty tensors in the file.
    shared = read.optional_integer("num_shared_experts") if "num_shared_experts" in read.raw else 0
    return {
        "intermediate_size": read.integer("intermediate_size", 0),
        "moe_intermediate_size": read.integer("moe_intermediate_size", 0),
        "num_experts": read.integer("num_experts", 16),
        "num_experts_per_tok": read.integer("num_experts_per_tok", 2),
        "n_group": read.integer("n_group", 8),
        "topk_group": read.integer("topk_group", 4),
        "routed_scaling_factor": read.number("routed_scaling_factor", 2.5),
        "num_shared_experts": shared,
        "first_k_dense_replace": read.integer("first_k_dense_replace", 0),
    }


LLADA2 = Family(
    name="llada2",
    model_types=("llada2_moe", "llada2_moe_veomni"),
    config_from_hf=config_from_hf,
    trunk_tensors=functools.partial(named_tensors, build),
    ignored_tensors=ignored_tensors,
    build=build,
    expert_name="model.layers.{layer}.mlp.experts.{expert}.{projection}.weight",
    merged_name="model.layers.{layer}.mlp.experts.{projection}",
    moe_layers=moe_layers,
    default_mask_id=156895,
    default_eos_id=156892,
    decoding={"block_length": 32, "steps": 32, "threshold": 0.95, "temperature": 0.0},
    rules=("threshold",),
)

LLADA21 = dataclasses.replace(
    LLADA2,
    name="llada21",
    model_types=("llada21_moe",),
    decoding={
        "block_length": 32, "threshold": 0.7, "temperature": 0.0, "editing": True, "editing_threshold": 0.5,
    },
    rules=("edit",),
    modes={
        "quality": {"threshold": 0.7, "editing_threshold": 0.5},
        "speed": {"threshold": 0.5, "editing_threshold": 0.0},
    },
)  # fmt: skip
