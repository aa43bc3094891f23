"""A run over whole texts: every pass sees all of them, and nothing is kept between passes but their tokens.

For models whose attention goes both ways (RND1). All else is `session.Session`'s.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from oled_jax.models.kv_cache import KVCache
from oled_jax.session import Session


class WholeTextSession(Session):
    """A `Denoiser` over an engine for one run; `decoding` is that of `decode.whole_text.one_block`."""

    def _memory(self, lengths: Sequence[int], places: int) -> tuple[KVCache | None, int]:
        return None, 0

    def _real(self, active: Bool[np.ndarray, " B"], width: int) -> Bool[np.ndarray, "B T"]:
        """The texts of rows that are not finished, without what a shorter one has behind it.

        A text is prompt, answer and one token more (`decode.whole_text.text_lengths`).
        """
        return super()._real(active, width) & (np.arange(width) <= self._sequence_length[:, None])
