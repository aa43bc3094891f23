"""The forward pass over the training layout (REFERENCE section 5): a noisy copy of each row, then a clean one.

Modules and weights are those of inference (`models/llada2.py`); only attention and the way through the router
are written for a batch of this layout.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from oled_jax.config import ModelConfig
from oled_jax.demo.training.experts import GroupedExperts, take_rows
from oled_jax.demo.training.routing import route
from oled_jax.models.layers import Attention, matmul_precision
from oled_jax.models.llada2 import LLaDA2, DecoderLayer
from oled_jax.models.moe import Experts, MoEBlock
from oled_jax.models.rope import rotary_tables


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
    embedding = model.word_embeddings.weight[...]
    h, loads = take_rows(embedding, tokens, embedding.shape[0]), []
    for number, layer in enumerate(model.layers):
        attended = attend_layout(layer.attention, layer.input_layernorm(h), tables, layout)
        h = h + attended
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
    x = layer.post_attention_layernorm(h)
    flat = x.reshape(-1, x.shape[-1])
    chosen = route(flat, block.gate.weight[...], block.gate.expert_bias[...], config)
    update, _ = experts(moe_layer, flat, chosen.ids, chosen.gates, None)
    if block.shared_experts is not None:
        update = update + block.shared_experts(flat)
    return h + update.reshape(h.shape), chosen.loads


def attend_layout(
    attention: Attention,
    x: Float[Array, "R S D"],
    tables: tuple[Float[Array, "R S hd"], Float[Array, "R S hd"]],
    layout: Layout,
) -> Float[Array, "R S D"]:
    """Attention of both copies. Nobody sees noisy keys but their own block, so each query meets T clean keys, and
    a noisy one the keys of its block: half the scores of a square mask over 2T."""
    R, S, _ = x.shape
    T, L = S // 2, layout.block_length
    queries, keys, values = attention.project(x, tables)
    Nk, Hd = keys.shape[2:]
    grouped = queries.reshape(R, S, Nk, -1, Hd)
    clean_keys, clean_values = keys[:, T:], values[:, T:]
    precision = matmul_precision(x.dtype)

    clean_scores = _scores(grouped[:, T:], clean_keys, layout.mask(own=True))
    clean_context = _weigh(jax.nn.softmax(clean_scores, axis=-1), clean_values)

    far = _scores(grouped[:, :T], clean_keys, layout.mask(own=False))
    # One block at a time against itself: [R, blocks, L, ...].
    blocks = grouped[:, :T].reshape(R, T // L, L, Nk, -1, Hd)
    near_keys, near_values = (array[:, :T].reshape(R, T // L, L, Nk, Hd) for array in (keys, values))
    near = jnp.einsum(
        "rbtngh,rbsnh->rngbts", blocks, near_keys, precision=precision, preferred_element_type=jnp.float32
    )
    near = (near * Hd**-0.5).reshape(*far.shape[:-1], L)
    weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1)
    noisy_context = _weigh(weights[..., :T], clean_values)
    near_weights = weights[..., T:].reshape(*weights.shape[:3], T // L, L, L).astype(x.dtype)
    near_context = jnp.einsum(
        "rngbts,rbsnh->rbtngh", near_weights, near_values, precision=precision, preferred_element_type=jnp.float32
    )
    noisy_context = noisy_context + near_context.reshape(noisy_context.shape)
    context = jnp.concatenate([noisy_context, clean_context], axis=1).astype(x.dtype)
    return attention.dense(context.reshape(R, S, -1))


def _scores(
    queries: Float[Array, "R T Nk g Hd"], keys: Float[Array, "R T Nk Hd"], mask: Bool[Array, "R T T"]
) -> Float[Array, "R Nk g T T"]:
    """Scaled scores in float32; hidden ones are the most negative finite number."""
    scores = jnp.einsum(
        "rtngh,rsnh->rngts",
        queries,
        keys,
        precision=matmul_precision(queries.dtype),
        preferred_element_type=jnp.float32,
    )
    return jnp.where(mask[:, None, None], scores * queries.shape[-1] ** -0.5, jnp.finfo(jnp.float32).min)


def _weigh(weights: Float[Array, "R Nk g T S"], values: Float[Array, "R S Nk Hd"]) -> Float[Array, "R T Nk g Hd"]:
    return jnp.einsum(
        "rngts,rsnh->rtngh",
        weights.astype(values.dtype),
        values,
        precision=matmul_precision(values.dtype),
        preferred_element_type=jnp.float32,
    )


def merged(graphdef: nnx.GraphDef, trunk: nnx.State) -> LLaDA2:
    """The trunk with these weights."""
    return nnx.merge(graphdef, trunk)
