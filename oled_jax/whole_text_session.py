"""A run over whole texts: every pass sees all of them, and nothing is kept between passes but their tokens.

For models whose attention goes both ways (RND1). All else is `session.Session`'s.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool

from oled_jax.config import DecodingConfig
from oled_jax.decode.whole_text import text_lengths
from oled_jax.models.kv_cache import KVCache
from oled_jax.prefix import KeptPrefix
from oled_jax.session import Session

if TYPE_CHECKING:
    from oled_jax.engine import Engine


class WholeTextSession(Session):
    """A `Denoiser` over an engine for one run.

    Args:
      engine: runs the passes; no other session may run meanwhile.
      prompts: token ids of every request.
      decoding: of `decode.whole_text.one_block`.
      places: rows of the batch; requests may be more.
      kept: None, since no keys and values outlive it.
    """

    def __init__(
        self,
        engine: "Engine",
        prompts: Sequence[Sequence[int]],
        decoding: DecodingConfig,
        places: int,
        kept: KeptPrefix | None = None,
    ) -> None:
        self._ends = text_lengths([len(prompt) for prompt in prompts], decoding)
        self._inside = np.zeros((places, decoding.block_length), bool)  # positions of the text in each place
        super().__init__(engine, prompts, decoding, places)

    def enter(self, place: int, request: int) -> None:
        """A request takes a place. See `Denoiser`."""
        self._inside[place] = np.arange(self._inside.shape[1]) < self._ends[request]
        super().enter(place, request)

    def _memory(self, lengths: Sequence[int], places: int) -> tuple[KVCache | None, int]:
        return None, 0

    def _real(self, active: Bool[np.ndarray, " B"], width: int) -> Bool[np.ndarray, "B T"]:
        """The texts of rows that are not finished, without what a shorter one has behind it."""
        return super()._real(active, width) & self._inside
