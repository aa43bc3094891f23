"""What a token's identity says about its routes: a bounded table (token, layer) -> experts, learned online."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Float, Int

from oled_jax.policies.learned import COUNT, Limits

RATE = 0.15  # weight of a new occurrence against all before it
WIDTH = 2  # entries per token and layer, in units of K
MOST = 0.98  # no prediction is certain


class TokenTable:
    """Running estimates of how often a token id is routed to an expert, for its WIDTH * K likeliest in each layer.

    A token that is new takes the place of the one not seen for longest.

    Args:
      num_layers, num_experts, top_k: L, E, K.
      tokens: most token ids that are remembered, S. Memory is S * L * WIDTH * K * 6 bytes.
    """

    def __init__(self, *, num_layers: int, num_experts: int, top_k: int, tokens: int) -> None:
        width = min(WIDTH * top_k, num_experts)
        self.num_experts = num_experts
        self.token = np.full(tokens, -1, np.int64)
        self.seen = np.full(tokens, -1, np.int64)
        self.count = np.zeros(tokens, np.int64)
        self.experts = np.zeros((tokens, num_layers, width), np.int16)
        self.weights = np.zeros((tokens, num_layers, width), np.float32)
        self._place: dict[int, int] = {}
        self._clock = 0

    def arrays(self) -> dict[str, np.ndarray]:
        """What it has learned; `restored` is called after somebody has written into them."""
        return {"token": self.token, "seen": self.seen, "count": self.count} | {
            "experts": self.experts,
            "weights": self.weights,
        }

    def limits(self) -> dict[str, Limits]:
        """What `arrays` lie between."""
        found: dict[str, Limits] = dict.fromkeys(("token", "seen"), (-1, COUNT[1]))
        return found | {"count": COUNT, "experts": (0, self.num_experts - 1), "weights": (0, 1)}

    def restored(self) -> None:
        """The arrays hold what another table had learned."""
        self._place = {token: place for place, token in enumerate(self.token.tolist()) if token >= 0}
        self._clock = int(self.seen.max(initial=-1)) + 1

    def learn(self, token_ids: Int[np.ndarray, " n"], expert_ids: Int[np.ndarray, "L n K"]) -> None:
        """Sees the routes of tokens. Of a token that occurs more than once the last one counts."""
        last = {token: index for index, token in enumerate(token_ids.tolist())}
        if len(last) > self.token.size:
            last = dict(list(last.items())[-self.token.size :])
        if not last:
            return
        places = self._places(last)
        self.count[places] += 1
        # The first occurrence counts half: as if a token had been seen before that went elsewhere.
        rates = np.maximum(RATE, 1.0 / (self.count[places] + 1))[:, None, None]
        self._blend(places, expert_ids[:, list(last.values())].transpose(1, 0, 2), rates.astype(np.float32))

    def _places(self, tokens: Iterable[int]) -> Int[np.ndarray, " n"]:
        """The tokens' places, new ones included. They count as seen now."""
        self._clock += 1
        known = [(token, self._place.get(token)) for token in tokens]
        self.seen[[place for _, place in known if place is not None]] = self._clock  # before any of them could leave
        return np.array([self._enter(token) if place is None else place for token, place in known], np.int64)

    def _enter(self, token: int) -> int:
        place = len(self._place) if len(self._place) < self.token.size else int(self.seen.argmin())
        self._place.pop(int(self.token[place]), None)
        self._place[token] = place
        self.token[place], self.seen[place], self.count[place] = token, self._clock, 0
        self.weights[place] = 0.0
        return place

    def _blend(
        self, places: Int[np.ndarray, " n"], new: Int[np.ndarray, "n L K"], rates: Float[np.ndarray, "n 1 1"]
    ) -> None:
        """Weights move towards 1 for the experts in `new` and towards 0 for the others; the least ones make room."""
        experts, weights = self.experts[places], self.weights[places]
        same = (experts[..., None] == new[:, :, None, :]) & (weights > 0)[..., None]
        matched = same.any(3)
        weights += rates * (matched - weights)
        unmatched = ~same.any(2)
        i, j, k = np.nonzero(unmatched)
        if i.size:
            rank = (unmatched.cumsum(2) - 1)[i, j, k]
            worst = np.argsort(weights + 2.0 * matched, axis=2)[i, j, rank]
            experts[i, j, worst] = new[i, j, k]
            weights[i, j, worst] = rates[i, 0, 0]
        self.experts[places], self.weights[places] = experts, weights

    def knows(self, token_ids: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Which of the tokens have an entry."""
        return np.array([token in self._place for token in token_ids.tolist()], bool)

    def likeliest(self, token_id: int, width: int) -> Int[np.ndarray, "L w"]:
        """The experts of greatest weight in each layer, in that order; -1 where fewer are known."""
        place = self._place.get(token_id)
        if place is None:
            return np.full((self.experts.shape[1], width), -1)
        order = np.argsort(-self.weights[place], axis=1, kind="stable")[:, :width]
        known = np.take_along_axis(self.weights[place], order, 1) > 0
        return np.where(known, np.take_along_axis(self.experts[place], order, 1), -1).astype(np.int64)

    def occurrences(self, token_id: int) -> int:
        """How often it has learned the token's routes."""
        place = self._place.get(token_id)
        return 0 if place is None else int(self.count[place])

    def log_absent(self, token_ids: Int[np.ndarray, " n"]) -> Float[np.ndarray, "L E"]:
        """Logarithm of the chance that none of the tokens is routed to an expert. All of them have an entry."""
        L, E = self.experts.shape[1], self.num_experts
        places = [self._place[token] for token in token_ids.tolist()]
        cells = self.experts[places] + (np.arange(L) * E)[:, None]
        logs = np.log1p(-np.minimum(self.weights[places], MOST).astype(np.float64))
        return np.bincount(cells.ravel(), logs.ravel(), L * E).reshape(L, E)
