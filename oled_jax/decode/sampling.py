"""From logits to one token and its confidence per position. JAX, pure, traced inside the engine's pass.

Which tokens are then written is `unmask.py`'s business. The mask token is never chosen: a text that keeps it
is of no use, and a block whose masks are filled with masks never ends.
"""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, Integer, Key


def predict(
    logits: Float32[Array, "B T V"],
    key: Key[Array, " B"] | None,
    *,
    mask_id: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    editing: bool,
) -> tuple[Int32[Array, "B T"], Float32[Array, "B T"]]:
    """The token of every position and its probability (REFERENCE sections 6, 7 and 8).

    Every keyword is static. Temperature 0 takes the most probable token other than the mask and ignores
    `top_k` and `top_p`; the confidence is its share of the full softmax, mask included. Otherwise one draw;
    the confidence is the probability after filtering.

    Args:
      logits: of the block.
      key: one random key per row (`row_keys`); not used, and may be None, at temperature 0.
      editing: at temperature 0 compare logits (2.1) rather than their float32 probabilities (2.0). The two
        differ only where two logits round to one probability.

    Returns:
      tokens, confidence.
    """
    is_mask = jnp.arange(logits.shape[-1]) == mask_id
    if temperature == 0.0:
        return _greedy(logits, is_mask, by_logit=editing)
    if key is None:
        raise ValueError(f"temperature {temperature} needs random keys")
    allowed = jnp.where(is_mask, -jnp.inf, logits)
    filtered = filter_logits(allowed, temperature=temperature, top_k=top_k, top_p=top_p)
    # One stream per row: what a row draws does not depend on how many rows there are.
    tokens = jax.vmap(jax.random.categorical)(key, filtered).astype(jnp.int32)
    return tokens, _probability_of(tokens, jax.nn.softmax(filtered, axis=-1))


def _greedy(
    logits: Float32[Array, "B T V"], is_mask: jax.Array, *, by_logit: bool
) -> tuple[Int32[Array, "B T"], Float32[Array, "B T"]]:
    probabilities = jax.nn.softmax(logits, axis=-1)
    scores = jnp.where(is_mask, -jnp.inf, logits if by_logit else probabilities)
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    return tokens, _probability_of(tokens, probabilities)


def _probability_of(tokens: Int32[Array, "B T"], probabilities: Float32[Array, "B T V"]) -> Float32[Array, "B T"]:
    return jnp.take_along_axis(probabilities, tokens[..., None], axis=-1)[..., 0]


def entropy(logits: Float32[Array, "... V"], temperature: float) -> Float32[Array, "..."]:
    """Of the softmax at this temperature (0: at 1), before any filter, in nats."""
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    logs = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.sum(jnp.exp(logs) * logs, axis=-1)


def filter_logits(
    logits: Float32[Array, "... V"], *, temperature: float, top_k: int | None, top_p: float | None
) -> Float32[Array, "... V"]:
    """Logits over temperature, with everything outside top-k and then top-p at -inf (REFERENCE section 8).

    Top-k keeps ties with the k-th largest (None or 0: off). Top-p keeps the most probable entries up to the
    one whose cumulative probability exceeds p, that one included (None or at least 1: off).
    """
    if temperature != 1.0:
        logits = logits / temperature
    if top_k is not None and top_k > 0:
        kth = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits >= kth, logits, -jnp.inf)
    if top_p is not None and top_p < 1.0:
        order = jnp.argsort(logits, axis=-1, descending=True)
        ranked = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        crossed = jnp.cumsum(ranked, axis=-1) > top_p
        dropped = jnp.concatenate([jnp.zeros_like(crossed[..., :1]), crossed[..., :-1]], axis=-1)
        dropped = jnp.put_along_axis(jnp.zeros_like(dropped), order, dropped, axis=-1, inplace=False)
        logits = jnp.where(dropped, -jnp.inf, logits)
    return logits


def row_keys(
    seed: Integer[Array, ""] | int,
    requests: Int32[Array, " B"] | Int32[np.ndarray, " B"],
    pass_index: Integer[Array, "*B"] | int,
) -> Key[Array, " B"]:
    """One random key per row, from (seed, request, pass): independent of the other rows of the batch.

    Args:
      requests: what tells two equal prompts apart (`request_numbers`).
      pass_index: passes over the row's blocks before this one, of each row or of all.
    """
    passes = jnp.broadcast_to(jnp.asarray(pass_index), jnp.shape(requests))
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), passes)
    return jax.vmap(jax.random.fold_in)(keys, requests)


def request_numbers(prompts: Sequence[Sequence[Hashable]]) -> Int32[np.ndarray, " B"]:
    """How often the same prompt occurs earlier in the batch.

    As part of a random key it lets equal prompts of one batch differ, while a prompt alone and the same
    prompt among others get the same text.
    """
    seen: dict[tuple[Hashable, ...], int] = {}
    numbers = np.zeros(len(prompts), np.int32)
    for row, prompt in enumerate(prompts):
        numbers[row] = seen.get(tuple(prompt), 0)
        seen[tuple(prompt)] = int(numbers[row]) + 1
    return numbers
