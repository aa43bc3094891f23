"""The jitted programs: one forward pass over a batch of chunks, and moves of pages between passes.

Pure functions of arrays. Static arguments are small frozen values, so engines of the same shape share programs; the
cache manager is reached through a handle that is an operand.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from oled_jax.config import ModelConfig
from oled_jax.decode.sampling import predict, row_keys
from oled_jax.models.kv_cache import KVCache
from oled_jax.models.llada2 import block_mask
from oled_jax.models.moe import Experts
from oled_jax.models.registry import family_named
from oled_jax.offload.carriers.portable import PortableCarrier
from oled_jax.offload.layer import ExpertCarry, OffloadedExperts, ResidentExperts
from oled_jax.offload.plan import PlanLayout
from oled_jax.offload.pool import Pool, fetch
from oled_jax.ops.grouping import ItemShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """What `decode.sampling.predict` needs to know when the program is compiled."""

    mask_id: int
    temperature: float
    top_k: int | None
    top_p: float | None
    editing: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassSpec:
    """Everything static about a pass.

    spare: spare slots of the pool, None if every page is resident. uses_cpu: experts may be computed on the CPU.
    """

    config: ModelConfig
    block_length: int
    spare: int | None
    uses_cpu: bool


class PassInputs(NamedTuple):
    """One chunk of T positions per row. token_mask: False for padding and finished rows, which never route."""

    tokens: Int32[Array, "B T"]
    starts: Int32[Array, " B"]
    token_mask: Bool[Array, "B T"]
    sequence_length: Int32[Array, ""]
    manager: Int32[Array, ""]


class PassOutputs(NamedTuple):
    """routes: expert ids per MoE layer; empty unless every page is resident (else the manager has seen them)."""

    hidden: Array
    routes: tuple[Int[Array, "N K"], ...]


@functools.partial(jax.jit, static_argnames="spec", donate_argnames=("pool", "cache"))
def forward_pass(
    spec: PassSpec,
    trunk: nnx.State[Any, Any],
    store: Sequence[Pool],
    pool: Pool,
    cache: KVCache,
    inputs: PassInputs,
) -> tuple[Pool, KVCache, PassOutputs]:
    """One pass through the trunk. Pool and cache are donated and updated in place.

    Args:
      trunk: the model's NNX state.
      store: pages of each MoE layer in host memory; empty if every page is resident.

    Returns:
      pool, cache, and the hidden states [B, T, D] after the final norm.
    """
    config = spec.config
    model = nnx.merge(graph_definition(config), trunk)
    B, T = inputs.tokens.shape
    positions = inputs.starts[:, None] + jnp.arange(T, dtype=jnp.int32)
    mask = block_mask(positions, cache.capacity, spec.block_length)
    items = ItemShape(num_tokens=B * T, top_k=config.num_experts_per_tok, num_experts=config.num_experts)
    experts: Experts
    if spec.spare is None:
        experts = ResidentExperts(items, inputs.token_mask.ravel())
    else:
        carrier = PortableCarrier(inputs.manager, store, uses_cpu=spec.uses_cpu)
        layout = PlanLayout(items=items, spare=spec.spare)
        experts = OffloadedExperts(carrier, layout, num_layers=config.num_moe_layers)
    carry = ExpertCarry.start(pool, items)
    hidden, cache, carry = model(
        inputs.tokens, positions, mask, cache, inputs.starts, experts, carry, inputs.sequence_length
    )
    return carry.pool, cache, PassOutputs(hidden=hidden, routes=carry.routes)


@functools.partial(jax.jit, static_argnames=("config", "sampling"))
def sample(
    config: ModelConfig,
    sampling: Sampling,
    trunk: nnx.State[Any, Any],
    hidden: Array,
    seed: Int32[Array, ""],
    requests: Int32[Array, " B"],
    pass_index: Int32[Array, ""],
) -> tuple[Int32[Array, "B T"], Float32[Array, "B T"]]:
    """The head, and one token with its confidence per position.

    A program of its own: prefill and commit passes go without, and `forward_pass` is not compiled twice for it.

    Args:
      seed, requests, pass_index: of the random keys (`decode.sampling.row_keys`).
    """
    logits = head_logits(config, trunk, hidden)
    keys = row_keys(seed, requests, pass_index) if sampling.temperature > 0 else None
    return predict(logits, keys, **dataclasses.asdict(sampling))


@functools.partial(jax.jit, static_argnames="config")
def head_logits(config: ModelConfig, trunk: nnx.State[Any, Any], hidden: Array) -> Float32[Array, "B T V"]:
    """Logits of hidden states that `forward_pass` returned."""
    return nnx.merge(graph_definition(config), trunk).logits(hidden)


@functools.partial(jax.jit, donate_argnames="pool")
def stage_pages(
    pool: Pool, pages: Pool, experts: Int32[Array, " M"], slots: Int32[Array, " M"], count: Int32[Array, ""]
) -> Pool:
    """Copies pages of one layer into their slots, between passes."""
    return fetch(pool, pages, experts, slots, jnp.zeros_like(count), count)


@functools.partial(jax.jit, donate_argnames="pool")
def fill_pool(
    pool: Pool, gate_up: Float[Array, "E G D"], down: Float[Array, "E D F"], first_slot: Int32[Array, ""]
) -> Pool:
    """Writes all pages of a layer to consecutive slots (a pool that holds every page)."""
    return Pool(
        jax.lax.dynamic_update_slice_in_dim(pool.gate_up, gate_up, first_slot, 0),
        jax.lax.dynamic_update_slice_in_dim(pool.down, down, first_slot, 0),
    )


@functools.lru_cache(maxsize=8)
def graph_definition(config: ModelConfig) -> nnx.GraphDef:
    """The trunk's static part. Cached: building it walks all modules."""
    return nnx.graphdef(nnx.eval_shape(lambda: family_named(config.family).build(config)))
