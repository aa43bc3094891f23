"""The greatest entries of a row by comparing all of its entries with each other: how experts are chosen on a GPU.

`jax.lax.top_k` sorts there, with a copy and a kernel of its own for each call, and a router calls it three times. With
a block's few tokens every pair of entries is compared in less time than that takes to launch. The entries found are the
same, in the same order; so are groups of finite entries.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

MOST_COMPARISONS = 1 << 24  # a prompt's chunk sorts


def compares(num_tokens: int, num_experts: int) -> bool:
    """Whether comparing is the faster way here."""
    return jax.default_backend() == "gpu" and num_tokens * num_experts**2 <= MOST_COMPARISONS


def top_experts(
    values: Float32[Array, "N E"], count: int, of: Float32[Array, "N E"] | None = None, *, compare: bool | None = None
) -> tuple[Float32[Array, "N K"], Int32[Array, "N K"]]:
    """The entries of `of` where `values` has its greatest ones, and which these are, the greatest first.

    Args:
      of: None: `values`.
      compare: else they are sorted; None: what is faster here.
    """
    of = values if of is None else of
    if compare is None:
        compare = compares(*values.shape)
    if not compare:
        _, experts = jax.lax.top_k(values, count)
        return jnp.take_along_axis(of, experts, axis=-1), experts
    chosen = _ranks(values)[:, None, :] == jnp.arange(count)[:, None]
    experts = jnp.where(chosen, jnp.arange(values.shape[1], dtype=jnp.int32), 0)
    return jnp.where(chosen, of[:, None, :], 0).sum(-1), experts.sum(-1)


def best_groups(grouped: Float32[Array, "N G M"], passing: int, *, compare: bool | None = None) -> Bool[Array, "N G"]:
    """Which groups are among the `passing` best of their row: a group is worth the sum of its two greatest entries."""
    N, G, M = grouped.shape
    if compare is None:
        compare = compares(N, G * M)
    if not compare:
        worth = jax.lax.top_k(grouped, 2)[0].sum(-1)
        _, best = jax.lax.top_k(worth, passing)
        return jnp.any(best[:, :, None] == jnp.arange(G), axis=1)
    # No two entries have a greater sum, and rounding keeps that so.
    sums = jnp.where(jnp.eye(M, dtype=bool), -jnp.inf, grouped[..., :, None] + grouped[..., None, :])
    return _ranks(sums.max((-2, -1))) < passing


def _ranks(values: Float32[Array, "N E"]) -> Int32[Array, "N E"]:
    """How many entries of its row come before each: the greater ones and, among equals, those further left."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers they are in the order of sorting: -0 before 0, NaN last
    places = jnp.arange(values.shape[1])
    this, other = order[:, :, None], order[:, None, :]
    before = (other > this) | ((other == this) & (places < places[:, None]))
    return before.sum(-1, dtype=jnp.int32)
