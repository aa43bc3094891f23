"""LLaDA2.0 and LLaDA2.1: the network (one for both), its configuration keys and its tensor names.

Specification: REFERENCE sections 2 to 5. The two versions differ only in how text is decoded, so they are two
`Family` entries that share everything else.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from oled_jax.config import ModelConfig
from oled_jax.models.family import Family, TrunkTensor, abstract_trunk
from oled_jax.models.hf_config import ConfigReader
from oled_jax.models.kv_cache import KVCache
from oled_jax.models.layers import MLP, Attention, Embedding, LayerCache, Linear, RMSNorm, head_logits
from oled_jax.models.moe import Experts, MoEBlock
from oled_jax.models.rope import rotary_tables


def block_mask(positions: Int[Array, "B T"], num_keys: int, block_length: int) -> Bool[Array, "B T S"]:
    """True where the query sees the key at position j: j div L <= position div L (REFERENCE section 5).

    Blocks start at position 0 of the sequence, prompt included; inside a block attention goes both ways.
    """
    key_blocks = jnp.arange(num_keys, dtype=positions.dtype) // block_length
    return key_blocks <= (positions // block_length)[..., None]


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each after a norm and with a residual addition in the working dtype."""

    def __init__(self, config: ModelConfig, *, dense: bool):
        dtype, D = jnp.dtype(config.dtype), config.hidden_size
        self.input_layernorm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config)
        self.post_attention_layernorm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(D, config.intermediate_size, dtype=dtype) if dense else MoEBlock(config)

    def attend(
        self,
        h: Float[Array, "B T D"],
        tables: tuple[Float[Array, "B T R"], Float[Array, "B T R"]],
        mask: Bool[Array, "B T S"],
        cache: LayerCache | None = None,
        starts: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        update, cache = self.attention(self.input_layernorm(h), tables, mask, cache, starts)
        return h + update, cache

    def feed_forward(
        self, h: Float[Array, "B T D"], moe_layer: int, experts: Experts | None, carry: Any
    ) -> tuple[Float[Array, "B T D"], Any]:
        x = self.post_attention_layernorm(h)
        if isinstance(self.mlp, MLP):
            return h + self.mlp(x), carry
        if experts is None:
            raise RuntimeError("a layer with routed experts was run without any")
        update, carry = self.mlp(x, moe_layer, experts, carry)
        return h + update, carry


class LLaDA2(nnx.Module):
    """The trunk. Attribute names are those of the Hugging Face tensors below `model.`."""

    def __init__(self, config: ModelConfig):
        dtype, V, D = jnp.dtype(config.dtype), config.vocab_size, config.hidden_size
        self.config = config
        self.word_embeddings = Embedding(V, D, dtype=dtype)
        self.layers = nnx.List(
            DecoderLayer(config, dense=number < config.first_k_dense_replace)
            for number in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = None if config.tie_word_embeddings else Linear(D, V, dtype=dtype)

    def __call__(
        self,
        token_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T S"],
        cache: KVCache | None = None,
        starts: Int[Array, " B"] | None = None,
        experts: Experts | None = None,
        carry: Any = None,
        sequence_length: int | Int[Array, "*B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None, Any]:
        """Hidden states after the final norm, the updated cache, and the carry of the last MoE layer.

        Args:
          token_ids: tokens of the chunk.
          positions: their absolute positions.
          mask: True where query t sees key s. Without a cache S = T, the keys are the chunk's own; with one
            S is its capacity, and the mask hides what no pass has written yet.
          cache: keys and values of earlier passes; the chunk's are written before attention reads.
          starts: where row b's chunk begins in the cache; needed with a cache.
          experts: computes the routed experts; may be None only if every layer is dense.
          carry: threaded through the MoE layers in order.
          sequence_length: for the "dynamic" and "longrope" rotary types, see `models/rope.py`.
        """
        dtype = jnp.dtype(self.config.dtype)
        cos, sin = rotary_tables(self.config, positions, sequence_length)
        tables = (cos.astype(dtype), sin.astype(dtype))
        h = self.word_embeddings(token_ids)
        written: list[LayerCache] = []
        for number, layer in enumerate(self.layers):
            layer_cache = None if cache is None else (cache.keys[number], cache.values[number])
            h, layer_cache = layer.attend(h, tables, mask, layer_cache, starts)
            if layer_cache is not None:
                written.append(layer_cache)
            h, carry = layer.feed_forward(h, number - self.config.first_k_dense_replace, experts, carry)
        if cache is not None:
            cache = KVCache(keys=tuple(k for k, _ in written), values=tuple(v for _, v in written))
        return self.norm(h), cache, carry

    @property
    def head_weight(self) -> Float[Array, "V D"]:
        """Of `layers.head_logits`. Position i predicts token i, unshifted."""
        head = self.word_embeddings if self.lm_head is None else self.lm_head
        return head.weight[...]

    def logits(self, hidden: Float[Array, "*N D"]) -> Float[Array, "*N V"]:
        """Logits of what `__call__` returned."""
        return head_logits(hidden, self.head_weight)


def build(config: ModelConfig) -> LLaDA2:
    """The trunk with placeholder weights."""
    return LLaDA2(config)


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads `config.json`; defaults are those of the published configuration class (REFERENCE section 2).

    Raises:
      CheckpointError: with every wrong type, missing size and impossible combination in one message.
    """
    read = ConfigReader(raw)
    if raw.get("hidden_act", "silu") != "silu":
        read.problems.append(f"hidden_act is {raw['hidden_act']!r}, only 'silu' is supported")
    if raw.get("quantization_config"):
        read.problems.append("quantization_config is set: quantized checkpoints are not supported")
    model_type = str(raw.get("model_type", LLADA2.model_types[0]))
    fields = {
        "family": LLADA21.name if model_type in LLADA21.model_types else LLADA2.name,
        "model_type": model_type,
        "dtype": read.dtype(),
        "mask_token_id": read.token_id("mask_token_id"),
        "eos_token_id": read.token_id("eos_token_id"),
        "pad_token_id": read.token_id("pad_token_id"),
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


def trunk_tensors(config: ModelConfig) -> list[TrunkTensor]:
    """One tensor for each state leaf: modules are named so that the path spells the tensor's name."""
    _, leaves = abstract_trunk(build, config)
    found = []
    for path, leaf in leaves.items():
        name = ".".join(str(part) for part in path)
        name = name if path[0] == "lm_head" else f"model.{name}"
        found.append(TrunkTensor(name=name, path=path, shape=leaf.shape, float32=path[-1] == "expert_bias"))
    return found


def ignored_tensors(config: ModelConfig) -> tuple[str, ...]:
    """A tied model's head: if the file has one, the embedding wins (REFERENCE section 3)."""
    return ("lm_head.weight",) if config.tie_word_embeddings else ()


def moe_layers(config: ModelConfig) -> range:
    """Model layer numbers of the MoE layers."""
    return range(min(config.first_k_dense_replace, config.num_hidden_layers), config.num_hidden_layers)


LLADA2 = Family(
    name="llada2",
    model_types=("llada2_moe", "llada2_moe_veomni"),
    config_from_hf=config_from_hf,
    trunk_tensors=trunk_tensors,
    ignored_tensors=ignored_tensors,
    build=build,
    expert_name="model.layers.{layer}.mlp.experts.{expert}.{projection}.weight",
    merged_name="model.layers.{layer}.mlp.experts.{projection}",
    moe_layers=moe_layers,
    default_mask_id=156895,
    default_eos_id=156892,
    decoding={"block_length": 32, "steps": 32, "threshold": 0.95, "temperature": 0.0},
)

LLADA21 = dataclasses.replace(
    LLADA2,
    name="llada21",
    model_types=("llada21_moe",),
    decoding={
        "block_length": 32, "threshold": 0.7, "temperature": 0.0, "editing": True, "editing_threshold": 0.5,
    },
    modes={
        "quality": {"threshold": 0.7, "editing_threshold": 0.5},
        "speed": {"threshold": 0.5, "editing_threshold": 0.0},
    },
)  # fmt: skip
