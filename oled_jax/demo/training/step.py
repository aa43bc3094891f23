"""One training step: noise, loss, gradient, AdamW, and the router's bias. Pure and jitted; the loop is `loop.py`.

Weights are float32 and cast to the model's dtype for the pass; the router works in float32 (`routing.py`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from oled_jax.config import ModelConfig
from oled_jax.demo.training.experts import GroupedExperts
from oled_jax.demo.training.forward import Layout, block_numbers, forward
from oled_jax.demo.training.rows import ANSWER, FAMILY_NUMBER, PADDING, PROMPT, Rows
from oled_jax.demo.training.vocabulary import MASK_ID
from oled_jax.models.llada2 import LLaDA2
from oled_jax.models.registry import StatePath, assemble, family_named

Params = dict[str, Array]
BIAS = "expert_bias"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What does not change during training.

    config: the model, in the dtype of the passes. padding_weight: of eos after the first, in the loss.
    least_noise: the loss of a block with noise t weighs 1 / max(t, least_noise). full_noise: share of blocks
    that are masked entirely, as every block is when decoding begins.
    """

    config: ModelConfig
    block_length: int
    padding_weight: float = 0.1
    least_noise: float = 1 / 3
    full_noise: float = 1 / 6
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    beta2: float = 0.98


class Batch(NamedTuple):
    """`rows.Rows` on the device."""

    tokens: Int[Array, "R T"]
    part: Int[Array, "R T"]
    segment: Int[Array, "R blocks"]
    family: Int[Array, "R blocks"]

    @classmethod
    def of(cls, rows: Rows) -> "Batch":
        """Transfers the narrow integers and widens them there."""
        return cls(*(jnp.asarray(array).astype(jnp.int32) for array in rows))


class TrainState(NamedTuple):
    """params: float32, see `parameter_shapes`. bias: the routers' [L, E]. moments: of the optimiser."""

    params: Params
    bias: Float[Array, "L E"]
    moments: Any
    step: Int[Array, ""]


class Metrics(NamedTuple):
    """Of one batch, over masked answer positions: cross entropy and share of right tokens by family, their
    number, the loss that was minimised, and the greatest load of an expert over the mean load."""

    loss: Float[Array, ""]
    entropy: Float[Array, " families"]
    right: Float[Array, " families"]
    counted: Int[Array, " families"]
    imbalance: Float[Array, ""]
    gradient_norm: Float[Array, ""]


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every trained array: trunk tensors by their Hugging Face names, and the experts of each MoE layer
    as `experts.N.gate_up` [E, 2F, D] and `experts.N.down` [E, D, F]."""
    E, D, F = config.num_experts, config.hidden_size, config.moe_intermediate_size
    tensors = family_named(config.family).trunk_tensors(config)
    shapes = {tensor.name: tensor.shape for tensor in tensors if not tensor.name.endswith(BIAS)}
    for layer in range(config.num_moe_layers):
        shapes[f"experts.{layer}.gate_up"] = (E, 2 * F, D)
        shapes[f"experts.{layer}.down"] = (E, D, F)
    return shapes


def init_params(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Normal numbers of deviation 0.5 / sqrt(inputs), less for what adds to the residual stream; norms are 1."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 1:
            params[name] = np.ones(shape, np.float32)
            continue
        deviation = 0.05 if "word_embeddings" in name else 0.5 * shape[-1] ** -0.5
        if name.endswith(("down", "down_proj.weight", "dense.weight")):
            deviation /= (2 * config.num_hidden_layers) ** 0.5
        params[name] = rng.normal(0.0, deviation, shape).astype(np.float32)
    return params


def optimiser(settings: StepSettings) -> optax.GradientTransformation:
    """AdamW without its learning rate, which is an operand of the step. Norm weights do not decay."""

    def decays(params: Params) -> dict[str, bool]:
        return {name: value.ndim > 1 for name, value in params.items()}

    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.scale_by_adam(b1=0.9, b2=settings.beta2),
        optax.add_decayed_weights(settings.weight_decay, mask=decays),
    )


def new_state(settings: StepSettings, params: dict[str, np.ndarray], bias: np.ndarray | None = None) -> TrainState:
    """A state at step 0 with fresh moments."""
    config = settings.config
    arrays = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    zeros = np.zeros((config.num_moe_layers, config.num_experts), np.float32)
    return TrainState(
        params=arrays,
        bias=jnp.asarray(zeros if bias is None else bias, jnp.float32),
        moments=optimiser(settings).init(arrays),
        step=jnp.zeros((), jnp.int32),
    )


def build_model(config: ModelConfig, params: Params, bias: Float[Array, "L E"]) -> tuple[LLaDA2, GroupedExperts]:
    """The modules of inference over these weights, cast to the model's dtype, and the experts."""
    dtype = jnp.dtype(config.dtype)
    family = family_named(config.family)
    moe_layer = {layer: number for number, layer in enumerate(family.moe_layers(config))}
    arrays: dict[StatePath, Any] = {}
    for tensor in family.trunk_tensors(config):
        is_bias = tensor.name.endswith(BIAS)
        arrays[tensor.path] = bias[moe_layer[int(tensor.path[1])]] if is_bias else params[tensor.name].astype(dtype)
    layers = range(config.num_moe_layers)
    experts = GroupedExperts(
        gate_up=tuple(params[f"experts.{layer}.gate_up"].astype(dtype) for layer in layers),
        down=tuple(params[f"experts.{layer}.down"].astype(dtype) for layer in layers),
    )
    graphdef, trunk = assemble(config, arrays)
    return nnx.merge(graphdef, trunk), experts


