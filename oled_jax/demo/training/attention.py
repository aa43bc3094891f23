"""Attention over the training layout. Nobody sees noisy keys but their own block's, so each query meets the T clean
keys, and a noisy one the keys of its block: half the scores of a square mask over 2T.

Everything is a batched product of matrices [rows, Hd], heads and query groups folded into batch and rows: the
scores, by far the largest arrays, are then never transposed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oled_jax.models.layers import matmul_precision

Heads = Float[Array, "R Nk g T Hd"]


class Visibility(NamedTuple):
    """Which clean tokens a token sees: those of earlier blocks of its item, and with `own` of its own block."""

    earlier: Bool[Array, "R T T"]
    own: Bool[Array, "R T T"]


def attend_both(
    queries: Float[Array, "R S Nq Hd"],
    keys: Float[Array, "R S Nk Hd"],
    values: Float[Array, "R S Nk Hd"],
    visible: Visibility,
    block_length: int,
) -> Float[Array, "R S Nq Hd"]:
    """Context of the noisy copy (the first half of S) and of the clean one, in the queries' dtype."""
    R, S, Nq, Hd = queries.shape
    T, Nk = S // 2, keys.shape[2]
    by_head = queries.reshape(R, S, Nk, Nq // Nk, Hd).transpose(0, 2, 3, 1, 4)
    keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
    seen = _hide(_scores(by_head[..., T:, :], keys[:, :, T:]), visible.own)
    clean = _weigh(jax.nn.softmax(seen, axis=-1), values[:, :, T:])
    noisy = _attend_noisy(by_head[..., :T, :], keys, values, visible.earlier, block_length)
    context = jnp.concatenate([noisy, clean], axis=3)
    return context.transpose(0, 3, 1, 2, 4).reshape(R, S, Nq, Hd)


def _attend_noisy(
    queries: Heads,
    keys: Float[Array, "R Nk S Hd"],
    values: Float[Array, "R Nk S Hd"],
    earlier: Bool[Array, "R T T"],
    block_length: int,
) -> Heads:
    """One softmax over the clean keys before a block and the block's own noisy keys."""
    R, Nk, g, T, Hd = queries.shape
    L, blocks = block_length, T // block_length
    far = _hide(_scores(queries, keys[:, :, T:]), earlier)
    # Blocks join the heads: [R, Nk * blocks, ...].
    folded = queries.reshape(R, Nk, g, blocks, L, Hd).swapaxes(2, 3).reshape(R, Nk * blocks, g, L, Hd)
    near_keys, near_values = (array[:, :, :T].reshape(R, Nk * blocks, L, Hd) for array in (keys, values))
    near = _scores(folded, near_keys).reshape(R, Nk, blocks, g, L, L).swapaxes(2, 3).reshape(R, Nk, g, T, L)
    weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1)
    near_weights = weights[..., T:].reshape(R, Nk, g, blocks, L, L).swapaxes(2, 3)
    near_context = _weigh(near_weights.reshape(R, Nk * blocks, g, L, L), near_values)
    near_context = near_context.reshape(R, Nk, blocks, g, L, Hd).swapaxes(2, 3).reshape(queries.shape)
    return _weigh(weights[..., :T], values[:, :, T:]) + near_context


@jax.custom_vjp
def _scores(queries: Heads, keys: Float[Array, "R Nk K Hd"]) -> Float[Array, "R Nk g T K"]:
    """Scaled scores in float32. The gradient is rounded to the queries' dtype first: products of a float32 with a
    bfloat16 array would leave the fast matrix units."""
    R, Nk, g, T, Hd = queries.shape
    product = jnp.einsum(
        "bnth,bnkh->bntk",
        queries.reshape(R, Nk, g * T, Hd),
        keys,
        precision=matmul_precision(queries.dtype),
        preferred_element_type=jnp.float32,
    )
    return (product * Hd**-0.5).reshape(R, Nk, g, T, -1)


def _scores_forward(queries: Array, keys: Array) -> tuple[Array, tuple[Array, Array]]:
    return _scores(queries, keys), (queries, keys)


def _scores_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    queries, keys = saved
    R, Nk, g, T, Hd = queries.shape
    narrow = (gradient * Hd**-0.5).astype(queries.dtype).reshape(R, Nk, g * T, -1)
    folded, precision = queries.reshape(R, Nk, g * T, Hd), matmul_precision(queries.dtype)
    of_queries = jnp.einsum("bntk,bnkh->bnth", narrow, keys, precision=precision)
    of_keys = jnp.einsum("bntk,bnth->bnkh", narrow, folded, precision=precision)
    return of_queries.reshape(queries.shape), of_keys


_scores.defvjp(_scores_forward, _scores_backward)


def _hide(scores: Float[Array, "R Nk g T K"], visible: Bool[Array, "R T K"]) -> Float[Array, "R Nk g T K"]:
    """Hidden scores become the most negative finite number."""
    return jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)


def _weigh(weights: Float[Array, "R Nk g T K"], values: Float[Array, "R Nk K Hd"]) -> Heads:
    R, Nk, g, T, K = weights.shape
    folded = weights.astype(values.dtype).reshape(R, Nk, g * T, K)
    context = jnp.einsum("bntk,bnkh->bnth", folded, values, precision=matmul_precision(values.dtype))
    return context.reshape(R, Nk, g, T, -1)
