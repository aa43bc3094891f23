"""The jitted programs: one forward pass over a batch of chunks, and moves of pages between passes.

Pure functions of arrays. Static arguments are small frozen values, so engines of the same shape share programs; the
cache manager is reached through a handle that is an operand.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from oled_jax.config import DecodingConfig, ModelConfig
from oled_jax.decode.sampling import entropy, predict, row_keys
from oled_jax.models.kv_cache import KVCache
from oled_jax.models.layers import head_logits
from oled_jax.models.moe import Experts
from oled_jax.models.registry import family_named
from oled_jax.models.trunk import block_mask, full_mask
from oled_jax.offload.carriers.registry import make_carrier
from oled_jax.offload.layer import ExpertCarry, OffloadedExperts, ReplayedExperts, ResidentExperts
from oled_jax.offload.observed import Comparison, History, ObservedCarry, ObservedExperts
from oled_jax.offload.plan import PlanLayout
from oled_jax.offload.pool import Pool
from oled_jax.ops.grouping import ItemShape
from oled_jax.ops.own_blocks import own_blocks

# The leaves of the trunk's NNX state. A program's call flattens its arguments: that takes 0.9 ms for a state and 0.1 ms
# for a tuple of its 221 arrays (LLaDA2.0-mini's trunk, one x86-64 core).
TrunkArrays = tuple[Array, ...]
HEAD_POSITIONS = 64  # of a whole text that the head works on at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """What `decode.sampling.predict` needs to know when the program is compiled.

    entropy: of every position, too. shifted: position i of the logits is about the token of position i + 1.
    """

    mask_id: int
    temperature: float
    top_k: int | None
    top_p: float | None
    editing: bool
    entropy: bool = False
    shifted: bool = False

    @classmethod
    def of(cls, config: ModelConfig, decoding: DecodingConfig) -> "Sampling":
        """What a run with these settings needs."""
        return cls(
            mask_id=decoding.mask_id,
            temperature=decoding.temperature,
            top_k=decoding.top_k,
            top_p=decoding.top_p,
            editing=decoding.editing or decoding.whole_text,  # RND1 compares logits, too
            entropy=decoding.whole_text,
            shifted=config.shifted_logits,
        )


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
    row or of all. iterations, folds: see `Comparison`; None if layer inputs are not compared. routes: experts that
    take the place of the router's choice, for benches that replay a trace through a model of random weights; None: the
    router chooses.
    """

    tokens: Int32[Array, "B T"]
    starts: Int32[Array, " B"]
    token_mask: Bool[Array, "B T"]
    sequence_length: Int32[Array, "*B"]
    manager: Int32[Array, ""]
    iterations: Int32[Array, " B"] | None = None
    folds: Bool[Array, " B"] | None = None
    routes: Int32[Array, "L N K"] | None = None

    @classmethod
    def of(cls, **arrays: Any) -> "PassInputs":
        """From NumPy arrays, which are what they are until a program has them (`Packed`)."""
        return cls(**arrays)


class SampleInputs(NamedTuple):
    """What `sample` needs besides hidden states.

    seed, requests, pass_index: of the random keys (`decode.sampling.row_keys`); the seed as its 32 bits. folds: of a
    pass over two blocks; the tokens are those of `own_blocks`.
    """

    seed: Int32[Array, ""]
    requests: Int32[Array, " B"]
    pass_index: Int32[Array, "*B"]
    folds: Bool[Array, " B"] | None = None

    @classmethod
    def of(cls, **arrays: Any) -> "SampleInputs":
        """As `PassInputs.of`."""
        return cls(**arrays)


Inputs = TypeVar("Inputs", PassInputs, SampleInputs)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["numbers"], meta_fields=["kind", "shapes"])
@dataclasses.dataclass(frozen=True)
class Packed(Generic[Inputs]):
    """A program's inputs as one array: each array that a call brings to the device takes it 20 to 90 us.

    numbers: [n] int32, NumPy's until the call. shapes: and whether they are booleans, by field of `kind`; None where
    there is none.
    """

    numbers: Any
    kind: type[Inputs]
    shapes: tuple[tuple[tuple[int, ...], bool] | None, ...]

    @classmethod
    def of(cls, inputs: Inputs) -> "Packed[Inputs]":
        """From NumPy arrays of int32 and bool. Raises TypeError for others, whose numbers might not fit."""
        arrays = [None if value is None else np.asarray(value) for value in inputs]
        for name, array in zip(inputs._fields, arrays, strict=True):
            if array is not None and array.dtype not in (np.int32, np.bool_):
                raise TypeError(f"{type(inputs).__name__}.{name} is {array.dtype}, not int32 or bool")
        shapes = tuple(None if array is None else (array.shape, array.dtype == bool) for array in arrays)
        numbers = np.concatenate([array.ravel() for array in arrays if array is not None], dtype=np.int32)
        return cls(numbers, type(inputs), shapes)

    def unpack(self) -> Inputs:
        """The arrays again, inside a program."""
        values: list[Any] = []
        start = 0
        for field in self.shapes:
            if field is None:
                values.append(None)
                continue
            shape, is_boolean = field
            end = start + math.prod(shape)
            value = self.numbers[start:end].reshape(shape)
            values.append(value != 0 if is_boolean else value)
            start = end
        return self.kind(*values)


