"""How soon an expert will be used that the next pass has no reason to use: a value by age and rate, learned online."""

import numpy as np
from jaxtyping import Bool, Float, Int

DISCOUNT = 0.8  # gamma: what waiting one more pass costs
HALF_LIFE = 500  # passes, of the rates
FORGET = 0.999  # weight of the past in the value table, per pass
PRIOR = 5.0  # observations that the first values are worth
OLDEST = 300  # passes; greater ages are one
AGES = np.unique(np.round(1.25 ** np.arange(26)).astype(np.int64))  # where a group of ages begins; below: used just now
RATES = np.array([0.01, 0.02, 0.04, 0.07, 0.11, 0.16, 0.23, 0.32, 0.45, 0.65])
STEPS = 200  # in which rates are looked up
SAMPLE = 1024  # about as many experts teach the value table in a pass


class LastingValue:
    """V = E[gamma^(T - 1)], T passes until an expert's next use, for groups of experts.

    A group is what an expert's age (passes since its last use) and rate (running mean of being activated) have in
    common, over all layers. V is learned by temporal differences: a group's members move it towards 1 where the next
    pass activates them, and towards gamma * V of the group that they are in by then where it does not. Where age alone
    counts this ranks as LRU does, where rate alone counts as LFU does, and the trace decides.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        shape = (num_layers, num_experts)
        self.rate = np.zeros(shape)
        self.passes = np.zeros(1, np.int64)
        first = 0.35 / np.arange(1.0, AGES.size + 2)
        self.sums = np.tile(PRIOR * first[:, None], (1, RATES.size + 1))
        self.weights = np.full(self.sums.shape, PRIOR)
        self._last = np.full(shape, -OLDEST, np.int64)
        self._now = 0
        self._group_of_age = np.searchsorted(AGES, np.arange(OLDEST + 1), side="right")
        self._group_of_rate = np.searchsorted(RATES, np.arange(STEPS + 1) / STEPS)
        self._stride = max(1, num_layers * num_experts // SAMPLE)
        self._groups: Int[np.ndarray, "L E"] | None = None
        self._rate_groups = np.zeros(shape, np.int64)
        self.active = np.zeros(shape)
        self.idle = np.zeros(shape)
        self._prepare()

    def arrays(self) -> dict[str, np.ndarray]:
        """What it has learned; `restored` is called after somebody has written into them."""
        return {"rate": self.rate, "passes": self.passes, "sums": self.sums, "value_weights": self.weights}

    def restored(self) -> None:
        """The arrays hold what another had learned."""
        self._look_up_rates()
        self._prepare()

    def _prepare(self) -> None:
        """Values for the next pass, [L, E]: of experts that it activates, and of those that it does not."""
        values = self.sums / self.weights
        self.active = values[0][self._rate_groups]
        self.idle = values[self._age_groups(), self._rate_groups]

    def _look_up_rates(self) -> None:
        self._rate_groups = self._group_of_rate[(self.rate * STEPS).astype(np.int64)]

    def _age_groups(self) -> Int[np.ndarray, "L E"]:
        return self._group_of_age[np.minimum(self._now - self._last, OLDEST)]

    def end_pass(self, activated: Bool[np.ndarray, "L E"]) -> None:
        """A pass is over."""
        self._last[activated] = self._now
        self.passes += 1
        pace = max(1 - 0.5 ** (1 / HALF_LIFE), 1 / (int(self.passes[0]) + 10))
        self.rate += pace * (activated - self.rate)
        self._look_up_rates()
        groups = self._age_groups() * (RATES.size + 1) + self._rate_groups
        if self._groups is not None:
            layers = slice(self._now % self._stride, None, self._stride)
            values = (self.sums / self.weights).ravel()
            found = np.where(activated[layers], 1.0, DISCOUNT * values[groups[layers]])
            self._learn(self._groups[layers].ravel(), found.ravel(), found.shape[0])
        self._groups = groups
        self._now += 1
        self._prepare()

    def _learn(self, groups: Int[np.ndarray, " n"], found: Float[np.ndarray, " n"], num_layers: int) -> None:
        """Adds the observations of some layers, each layer as a part of one."""
        share, size = 1.0 / max(num_layers, 1), self.sums.size
        self.sums *= FORGET
        self.weights *= FORGET
        self.sums += share * np.bincount(groups, found, size).reshape(self.sums.shape)
        self.weights += share * np.bincount(groups, minlength=size).reshape(self.sums.shape)
