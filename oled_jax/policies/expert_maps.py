"""What FineMoE remembers of earlier passes: expert maps, searched by trajectory, and their tokens."""

import numpy as np
from jaxtyping import Bool, Float, Int

from oled_jax.policies.base import PolicyContext

HASHED_IDS = 4096


class MapStore:
    """Expert maps [L, E] of earlier passes, and a search that advances with the layers of this one."""

    def __init__(self, context: PolicyContext, size: int) -> None:
        self.size = size
        self.count = 0
        # Layer first: one layer of all maps is one contiguous matrix-vector product.
        self.maps = np.zeros((context.num_layers, size, context.num_experts), np.float32)
        self._squares = np.zeros((context.num_layers, size), np.float32)
        self._products = np.zeros(0, np.float32)
        self._own_square = 0.0
        self._nearest = -1

    def nearest(self, layer: int, row: Float[np.ndarray, " E"]) -> tuple[int, float] | None:
        """The stored map whose layers <= `layer` have the greatest cosine with those of this pass, and that
        cosine.

        Call it once per layer, in order; `row` is the layer of this pass's map.
        """
        if layer == 0:
            self._products = np.zeros(self.count, np.float32)
            self._own_square = 0.0
        if self.count == 0:
            return None
        self._products += self.maps[layer, : self.count] @ row
        self._own_square += float(row @ row)
        cosine = self._products / np.sqrt(self._squares[layer, : self.count] * self._own_square + 1e-12)
        self._nearest = int(cosine.argmax())
        return self._nearest, float(cosine[self._nearest])

    def add(self, new: Float[np.ndarray, "L E"]) -> int:
        """Appends this pass's map, or replaces the one most similar to it. Returns its place."""
        if self.count < self.size:
            place = self.count
            self.count += 1
        else:
            place = self._nearest
        self.maps[:, place] = new
        self._squares[:, place] = np.cumsum((new * new).sum(axis=1))
        return place


class TokenMeaning:
    """The written tokens of every stored pass: the mean of their one-hot ids, folded to `HASHED_IDS` entries.

    Its cosine counts shared tokens. It stands for the mean of their embeddings: a replay has no weights, and ids say
    nearly as much (docs/policies/finemoe.md).
    """

    def __init__(self, size: int) -> None:
        self._stored = np.zeros((size, HASHED_IDS), np.float32)
        self._current = np.zeros(HASHED_IDS, np.float32)

    def nearest(
        self, token_ids: Int[np.ndarray, " N"], known: Bool[np.ndarray, " N"], count: int
    ) -> tuple[int, float] | None:
        """The place among the first `count` of greatest cosine with these tokens, and that cosine."""
        self._current = _mean(token_ids[known])
        occurring = self._current.nonzero()[0]  # a few of the entries
        if count == 0 or occurring.size == 0:
            return None
        cosine = self._stored[:count, occurring] @ self._current[occurring]
        place = int(cosine.argmax())
        return place, float(cosine[place])

    def record(self, place: int) -> None:
        """Remembers the tokens of the last search as those of the stored pass `place`."""
        self._stored[place] = self._current


def _mean(token_ids: Int[np.ndarray, " N"]) -> Float[np.ndarray, " W"]:
    """Scaled to length 1; 0 for no tokens."""
    mean = np.bincount(token_ids % HASHED_IDS, minlength=HASHED_IDS).astype(np.float32)
    return mean / max(float(np.sqrt(mean @ mean)), 1e-12)