class PassOutputs(NamedTuple):
    """What a pass leaves besides pool and cache.

    hidden: after the final norm; the next pass of this size writes over it. routes: expert ids; None unless every page
    is resident (else the manager has seen them). gates: theirs; None unless `PassSpec.gates`. history, cosine: of
    `observed.compare`; empty and None if layer inputs are not compared.
    What the host reads is one array for all layers: each array that it reads takes a quarter of a millisecond.
    """

    hidden: Float[Array, "B T D"]
    routes: Int[Array, "L N K"] | None
    gates: Float32[Array, "L N K"] | None
    history: History
    cosine: Float32[Array, "L G"] | None


def _forward_pass(
    spec: PassSpec,
    trunk: TrunkArrays,
    store: Sequence[Pool],
    pool: Pool,
    cache: KVCache | None,
    inputs: Packed[PassInputs],
    scratch: Float[Array, "B W D"],
    history: History = (),
) -> tuple[Pool, KVCache | None, PassOutputs]:
    """One pass through the trunk. Pool, cache, scratch and history are donated and updated in place.

    What stays where it was need not be patched in the CUDA graphs that XLA launches, and a graph that is not patched is
    launched four times as fast.

    Args:
      trunk: of `trunk_arrays`.
      store: pages of each MoE layer in host memory; empty if every page is resident.
      cache: None if attention goes both ways over the chunk, which then is the whole text.
      scratch: where the hidden states go, those of an earlier pass.
      history: earlier layer inputs, if `inputs.iterations` says how to compare them.

    Returns:
      pool, cache, and the rest.
    """
    del scratch  # hidden states are the only output of its shape
    given, config = inputs.unpack(), spec.config
    model = merge_trunk(config, trunk)
    B, T = given.tokens.shape
    positions = given.starts[:, None] + jnp.arange(T, dtype=jnp.int32)
    L = spec.block_length
    mask = full_mask(given.token_mask) if cache is None else block_mask(positions, cache.capacity, L)
    items = ItemShape(num_tokens=B * T, top_k=config.num_experts_per_tok, num_experts=config.num_experts)
    experts: Experts
    if spec.spare is None:
        experts = ResidentExperts(items, given.token_mask.ravel())
    else:
        carrier = make_carrier(spec.carrier, given.manager, store, uses_cpu=spec.uses_cpu)
        layout = PlanLayout(items=items, spare=spec.spare)
        experts = OffloadedExperts(carrier, layout)
    if given.routes is not None:
        experts = ReplayedExperts(experts, given.routes)
    comparison = None
    if given.iterations is not None:
        comparison = Comparison(history, given.iterations, given.token_mask, given.folds)
    observed, carry = ObservedExperts(experts, comparison), ObservedCarry(ExpertCarry.start(pool, items))
    hidden, cache, carry = model(
        given.tokens, positions, mask, cache, given.starts, observed, carry, given.sequence_length
    )
    outputs = PassOutputs(
        hidden=hidden,
        routes=_by_layer(carry.experts.routes),
        gates=_by_layer(carry.gates) if spec.gates else None,
        history=carry.history,
        cosine=_by_layer(carry.cosine),
    )
    return carry.experts.pool, cache, outputs


_jitted = functools.partial(
    jax.jit,
    static_argnames="spec",
    donate_argnames=("pool", "cache", "scratch", "history"),
    keep_unused=True,  # nothing reads `scratch`
)
forward_pass = _jitted(_forward_pass)
# The same with every page resident, where nothing calls out to the host. Then XLA would make one CUDA graph of the
# whole pass, and the device would wait until all of it is launched. Without Pallas kernels in graphs there are some for
# each layer, which run while the next are launched (docs/performance-notes.md).
resident_pass = _jitted(_forward_pass, compiler_options={"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT"})


def _by_layer(arrays: Sequence[Array]) -> Array | None:
    return to_host(jnp.stack(arrays)) if arrays else None


