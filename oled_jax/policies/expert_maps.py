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
    """The mean embedding of the unmasked tokens of every stored pass.

    Without embeddings the mean of one-hot token ids, folded to `HASHED_IDS` entries, takes its place: its
    cosine counts shared tokens. Ids say little across requests, so the search then stays within the current
    one.
    """

    def __init__(self, context: PolicyContext, size: int) -> None:
        self._embedding = context.embedding
        width = HASHED_IDS if self._embedding is None else self._embedding.shape[1]
        self._stored = np.zeros((size, width), np.float32)
        self._request_of = np.full(size, -1)
        self._request = 0
        self._current = np.zeros(width, np.float32)

    def begin_request(self) -> None:
        self._request += 1

    def nearest(
        self, token_ids: Int[np.ndarray, " N"], known: Bool[np.ndarray, " N"], count: int
    ) -> tuple[int, float] | None:
        """The place among the first `count` of greatest cosine with these tokens, and that cosine."""
        self._current = self._mean(token_ids[known])
        if count == 0 or not self._current.any():
            return None
        cosine = self._stored[:count] @ self._current
        if self._embedding is None:
            cosine[self._request_of[:count] != self._request] = -1.0
        place = int(cosine.argmax())
        return (place, float(cosine[place])) if cosine[place] > -1.0 else None

    def _mean(self, token_ids: Int[np.ndarray, " N"]) -> Float[np.ndarray, " W"]:
        """Scaled to length 1; 0 for no tokens."""
        if self._embedding is None:
            mean = np.bincount(token_ids % HASHED_IDS, minlength=HASHED_IDS).astype(np.float32)
        else:
            mean = self._embedding[token_ids].astype(np.float32).sum(axis=0)
        return mean / max(float(np.sqrt(mean @ mean)), 1e-12)

    def record(self, place: int) -> None:
        """Remembers the tokens of the last search as those of the stored pass `place`."""
        self._stored[place] = self._current
        self._request_of[place] = self._request
