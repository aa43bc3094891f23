"""How far a prediction can be trusted for the pages that are missing: measured, before anything is fetched by it."""

import numpy as np
from jaxtyping import Bool, Float

from oled_jax.policies.learned import FINITE, TINY, Limits, forget

CLAIMS = np.array([0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97])  # where a group of predicted chances begins
FORGET = 0.995  # weight of the past, per pass
DOUBT = 10.0  # missing pages of each group that count as not used, before any was seen


class MissingCertainty:
    """Share of the missing pages with about this predicted chance that the next pass activated.

    Missing pages are a biased choice: what the ranking knows well is resident, so a chance that holds over all pages
    is too high for these. Missing pages count whether or not somebody fetches them. Predictions of a block's first pass
    are groups of their own.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.used = np.zeros(2 * CLAIMS.size)
        self.seen = np.full(2 * CLAIMS.size, DOUBT)
        self._pages: tuple[np.ndarray, ...] = (np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._groups = np.zeros(0, np.int64)

    def arrays(self) -> dict[str, np.ndarray]:
        """What it has learned."""
        return {"certainty_used": self.used, "certainty_seen": self.seen}

    def limits(self) -> dict[str, Limits]:
        """What `arrays` lie between."""
        return {"certainty_used": (0, FINITE), "certainty_seen": (TINY, FINITE)}

    def restored(self) -> None:
        """The arrays hold what another had learned."""

    def measured(
        self,
        activated: Bool[np.ndarray, "L E"],
        likely: Float[np.ndarray, "L E"],
        missing: Bool[np.ndarray, "L E"],
        *,
        opening: bool,
    ) -> Float[np.ndarray, "L E"]:
        """A pass is over: takes what it activated, and gives chances for the next one, 0 where none is worth naming.

        Args:
          likely: predicted for the next pass.
          missing: not resident now.
          opening: a block's first pass is next.
        """
        forget(self.used, self.seen, FORGET)
        size = self.used.size
        self.used += np.bincount(self._groups, activated[self._pages], size)
        self.seen += np.bincount(self._groups, minlength=size)
        self._pages = np.nonzero(missing & (likely >= CLAIMS[0]))
        self._groups = np.searchsorted(CLAIMS, likely[self._pages], side="right") - 1 + opening * CLAIMS.size
        chances = np.zeros(likely.shape)
        chances[self._pages] = (self.used / self.seen)[self._groups]
        return chances
