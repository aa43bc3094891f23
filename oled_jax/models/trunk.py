"""What the trunks of all families share: a decoder layer, the pass through all of them, the head, tensor names.

A family's classes hold the weights under the names of its files, and say here which is which (`attention_part`,
`embedding`). Who sees whom is the caller's mask; `block_mask` makes that of block diffusion.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from oled_jax.config import ModelConfig
from oled_jax.models.family import TrunkTensor, abstract_trunk
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


def full_mask(token_mask: Bool[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Every query sees every key that is a token: attention both ways over the whole text (REFERENCE section 10)."""
    B, T = token_mask.shape
    return jnp.broadcast_to(token_mask[:, None, :], (B, T, T))


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each after a norm and with a residual addition in the working dtype."""

    def __init__(self, config: ModelConfig, mlp: MLP | MoEBlock):
        dtype, D = jnp.dtype(config.dtype), config.hidden_size
        self.input_layernorm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = mlp

    @property
    def attention_part(self) -> Attention:
        """The attention, which every family names in its own way."""
        raise NotImplementedError

    def attend(
        self,
        h: Float[Array, "B T D"],
        tables: tuple[Float[Array, "B T R"], Float[Array, "B T R"]],
        mask: Bool[Array, "B T S"],
        cache: LayerCache | None = None,
        starts: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        update, cache = self.attention_part(self.input_layernorm(h), tables, mask, cache, starts)
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


class Trunk(nnx.Module):
    """Everything but the routed experts. Attribute names are those of the Hugging Face tensors below `model.`."""

    def __init__(self, config: ModelConfig, layers: list[DecoderLayer]):
        dtype, V, D = jnp.dtype(config.dtype), config.vocab_size, config.hidden_size
        self.config = config
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = None if config.tie_word_embeddings else Linear(D, V, dtype=dtype)

    @property
    def embedding(self) -> Embedding:
        """The embedding, which every family names in its own way."""
        raise NotImplementedError

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
        h = self.embedding(token_ids)
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
        """Of `layers.head_logits`."""
        head = self.embedding if self.lm_head is None else self.lm_head
        return head.weight[...]

    def logits(self, hidden: Float[Array, "*N D"]) -> Float[Array, "*N V"]:
        """Logits of what `__call__` returned. Which position they predict: `ModelConfig.shifted_logits`."""
        return head_logits(hidden, self.head_weight)


def named_tensors(build: Callable[[ModelConfig], Trunk], config: ModelConfig) -> list[TrunkTensor]:
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
