"""What a trace wants of the expert layers that no callback sees: gates, and layer inputs compared over passes.

Wraps any `Experts` and changes nothing of what they compute.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from oled_jax.config import ModelConfig
from oled_jax.models.moe import Experts
from oled_jax.ops.own_blocks import own_blocks
from oled_jax.traces.trace import COSINE_GAPS

History = tuple[Float[Array, "G B T D"], ...]  # per MoE layer: the inputs of the last G passes, in a ring


class Comparison(NamedTuple):
    """What the layer inputs of a pass are compared with.

    history: rings of earlier passes. iterations: how many passes of its block a row has in its ring already, -1 for
    a row that is neither compared nor kept. token_mask: tokens that count. folds: of a pass over two blocks; a block
    that is folded in counts nothing.
    """

    history: History
    iterations: Int32[Array, " B"]
    token_mask: Bool[Array, "B _"]
    folds: Bool[Array, " B"] | None = None


class ObservedCarry(NamedTuple):
    """The wrapped experts' carry, and per MoE layer so far what was observed."""

    experts: Any
    gates: tuple[Float32[Array, "N K"], ...] = ()
    history: History = ()
    cosine: tuple[Float32[Array, " G"], ...] = ()


class ObservedExperts:
    """Experts whose inputs are observed.

    Args:
      experts: compute the layers.
      comparison: None: layer inputs are not compared.
    """

    def __init__(self, experts: Experts, comparison: Comparison | None) -> None:
        self.experts = experts
        self.comparison = comparison

    def __call__(
        self,
        layer: int,
        x: Float[Array, "N D"],
        ids: Int[Array, "N K"],
        gates: Float[Array, "N K"],
        carry: ObservedCarry,
    ) -> tuple[Float[Array, "N D"], ObservedCarry]:
        """What the wrapped experts give, and the carry with this layer's observations."""
        y, experts = self.experts(layer, x, ids, gates, carry.experts)
        carry = carry._replace(experts=experts, gates=(*carry.gates, gates))
        if self.comparison is None:
            return y, carry
        # The barrier keeps the comparison out of the fusions that compute x, and so out of its rounding.
        ring, cosine = compare(jax.lax.optimization_barrier(x), self.comparison, layer)
        return y, carry._replace(history=(*carry.history, ring), cosine=(*carry.cosine, cosine))


def empty_history(config: ModelConfig, batch: int, block_length: int) -> History:
    """Rings for a run over this many rows."""
    shape = COSINE_GAPS, batch, block_length, config.hidden_size
    return tuple(jnp.zeros(shape, jnp.dtype(config.dtype)) for _ in range(config.num_moe_layers))


def compare(
    x: Float[Array, "N D"], comparison: Comparison, layer: int
) -> tuple[Float[Array, "G B T D"], Float32[Array, " G"]]:
    """The ring with `x` in it, and the mean over tokens of the cosine between `x` and each of the G passes before.

    A row counts for gap g if it has had g passes over its block; NaN where no row has.
    """
    ring, iterations, folds = comparison.history[layer], comparison.iterations, comparison.folds
    G, B = ring.shape[:2]
    mask = own_blocks(folds, comparison.token_mask)
    now = own_blocks(folds, x.reshape(B, -1, x.shape[-1]))
    per_slot = jnp.where(mask, _cosine(now.astype(jnp.float32), ring.astype(jnp.float32)), 0.0).sum(-1)
    gaps = jnp.arange(1, G + 1)[:, None]
    seen = gaps <= iterations
    per_gap = jnp.where(seen, per_slot[(iterations - gaps) % G, jnp.arange(B)], 0.0).sum(-1)
    tokens = jnp.where(seen, mask.sum(-1), 0).sum(-1)
    mean = jnp.where(tokens > 0, per_gap / jnp.maximum(tokens, 1), jnp.nan)
    place = jnp.where(iterations < 0, G, iterations % G)  # G lies outside: nothing is kept
    return ring.at[place, jnp.arange(B)].set(now, mode="drop"), mean


def _cosine(now: Float32[Array, "B T D"], before: Float32[Array, "G B T D"]) -> Float32[Array, "G B T"]:
    dots = jnp.einsum("btd,gbtd->gbt", now, before, precision=jax.lax.Precision.HIGHEST)
    squares = jnp.square(now).sum(-1) * jnp.square(before).sum(-1)
    return dots * jax.lax.rsqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))
