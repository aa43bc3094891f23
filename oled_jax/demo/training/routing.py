"""The router for training: the same choice as `models.moe.route`, made of reductions instead of sorts.

`jax.lax.top_k` sorts whole rows on a GPU, which over a hundred thousand tokens takes longer than the experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from oled_jax.config import ModelConfig


class Route(NamedTuple):
    """ids and gates as of `models.moe.route`; loads: tokens of each expert."""

    ids: Int[Array, "N K"]
    gates: Float[Array, "N K"]
    loads: Int[Array, " E"]


def route(x: Float[Array, "N D"], weight: Float[Array, "E D"], bias: Float[Array, " E"], config: ModelConfig) -> Route:
    """Experts and gates of every token (REFERENCE section 4, MoE, steps 1 to 5), ties to the lowest index."""
    logits = jnp.einsum(
        "nd,ed->ne", x.astype(jnp.float32), weight.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    scores = jax.nn.sigmoid(logits)
    biased = _limit_groups(jax.lax.stop_gradient(scores) + bias, config.n_group, config.topk_group)
    places = jnp.arange(config.num_experts, dtype=jnp.int32)
    chosen = []
    for _ in range(config.num_experts_per_tok):
        best = jnp.argmax(biased, axis=-1).astype(jnp.int32)
        biased = jnp.where(best[:, None] == places, -jnp.inf, biased)
        chosen.append(best)
    ids = jnp.stack(chosen, axis=-1)
    is_chosen = ids[:, :, None] == places
    gates = jnp.sum(jnp.where(is_chosen, scores[:, None, :], 0.0), axis=-1)
    if config.num_experts_per_tok > 1:
        gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)
    loads = jnp.sum(is_chosen, axis=(0, 1), dtype=jnp.int32)
    return Route(ids, gates * config.routed_scaling_factor, loads)


def _limit_groups(biased: Float[Array, "N E"], groups: int, passing: int) -> Float[Array, "N E"]:
    """`models.moe.limit_groups` without sorting: a group passes if fewer than `passing` come before it."""
    if passing == groups:
        return biased
    N, E = biased.shape
    grouped = biased.reshape(N, groups, E // groups)
    first = jnp.argmax(grouped, axis=-1, keepdims=True)
    others = jnp.where(first == jnp.arange(E // groups), -jnp.inf, grouped)
    totals = jnp.max(grouped, axis=-1) + jnp.max(others, axis=-1)
    numbers = jnp.arange(groups)
    mine, other = totals[:, :, None], totals[:, None, :]
    ahead = (other > mine) | ((other == mine) & (numbers[None, :] < numbers[:, None]))
    passes = jnp.sum(ahead, axis=-1) < passing
    return jnp.where(passes[:, :, None], grouped, -jnp.inf).reshape(N, E)
