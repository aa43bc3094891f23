"""Random weights: distribution, dtype, and that equal seeds and only they give equal weights."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import model_config

from oled_jax.models.random_init import DRAWN, draw_normal, tile_normal
from oled_jax.random_weights import RandomWeights

CONFIG = model_config("bfloat16")


def pages(seed, layer, dtype="bfloat16"):
    E, F, D = CONFIG.num_experts, CONFIG.moe_intermediate_size, CONFIG.hidden_size
    gate_up, down = np.empty((E, 2 * F, D), jnp.dtype(dtype)), np.empty((E, D, F), jnp.dtype(dtype))
    RandomWeights(CONFIG, seed).read_pages(layer, gate_up, down)
    return gate_up.astype(np.float32), down.astype(np.float32)


@pytest.mark.parametrize("size", [5, DRAWN - 1, DRAWN, 3 * DRAWN + 7])
def test_tiles_fill_the_whole_array_with_one_period(size):
    drawn = draw_normal(np.random.default_rng(0))
    array = np.full(size, np.nan, np.float32)
    tile_normal(np.random.default_rng(1), array, 2.0, drawn, mean=0.5)
    offset = int(np.random.default_rng(1).integers(DRAWN))
    np.testing.assert_array_equal(array, 0.5 + 2.0 * drawn[(offset + np.arange(size)) % DRAWN])


def test_an_array_that_cannot_be_filled_in_place_is_refused():
    drawn = draw_normal(np.random.default_rng(0))
    with pytest.raises(ValueError, match="contiguous"):
        tile_normal(np.random.default_rng(1), np.empty((4, 4), np.float32).T[:2], 1.0, drawn)


def test_pages_have_variance_one_over_inputs_and_differ():
    gate_up, down = pages(3, 1)
    assert gate_up.std() == pytest.approx(64**-0.5, rel=0.05)
    assert down.std() == pytest.approx(32**-0.5, rel=0.05)
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_equal_seeds_and_layers_give_equal_pages():
    np.testing.assert_array_equal(pages(3, 1)[0], pages(3, 1)[0])
    assert not np.array_equal(pages(3, 1)[0], pages(3, 2)[0])
    assert not np.array_equal(pages(3, 1)[0], pages(4, 1)[0])


def test_the_trunk_is_drawn_in_the_configurations_dtype():
    trunk = RandomWeights(CONFIG, 0).read_trunk(jnp.dtype("bfloat16"))
    assert {array.dtype.name for array in trunk.values()} == {"bfloat16", "float32"}
    with pytest.raises(ValueError, match="drawn in bfloat16"):
        RandomWeights(CONFIG, 0).read_trunk(jnp.dtype("float32"))
    wide = RandomWeights(dataclasses.replace(CONFIG, dtype="float32"), 0).read_trunk(jnp.dtype("float32"))
    assert {array.dtype.name for array in wide.values()} == {"float32"}
