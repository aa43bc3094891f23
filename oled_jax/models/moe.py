"""The mixture-of-experts block: router, routed experts behind an interface, shared expert.

Where the weights of the routed experts are is not this file's business: whoever calls the model passes an
`Experts`. The resident `DenseExperts` here is the plain yardstick that others are tested against.
"""

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from oled_jax.config import ModelConfig
from oled_jax.models.layers import MLP, linear, swiglu
from oled_jax.ops.top_experts import best_groups, top_experts


@runtime_checkable
class Experts(Protocol):
    """Computes the routed experts of one layer."""

    def __call__(
        self,
        layer: int,
        x: Float[Array, "N D"],
        ids: Int[Array, "N K"],
        gates: Float[Array, "N K"],
        carry: Any,
    ) -> tuple[Float[Array, "N D"], Any]:
        """The combined output of the experts `ids` for every token, in x's dtype, and the new carry.

        Args:
          layer: number among the MoE layers, from 0.
          x: hidden states after the norm.
          ids: chosen experts, int32, by falling biased score.
          gates: their weights, float32.
          carry: whatever the implementation threads through the layers, such as a donated pool.
        """
        ...


@functools.partial(jax.jit, static_argnames="config")
def route(
    x: Float[Array, "N D"], weight: Float[Array, "E D"], bias: Float[Array, " E"], config: ModelConfig
) -> tuple[Int[Array, "N K"], Float[Array, "N K"]]:
    """Experts (int32, by falling biased score) and float32 gates of every token (REFERENCE 4, MoE, 1 to 5).

    The bias decides who is chosen and nothing else; the gates are the unbiased scores.
    """
    K = config.num_experts_per_tok
    logits = jnp.einsum(
        "nd,ed->ne", x.astype(jnp.float32), weight.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    scores = jax.nn.sigmoid(logits)
    biased = limit_groups(scores + bias.astype(jnp.float32), config.n_group, config.topk_group)
    gates, ids = top_experts(biased, K, of=scores)
    if K > 1:
        gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)
    return ids.astype(jnp.int32), gates * config.routed_scaling_factor


@functools.partial(jax.jit, static_argnames="config")
def route_by_softmax(
    x: Float[Array, "N D"], weight: Float[Array, "E D"], config: ModelConfig
) -> tuple[Int[Array, "N K"], Float[Array, "N K"]]:
    """The likeliest experts (int32, by falling probability) and float32 gates of every token (REFERENCE 10).

    Logits are in the working dtype, their softmax over all experts is float32.
    """
    probabilities = jax.nn.softmax(linear(x, weight).astype(jnp.float32), axis=-1)
    gates, ids = top_experts(probabilities, config.num_experts_per_tok)
    if config.norm_topk_prob:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    return ids.astype(jnp.int32), gates


def limit_groups(biased: Float[Array, "N E"], groups: int, passing: int) -> Float[Array, "N E"]:
    """`biased` with -inf outside each token's best groups; a group's score sums its two largest entries."""
    if passing == groups:
        return biased
    N, E = biased.shape
    grouped = biased.reshape(N, groups, E // groups)
    passes = best_groups(grouped, passing)
    return jnp.where(passes[:, :, None], grouped, -jnp.inf).reshape(N, E)


@jax.jit
def combine(rows: Float[Array, "N K D"], gates: Float[Array, "N K"]) -> Float32[Array, "N D"]:
    """Sum over k of gates · rows in float32 and in order; the caller casts it once (REFERENCE 4, MoE 6)."""
    total = jnp.zeros((rows.shape[0], rows.shape[2]), jnp.float32)
    # A loop fixes the order of the sum; a reduction leaves it to the compiler.
    for k in range(rows.shape[1]):
        total = total + rows[:, k].astype(jnp.float32) * gates[:, k, None]
    return total


class DenseExperts(NamedTuple):
    """All experts resident, every expert computed for every token: slow and plain, for tests.

    `gate_up` stacks gate rows above up rows, [out, in] each.
    """

    gate_up: Float[Array, "L E F2 D"]
    down: Float[Array, "L E D F"]

    def __call__(
        self,
        layer: int,
        x: Float[Array, "N D"],
        ids: Int[Array, "N K"],
        gates: Float[Array, "N K"],
        carry: Any,
    ) -> tuple[Float[Array, "N D"], Any]:
        gate, up = jnp.split(self.gate_up[layer], 2, axis=1)
        outputs = jax.vmap(swiglu, in_axes=(None, 0, 0, 0))(x, gate, up, self.down[layer])
        rows = outputs[ids, jnp.arange(x.shape[0])[:, None]]
        return combine(rows, gates).astype(x.dtype), carry


class SigmoidRouter(nnx.Module):
    """LLaDA2: weight [E, D] in the model's dtype and the selection bias [E], always float32."""

    def __init__(self, config: ModelConfig):
        E, D = config.num_experts, config.hidden_size
        self.weight = nnx.Param(jnp.zeros((E, D), jnp.dtype(config.dtype)))
        self.expert_bias = nnx.Variable(jnp.zeros((E,), jnp.float32))
        self.config = config

    def __call__(self, x: Float[Array, "N D"]) -> tuple[Int[Array, "N K"], Float[Array, "N K"]]:
        return route(x, self.weight[...], self.expert_bias[...], self.config)


class SoftmaxRouter(nnx.Module):
    """Qwen3-MoE: weight [E, D] in the model's dtype, no bias."""

    def __init__(self, config: ModelConfig):
        E, D = config.num_experts, config.hidden_size
        self.weight = nnx.Param(jnp.zeros((E, D), jnp.dtype(config.dtype)))
        self.config = config

    def __call__(self, x: Float[Array, "N D"]) -> tuple[Int[Array, "N K"], Float[Array, "N K"]]:
        return route_by_softmax(x, self.weight[...], self.config)


class MoEBlock(nnx.Module):
    """Router, routed experts (passed in), shared expert (added after the routed sum was cast, ungated)."""

    def __init__(self, gate: SigmoidRouter | SoftmaxRouter, shared_experts: MLP | None = None):
        self.gate = gate
        self.shared_experts = shared_experts

    def __call__(
        self, x: Float[Array, "B T D"], moe_layer: int, experts: Experts, carry: Any
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The whole feed-forward output, and the carry that `experts` returned."""
        flat = x.reshape(-1, x.shape[-1])
        ids, gates = self.gate(flat)
        y, carry = experts(moe_layer, flat, ids, gates, carry)
        if self.shared_experts is not None:
            y = y + self.shared_experts(flat)
        return y.reshape(x.shape), carry
