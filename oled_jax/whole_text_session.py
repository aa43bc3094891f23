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
      kept: must be None, there is nothing to keep.
    """

    def __init__(
        self,
        engine: "Engine",
        prompts: Sequence[Sequence[int]],
        decoding: DecodingConfig,
        places: int,
        kept: KeptPrefix | None = None,
    ) -> None:
        if kept is not None:
            raise ValueError("a whole text leaves no keys and values that could be kept")
        self._ends = np.array(text_lengths([len(prompt) for prompt in prompts], decoding))
        super().__init__(engine, prompts, decoding, places)

    def _first_cache(self, lengths: Sequence[int], places: int) -> KVCache | None:
        return None

    def _real(self, active: Bool[np.ndarray, " B"], width: int) -> Bool[np.ndarray, "B T"]:
        """The texts of rows that are not finished, without what a shorter one has behind it."""
        return super()._real(active, width) & (np.arange(width) < self._ends[self._request][:, None])
