"""What the golden variants do not show of rotary scaling: its dependence on the length, and its options."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oled_jax.config import ModelConfig
from oled_jax.models.registry import config_from_hf
from oled_jax.models.rope import attention_factor, inverse_frequencies, rotary_tables

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}


def config(scaling: dict[str, Any] | None = None, **keys: Any) -> ModelConfig:
    raw = {"model_type": "llada2_moe", "moe_intermediate_size": 8, "head_dim": 32, "rope_scaling": scaling}
    return config_from_hf(raw | {"max_position_embeddings": 64} | keys)


@pytest.mark.parametrize("scaling", [{"rope_type": "dynamic", "factor": 4.0}, LONGROPE])
def test_short_sequences_keep_the_plain_frequencies(scaling: dict[str, Any]) -> None:
    plain = inverse_frequencies(config(), 10)
    stretched = config(scaling)
    np.testing.assert_allclose(inverse_frequencies(stretched, 64), plain, rtol=1e-6)
    assert np.abs(np.asarray(inverse_frequencies(stretched, 65)) - np.asarray(plain)).max() > 1e-4


def test_dynamic_base() -> None:
    actual = inverse_frequencies(config({"rope_type": "dynamic", "factor": 2.0}), 128)
    base = 10000.0 * (2.0 * 128 / 64 - 1.0) ** (16 / 14)
    np.testing.assert_allclose(actual, base ** (-np.arange(0, 16, 2) / 16), rtol=1e-5)


@pytest.mark.parametrize("scaling", [{"rope_type": "dynamic", "factor": 4.0}, LONGROPE])
def test_sequence_length_may_be_traced_and_defaults_to_the_largest_position(scaling: dict[str, Any]) -> None:
    stretched, positions = config(scaling), jnp.asarray([[3, 99, 7]])
    by_default = rotary_tables(stretched, positions)
    given = rotary_tables(stretched, positions, 100)
    traced = jax.jit(lambda length: rotary_tables(stretched, positions, length))(jnp.asarray(100))
    other = rotary_tables(stretched, positions, 4000 if scaling is not LONGROPE else 10)
    for a, b, c, d in zip(by_default, given, traced, other, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
        np.testing.assert_allclose(a, c, atol=1e-4)  # one float32 spacing of a frequency, times position 99
        assert np.abs(np.asarray(a) - np.asarray(d)).max() > 1e-3


@pytest.mark.parametrize("scaling", [None, {"rope_type": "dynamic", "factor": 4.0}, LONGROPE])
def test_the_rows_of_a_batch_have_lengths_of_their_own(scaling: dict[str, Any] | None) -> None:
    positions, lengths = jnp.arange(6).reshape(2, 3), jnp.array([50, 200])
    together = rotary_tables(config(scaling), positions, lengths)
    for row in range(2):
        alone = rotary_tables(config(scaling), positions[row : row + 1], lengths[row])
        for ours, expected in zip(together, alone, strict=True):
            np.testing.assert_allclose(ours[row], expected[0], rtol=1e-6, atol=1e-6)


def test_attention_factors() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert attention_factor(config()) == 1.0
    assert attention_factor(config(yarn)) == pytest.approx(0.1 * math.log(4) + 1)
    assert attention_factor(config(yarn | {"attention_factor": 1.5})) == 1.5
    scales = {"mscale": 2.0, "mscale_all_dim": 1.0}
    assert attention_factor(config(yarn | scales)) == pytest.approx((0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1))
    assert attention_factor(config(LONGROPE)) == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    top_level = config(LONGROPE, original_max_position_embeddings=32)
    assert attention_factor(top_level) == pytest.approx(math.sqrt(1 + math.log(2) / math.log(32)))


def test_unknown_type_never_reaches_the_tables() -> None:
    scaled = config({"rope_type": "linear", "factor": 2.0})
    assert scaled.rope_scaling is not None
    with pytest.raises(ValueError, match="spiral"):
        dataclasses.replace(scaled, rope_scaling=dataclasses.replace(scaled.rope_scaling, rope_type="spiral"))