def add_noise(
    key: Array, rows: Batch, settings: StepSettings
) -> tuple[Int[Array, "R T"], Bool[Array, "R T"], Float[Array, "R T"]]:
    """The noisy copy, which positions were masked, and each position's noise t.

    Every block has a t of its own, uniform but for the share `full_noise` at 1; prompts are never masked.
    """
    for_level, for_mask = jax.random.split(key)
    level = jax.random.uniform(for_level, rows.segment.shape) / (1 - settings.full_noise)
    noise = jnp.repeat(jnp.minimum(level, 1.0), settings.block_length, axis=1)
    drawn = jax.random.uniform(for_mask, rows.tokens.shape) < noise
    masked = drawn & (rows.part != PROMPT)
    return jnp.where(masked, MASK_ID, rows.tokens), masked, noise


def loss_fn(
    params: Params, bias: Float[Array, "L E"], rows: Batch, key: Array, settings: StepSettings
) -> tuple[Float[Array, ""], tuple[Metrics, Int[Array, "L E"]]]:
    """Weighted cross entropy of masked answer positions, per answer position; metrics and expert loads."""
    model, experts = build_model(settings.config, params, bias)
    noisy, masked, noise = add_noise(key, rows, settings)
    layout = Layout(
        block=block_numbers(rows.segment),
        segment=rows.segment,
        block_length=settings.block_length,
    )
    targets = rows.tokens
    hidden, loads = forward(model, experts, noisy, targets, layout)
    logits = model.logits(hidden)
    # A product with a one-hot instead of a gather: its gradient then is one, too, not a scatter.
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    entropy = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    weight = jnp.where(rows.part == ANSWER, 1.0, jnp.where(rows.part == PADDING, settings.padding_weight, 0.0))
    weight = weight * masked / jnp.maximum(noise, settings.least_noise)
    loss = jnp.sum(weight * entropy) / jnp.maximum(jnp.sum(rows.part == ANSWER), 1)
    right = jnp.argmax(logits, axis=-1) == targets
    metrics = _metrics(loss, entropy, right, masked & (rows.part == ANSWER), rows, loads, settings)
    return loss, (metrics, loads)


def _metrics(
    loss: Float[Array, ""],
    entropy: Float[Array, "R T"],
    right: Bool[Array, "R T"],
    counted: Bool[Array, "R T"],
    rows: Batch,
    loads: Int[Array, "L E"],
    settings: StepSettings,
) -> Metrics:
    family = jnp.repeat(rows.family, settings.block_length, axis=1)
    member = counted & (family == jnp.arange(len(FAMILY_NUMBER))[:, None, None])
    count = jnp.sum(member, axis=(1, 2))
    shares = loads / jnp.mean(loads, axis=1, keepdims=True)
    return Metrics(
        loss=loss,
        entropy=jnp.sum(jnp.where(member, entropy, 0.0), axis=(1, 2)) / jnp.maximum(count, 1),
        right=jnp.sum(member & right, axis=(1, 2)) / jnp.maximum(count, 1),
        counted=count,
        imbalance=jnp.max(shares),
        gradient_norm=jnp.zeros(()),
    )


@functools.partial(jax.jit, static_argnames="settings", donate_argnames="state")
def train_step(
    state: TrainState,
    rows: Batch,
    key: Array,
    learning_rate: Float[Array, ""],
    bias_rate: Float[Array, ""],
    settings: StepSettings,
) -> tuple[TrainState, Metrics]:
    """One update. The bias of an expert rises by `bias_rate` if its load was below the mean, else it falls
    (balance without an auxiliary loss). `key` is folded with the step's number."""
    key = jax.random.fold_in(key, state.step)
    gradient_of = jax.value_and_grad(loss_fn, has_aux=True)
    (_, (metrics, loads)), gradient = gradient_of(state.params, state.bias, rows, key, settings)
    direction, moments = optimiser(settings).update(gradient, state.moments, state.params)
    params = {name: value - learning_rate * direction[name] for name, value in state.params.items()}
    bias = state.bias + bias_rate * jnp.sign(jnp.mean(loads, axis=1, keepdims=True) - loads)
    metrics = metrics._replace(gradient_norm=optax.tree.norm(gradient))
    return TrainState(params, bias, moments, state.step + 1), metrics
