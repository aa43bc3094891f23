"""The forward pass over the training layout (REFERENCE section 5): a noisy copy of each row, then a clean one.

Modules and weights are those of inference (`models/llada2.py`); only attention and the way through the router
are written for a batch of this layout.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oled_jax.config import ModelConfig
from oled_jax.demo.training.attention import Visibility, attend_both
from oled_jax.demo.training.experts import GroupedExperts, take_rows
from oled_jax.demo.training.routing import route
from oled_jax.models.llada2 import LLaDA2
from oled_jax.models.moe import Experts, MoEBlock, SigmoidRouter
from oled_jax.models.rope import rotary_tables
from oled_jax.models.trunk import DecoderLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Who sees whom, by block. Rows hold several items; an item sees itself only.

    block: number within its item of each block. segment: which item a block belongs to, -1 for none.
    """

    block: Int[Array, "R blocks"]
    segment: Int[Array, "R blocks"]
    block_length: int

    @property
    def positions(self) -> Int[Array, "R T"]:
        """Position of each token within its item."""
        offsets = jnp.arange(self.block_length, dtype=jnp.int32)
        return (self.block[:, :, None] * self.block_length + offsets).reshape(self.block.shape[0], -1)

    def mask(self, *, own: bool) -> Bool[Array, "R T T"]:
        """Whether the token at i sees the clean token at j: earlier blocks of its item, and with `own` its own."""
        mine, other = self.block[:, :, None], self.block[:, None, :]
        earlier = other <= mine if own else other < mine
        visible = earlier & (self.segment[:, :, None] == self.segment[:, None, :])
        return jnp.repeat(jnp.repeat(visible, self.block_length, axis=1), self.block_length, axis=2)


def block_numbers(segment: Int[Array, "R blocks"]) -> Int[Array, "R blocks"]:
    """Number of each block within its item, from the items' numbers."""
    index = jnp.arange(segment.shape[1], dtype=jnp.int32)
    starts = jnp.concatenate([jnp.ones_like(segment[:, :1], bool), segment[:, 1:] != segment[:, :-1]], axis=1)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


class Trained(NamedTuple):
    """hidden: of the noisy copy, after the final norm. loads: tokens of each expert, by MoE layer."""

    hidden: Float[Array, "R T D"]
    loads: Int[Array, "L E"]


def forward(
    model: LLaDA2,
    experts: GroupedExperts | Experts,
    noisy: Int[Array, "R T"],
    clean: Int[Array, "R T"],
    layout: Layout,
) -> Trained:
    """Noisy and clean copy through the trunk. Noisy block b sees itself and clean blocks < b of its item; clean
    block b sees clean blocks <= b."""
    config, dtype = model.config, jnp.dtype(model.config.dtype)
    tokens = jnp.concatenate([noisy, clean], axis=1)
    positions = jnp.concatenate([layout.positions] * 2, axis=1)
    cos, sin = rotary_tables(config, positions)
    tables = (cos.astype(dtype), sin.astype(dtype))
    visible = Visibility(layout.mask(own=False), layout.mask(own=True))
    embedding = model.word_embeddings.weight[...]
    h, loads = take_rows(embedding, tokens, embedding.shape[0]), []
    for number, layer in enumerate(model.layers):
        queries, keys, values = layer.attention_part.project(layer.input_layernorm(h), tables)
        context = attend_both(queries, keys, values, visible, layout.block_length)
        h = h + layer.attention_part.output(context.reshape(*h.shape[:2], -1))
        h, load = _feed_forward(layer, h, number - config.first_k_dense_replace, experts, config)
        loads += [] if load is None else [load]
    T = noisy.shape[1]
    return Trained(model.norm(h[:, :T]), jnp.stack(loads))


def _feed_forward(
    layer: DecoderLayer, h: Float[Array, "R S D"], moe_layer: int, experts: Experts, config: ModelConfig
) -> tuple[Float[Array, "R S D"], Int[Array, " E"] | None]:
    if not isinstance(layer.mlp, MoEBlock):
        return layer.feed_forward(h, moe_layer, None, None)[0], None
    block: MoEBlock = layer.mlp
    gate = block.gate
    if not isinstance(gate, SigmoidRouter):
        raise RuntimeError("LLaDA2's router has a bias")
    x = layer.post_attention_layernorm(h)
    flat = x.reshape(-1, x.shape[-1])
    chosen = route(flat, gate.weight[...], gate.expert_bias[...], config)
    update, _ = experts(moe_layer, flat, chosen.ids, chosen.gates, None)
    if block.shared_experts is not None:
        update = update + block.shared_experts(flat)
    return h + update.reshape(h.shape), chosen.loads