def to_host(array: Array) -> Array:
    """The array in the host's pinned memory: brought there by the program, it is read 0.2 ms sooner (H200)."""
    return jax.device_put(array, jax.memory.Space.Host) if jax.default_backend() == "gpu" else array


# The autotuner would allocate the head once more while it compiles, 0.65 GB of LLaDA2.0-mini's, beside a pool that may
# fill the device. What it finds saves less than 0.1 of a pass's 10 ms (docs/performance-notes.md).
SMALL_COMPILATION = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


@functools.partial(jax.jit, static_argnames="sampling", compiler_options=SMALL_COMPILATION)
def sample(
    sampling: Sampling, head: Float[Array, "V D"], hidden: Float[Array, "B T D"], inputs: Packed[SampleInputs]
) -> Int32[Array, "R B _"]:
    """The head, and one token with its confidence per position.

    A program of its own: prefill and commit passes go without, and `forward_pass` is not compiled for every sampling.

    Args:
      head: of `trunk_head`.
      hidden: of `forward_pass`.

    Returns:
      tokens, the bits of their float32 confidence and, if asked for, those of the entropies: one array, since each one
      that is brought to the host takes a quarter of a millisecond.
    """
    given = inputs.unpack()
    keys = None
    if sampling.temperature > 0:
        seed = jax.lax.bitcast_convert_type(given.seed, jnp.uint32)
        keys = row_keys(seed, given.requests, given.pass_index)
    hidden = own_blocks(given.folds, hidden)
    if sampling.shifted:
        # Position 0 has no position before it; its token is always given.
        hidden = jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1)
    if not sampling.entropy:
        return to_host(_sample_part(sampling, head, hidden, keys))
    B, T, D = hidden.shape
    parts = hidden.reshape(B, -1, HEAD_POSITIONS, D).swapaxes(0, 1)

    def of_part(numbered: tuple[Array, Array]) -> Array:
        number, part = numbered
        own = None if keys is None else jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, number)
        return _sample_part(sampling, head, part, own)

    # One part after the other: the logits of a whole text would take more memory than its layers.
    sampled = jax.lax.map(of_part, (jnp.arange(T // HEAD_POSITIONS), parts))
    return to_host(jnp.moveaxis(sampled, 0, 2).reshape(-1, B, T))


def _sample_part(
    sampling: Sampling, head: Float[Array, "V D"], hidden: Float[Array, "B T D"], keys: Array | None
) -> Int32[Array, "R B T"]:
    logits = head_logits(hidden, head)
    settings = dataclasses.asdict(sampling)
    del settings["entropy"], settings["shifted"]
    tokens, *figures = predict(logits, keys, **settings)
    if sampling.entropy:
        figures.append(entropy(logits, sampling.temperature))
    return jnp.stack([tokens, *(jax.lax.bitcast_convert_type(values, jnp.int32) for values in figures)])


def unpack_sample(packed: jax.Array) -> tuple[np.ndarray, ...]:
    """Tokens, confidence and, if asked for, entropies [B, T] of what `sample` returned, on the host."""
    tokens, *figures = np.asarray(packed)
    return tokens, *(values.view(np.float32) for values in figures)


@functools.partial(jax.jit, donate_argnames="pool")
def fill_pool(
    pool: Pool, gate_up: Float[Array, "E G D"], down: Float[Array, "E D F"], first_slot: Int32[Array, ""]
) -> Pool:
    """Writes all pages of a layer to consecutive slots (a pool that holds every page)."""
    return Pool(
        jax.lax.dynamic_update_slice_in_dim(pool.gate_up, gate_up, first_slot, 0),
        jax.lax.dynamic_update_slice_in_dim(pool.down, down, first_slot, 0),
    )


def trunk_arrays(state: nnx.State[Any, Any]) -> TrunkArrays:
    """The leaves of a trunk's state, as the programs take them."""
    return tuple(jax.tree.leaves(state))


def trunk_head(config: ModelConfig, trunk: TrunkArrays) -> Float[Array, "V D"]:
    """The weight of the head among the trunk's arrays."""
    return merge_trunk(config, trunk).head_weight


def merge_trunk(config: ModelConfig, trunk: TrunkArrays) -> Any:
    """The module again."""
    definition, structure = _trunk_structure(config)
    return nnx.merge(definition, jax.tree.unflatten(structure, trunk))


@functools.lru_cache(maxsize=8)
def _trunk_structure(config: ModelConfig) -> tuple[nnx.GraphDef, Any]:
    """The trunk's static parts. Cached: building them walks all modules."""
    definition, state = nnx.split(nnx.eval_shape(lambda: family_named(config.family).build(config)))
    return definition, jax.tree.structure(state)
