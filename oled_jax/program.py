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
from oled_jax.offload.carriers.registry import make_carrier
from oled_jax.offload.layer import ExpertCarry, OffloadedExperts, ReplayedExperts, ResidentExperts
from oled_jax.offload.observed import Comparison, History, ObservedCarry, ObservedExperts
from oled_jax.offload.plan import PlanLayout
from oled_jax.offload.pool import Pool
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

    spare: spare slots of the pool, None if every page is resident. carrier: its name, if not. uses_cpu: experts may
    be computed on the CPU. gates: they are outputs, too.
    """

    config: ModelConfig
    block_length: int
    spare: int | None
    uses_cpu: bool
    carrier: str = ""
    gates: bool = False


class PassInputs(NamedTuple):
    """One chunk of T positions per row.

    token_mask: False for padding and finished rows, which never route. sequence_length: see `models/rope.py`, of each
    row or of all. iterations: see `Comparison`; None if layer inputs are not compared. routes: experts that take the
    place of the router's choice, for benches that replay a trace through a model of random weights; None: the router
    chooses.
    """

    tokens: Int32[Array, "B T"]
    starts: Int32[Array, " B"]
    token_mask: Bool[Array, "B T"]
    sequence_length: Int32[Array, "*B"]
    manager: Int32[Array, ""]
    iterations: Int32[Array, " B"] | None = None
    routes: Int32[Array, "L N K"] | None = None

    @classmethod
    def of(cls, **arrays: Any) -> "PassInputs":
        """From NumPy arrays: the dispatch of a program copies them to the device faster than one by one before it."""
        return cls(**arrays)


class PassOutputs(NamedTuple):
    """What a pass leaves besides pool and cache.

    routes: expert ids per MoE layer; empty unless every page is resident (else the manager has seen them).
    gates: the same for gates; empty unless `PassSpec.gates`. history, cosine: of `observed.compare`; empty if layer
    inputs are not compared.
    """

    hidden: Array
    routes: tuple[Int[Array, "N K"], ...]
    gates: tuple[Float32[Array, "N K"], ...]
    history: History
    cosine: tuple[Float32[Array, " G"], ...]


@functools.partial(jax.jit, static_argnames="spec", donate_argnames=("pool", "cache", "history"))
def forward_pass(
    spec: PassSpec,
    trunk: nnx.State[Any, Any],
    store: Sequence[Pool],
    pool: Pool,
    cache: KVCache,
    inputs: PassInputs,
    history: History = (),
) -> tuple[Pool, KVCache, PassOutputs]:
    """One pass through the trunk. Pool, cache and history are donated and updated in place.

    Args:
      trunk: the model's NNX state.
      store: pages of each MoE layer in host memory; empty if every page is resident.
      history: earlier layer inputs, if `inputs.iterations` says how to compare them.

    Returns:
      pool, cache, and the rest, with the hidden states [B, T, D] after the final norm.
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
        carrier = make_carrier(spec.carrier, inputs.manager, store, uses_cpu=spec.uses_cpu)
        layout = PlanLayout(items=items, spare=spec.spare)
        experts = OffloadedExperts(carrier, layout)
    if inputs.routes is not None:
        experts = ReplayedExperts(experts, inputs.routes)
    comparison = None
    if inputs.iterations is not None:
        comparison = Comparison(history, inputs.iterations, inputs.token_mask)
    observed, carry = ObservedExperts(experts, comparison), ObservedCarry(ExpertCarry.start(pool, items))
    hidden, cache, carry = model(
        inputs.tokens, positions, mask, cache, inputs.starts, observed, carry, inputs.sequence_length
    )
    outputs = PassOutputs(
        hidden=hidden,
        routes=carry.experts.routes,
        gates=carry.gates if spec.gates else (),
        history=carry.history,
        cosine=carry.cosine,
    )
    return carry.experts.pool, cache, outputs


@functools.partial(jax.jit, static_argnames=("config", "sampling"))
def sample(
    config: ModelConfig,
    sampling: Sampling,
    trunk: nnx.State[Any, Any],
    hidden: Array,
    seed: Int32[Array, ""],
    requests: Int32[Array, " B"],
    pass_index: Int32[Array, "*B"],
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
