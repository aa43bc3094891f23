"""Rotary position tables and their six scaling types (REFERENCE section 4; those of transformers 4.57).

The tables are a pure function of positions and sequence length. The "dynamic" and "longrope" types choose
frequencies by the length of the whole sequence. The reference keeps that as hidden state; here it is an
argument. Keys in a KV cache carry the frequencies of the pass that wrote them, so a caller with a cache
passes one length (prompt and answer together) to every pass: then cached and fresh keys agree, and a token
does not change its angle as the text grows.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from oled_jax.config import ModelConfig, RopeScaling


def rotary_tables(
    config: ModelConfig, positions: Int[Array, "B T"], sequence_length: int | Int[Array, "*B"] | None = None
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Cosines and sines in float32, half-split layout: columns j and j + R/2 share a frequency.

    Args:
      config: R is its `rotary_dim`.
      positions: absolute positions.
      sequence_length: what "dynamic" and "longrope" choose by, of each row or of all; the largest position + 1
        where not given.
    """
    if sequence_length is None:
        sequence_length = jnp.max(positions) + 1
    frequencies = inverse_frequencies(config, sequence_length)
    if frequencies.ndim == 2:
        frequencies = frequencies[:, None]
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    factor = attention_factor(config)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rotary(
    x: Float[Array, "B T H Hd"], cos: Float[Array, "B T R"], sin: Float[Array, "B T R"]
) -> Float[Array, "B T H Hd"]:
    """Turns the first R dimensions of every head: r·cos + [-b, a]·sin for the halves [a, b] of r.

    The tables come in x's dtype; the products round to it (REFERENCE section 4, attention, step 3).
    """
    R = cos.shape[-1]
    turned, kept = x[..., :R], x[..., R:]
    a, b = jnp.split(turned, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([turned * cos + jnp.concatenate([-b, a], axis=-1) * sin, kept], axis=-1)


def inverse_frequencies(config: ModelConfig, sequence_length: int | Int[Array, "*B"]) -> Float[Array, "*B2 half"]:
    """The R/2 angles per position, float32; of each row where they depend on its length."""
    scaling = config.rope_scaling
    plain = 1.0 / _base_powers(config.rope_theta, config.rotary_dim)
    if scaling is None or scaling.rope_type == "default":
        return jnp.asarray(plain)
    if scaling.rope_type == "linear":
        return jnp.asarray(plain / np.float32(_given(scaling.factor)))
    if scaling.rope_type == "dynamic":
        return _dynamic(config, _given(scaling.factor), sequence_length)
    if scaling.rope_type == "yarn":
        return jnp.asarray(_yarn(config, scaling, plain))
    if scaling.rope_type == "llama3":
        return jnp.asarray(_llama3(scaling, plain))
    if scaling.rope_type == "longrope":
        return _longrope(config, scaling, plain, sequence_length)
    raise RuntimeError(f"no frequencies for the rope type {scaling.rope_type!r}")


def attention_factor(config: ModelConfig) -> float:
    """What cosines and sines are multiplied by: 1 except for "yarn" and "longrope"."""
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.rope_type == "yarn":
        factor = _given(scaling.factor)
        if scaling.mscale and scaling.mscale_all_dim:
            return _yarn_scale(factor, scaling.mscale) / _yarn_scale(factor, scaling.mscale_all_dim)
        return _yarn_scale(factor, 1.0)
    original = config.original_max_position_embeddings
    factor = config.max_position_embeddings / original if original else scaling.factor or 1.0
    if factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(factor) / math.log(original or config.max_position_embeddings))


def _given(value: float | int | None) -> float:
    if value is None:
        raise RuntimeError("a rope_scaling that passed its checks lacks a value that its type needs")
    return float(value)


def _base_powers(theta: float, rotary_dim: int) -> np.ndarray:
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return np.float32(theta) ** exponents


def _dynamic(config: ModelConfig, factor: float, sequence_length: int | Int[Array, "*B"]) -> Float[Array, "*B half"]:
    R, limit = config.rotary_dim, config.max_position_embeddings
    length = jnp.maximum(jnp.asarray(sequence_length, jnp.float32), limit)
    stretch = factor * length / limit - (factor - 1.0)
    base = config.rope_theta * stretch ** (R / (R - 2))
    return 1.0 / base[..., None] ** (jnp.arange(0, R, 2, dtype=jnp.float32) / R)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(config: ModelConfig, scaling: RopeScaling, plain: np.ndarray) -> np.ndarray:
    """Blend of kept and divided frequencies; the ramp runs between the dimensions of two rotation counts."""
    R, theta = config.rotary_dim, config.rope_theta
    original = scaling.original_max_position_embeddings or config.max_position_embeddings

    def dimension(rotations: float) -> float:
        return R * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast or 32.0), dimension(scaling.beta_slow or 1.0)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero; the reference widens it alike
    ramp = np.clip((np.arange(R // 2, dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)
    return plain / np.float32(_given(scaling.factor)) * ramp + plain * (1 - ramp)


def _llama3(scaling: RopeScaling, plain: np.ndarray) -> np.ndarray:
    """Long wavelengths are divided by the factor, short ones kept, a linear blend between."""
    factor, low, high = (
        _given(scaling.factor),
        _given(scaling.low_freq_factor),
        _given(scaling.high_freq_factor),
    )
    original = _given(scaling.original_max_position_embeddings)
    wavelengths = 2 * math.pi / plain
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return ((1 - smooth) * plain / factor + smooth * plain).astype(np.float32)


def _longrope(
    config: ModelConfig, scaling: RopeScaling, plain: np.ndarray, sequence_length: int | Int[Array, "*B"]
) -> Float[Array, "*B half"]:
    """Long factors once the sequence outgrows the original length (only the file's top level sets that)."""
    original = config.original_max_position_embeddings or config.max_position_embeddings
    short = plain / np.asarray(scaling.short_factor, np.float32)
    long = plain / np.asarray(scaling.long_factor, np.float32)
    return jnp.where(jnp.asarray(sequence_length)[..., None] > original, long, short)
