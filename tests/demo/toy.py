"""A toy model and its training settings, for the tests of the demo folder."""

import jax.numpy as jnp
import numpy as np

from oled_jax.demo.training import sizes
from oled_jax.demo.training.rows import RowShape
from oled_jax.demo.training.step import StepSettings, TrainState, init_params, new_state
from oled_jax.models.registry import config_from_hf

RAW = {**sizes.SMOKE, "dtype": "float32"}
CONFIG = config_from_hf(RAW)
SETTINGS = StepSettings(config=CONFIG, block_length=sizes.BLOCK_LENGTH)
SHAPE = RowShape(length=128, block_length=sizes.BLOCK_LENGTH, chunk=8)  # as the script's --smoke, to share its program


def random_state() -> TrainState:
    """Fresh weights, and a bias that decides between experts."""
    state = new_state(SETTINGS, init_params(CONFIG, 0))
    drawn = np.random.default_rng(1).standard_normal(state.bias.shape, np.float32)
    return state._replace(bias=jnp.asarray(0.05 * drawn))
