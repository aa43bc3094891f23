"""Random weights as a weight source, for benchmarks and tests at any real shape."""

import numpy as np

from oled_jax.config import ModelConfig
from oled_jax.models.random_init import draw_normal, tile_normal
from oled_jax.models.registry import random_trunk


class RandomWeights:
    """Weights drawn from a seed, quick at any size: some million numbers are drawn once and repeated.

    Args:
      config: the model; its dtype is that of the trunk.
      seed: equal seeds give equal weights.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
        self.seed = seed
        self._drawn = draw_normal(np.random.default_rng(seed))

    def read_trunk(self, dtype: np.dtype) -> dict[tuple[str | int, ...], np.ndarray]:
        """The trunk. Raises ValueError for a dtype other than the configuration's."""
        if np.dtype(dtype).name != self.config.dtype:
            raise ValueError(f"the trunk is drawn in {self.config.dtype}, {np.dtype(dtype).name} was asked for")
        return random_trunk(self.config, self.seed)

    def read_pages(self, moe_layer: int, gate_up: np.ndarray, down: np.ndarray) -> None:
        """Fills one layer's pages with numbers of variance 1 / inputs."""
        rng = np.random.default_rng((self.seed, moe_layer))
        for pages in (gate_up, down):
            tile_normal(rng, pages, pages.shape[-1] ** -0.5, self._drawn)

    def check_finite(self) -> None:
        """Drawn numbers are finite."""
