"""How soon an expert will be used that the next pass has no reason to use: a value by age and rate, learned online."""

import numpy as np
from jaxtyping import Bool, Float, Int

from oled_jax import native
from oled_jax.policies.learned import COUNT, FINITE, TINY, Limits, forget

DISCOUNT = 0.8  # gamma: what waiting one more pass costs
HALF_LIFE = 500  # passes, of the rates
FORGET = 0.999  # weight of the past in the value table, per pass
PRIOR = 5.0  # observations that the first values are worth
OLDEST = 300  # passes; greater ages are one
AGES = np.unique(np.round(1.25 ** np.arange(26)).astype(np.int64))  # where a group of ages begins; below: used just now
RATES = np.array([0.01, 0.02, 0.04, 0.07, 0.11, 0.16, 0.23, 0.32, 0.45, 0.65])
NUM_RATES = RATES.size + 1  # groups of rates
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
        self.sums = np.tile(PRIOR * first[:, None], (1, NUM_RATES))
        self.weights = np.full(self.sums.shape, PRIOR)
        self._last = np.full(shape, -OLDEST, np.int64)
        self._now = 0
        group_of_age = np.searchsorted(AGES, np.arange(OLDEST + 1), side="right")
        self._tables = group_of_age, np.searchsorted(RATES, np.arange(STEPS + 1) / STEPS)
        self._stride = max(1, num_layers * num_experts // SAMPLE)
        self._groups = np.zeros(shape, np.int64)
        self.active = np.zeros(shape)
        self.idle = np.zeros(shape)
        self._prepare()

    def arrays(self) -> dict[str, np.ndarray]:
        """What it has learned; `restored` is called after somebody has written into them."""
        return {"rate": self.rate, "passes": self.passes, "sums": self.sums, "value_weights": self.weights}

    def limits(self) -> dict[str, Limits]:
        """What `arrays` lie between."""
        return {"rate": (0, 1), "passes": COUNT, "sums": (0, FINITE), "value_weights": (TINY, FINITE)}

    def restored(self) -> None:
        """The arrays hold what another had learned."""
        self._prepare()

    def _prepare(self) -> None:
        """Values for the next pass, [L, E]: of experts that it activates, and of those that it does not."""
        values = self.sums / self.weights
        value_experts(self._now, values, self._last, self.rate, *self._tables, self.active, self.idle)

    def end_pass(self, activated: Bool[np.ndarray, "L E"]) -> None:
        """A pass is over."""
        self.passes += 1
        pace = max(1 - 0.5 ** (1 / HALF_LIFE), 1 / (int(self.passes[0]) + 10))
        before, groups = self._groups, np.empty_like(self._groups)
        note_uses(self._now, activated, pace, *self._tables, self._last, self.rate, groups)
        if self._now > 0:
            layers = slice(self._now % self._stride, None, self._stride)
            values = (self.sums / self.weights).ravel()
            found = np.where(activated[layers], 1.0, DISCOUNT * values[groups[layers]])
            self._learn(before[layers].ravel(), found.ravel(), found.shape[0])
        self._groups = groups
        self._now += 1
        self._prepare()

    def _learn(self, groups: Int[np.ndarray, " n"], found: Float[np.ndarray, " n"], num_layers: int) -> None:
        """Adds the observations of some layers, each layer as a part of one."""
        share, size = 1.0 / max(num_layers, 1), self.sums.size
        forget(self.sums, self.weights, FORGET)
        self.sums += share * np.bincount(groups, found, size).reshape(self.sums.shape)
        self.weights += share * np.bincount(groups, minlength=size).reshape(self.sums.shape)


@native.compiled
def note_uses(
    now: int,
    activated: Bool[np.ndarray, "L E"],
    pace: float,
    group_of_age: Int[np.ndarray, " ages"],
    group_of_rate: Int[np.ndarray, " rates"],
    last: Int[np.ndarray, "L E"],
    rate: Float[np.ndarray, "L E"],
    groups: Int[np.ndarray, "L E"],
) -> None:
    """Pass number `now` activated these: writes when each expert was used last, its rate, and its group."""
    last[activated] = now
    rate += pace * (activated - rate)
    ages, rates = _find_groups(now, last, rate, group_of_age, group_of_rate)
    groups[:] = ages * (group_of_rate[-1] + 1) + rates


@native.compiled
def value_experts(
    now: int,
    values: Float[np.ndarray, "A R"],
    last: Int[np.ndarray, "L E"],
    rate: Float[np.ndarray, "L E"],
    group_of_age: Int[np.ndarray, " ages"],
    group_of_rate: Int[np.ndarray, " rates"],
    active: Float[np.ndarray, "L E"],
    idle: Float[np.ndarray, "L E"],
) -> None:
    """Writes each expert's value if pass number `now` activates it, and if it does not."""
    ages, rates = _find_groups(now, last, rate, group_of_age, group_of_rate)
    active[:] = values[0][rates]
    idle[:] = values[ages, rates]


def _find_groups(
    now: int,
    last: Int[np.ndarray, "L E"],
    rate: Float[np.ndarray, "L E"],
    group_of_age: Int[np.ndarray, " ages"],
    group_of_rate: Int[np.ndarray, " rates"],
) -> tuple[Int[np.ndarray, "L E"], Int[np.ndarray, "L E"]]:
    """The group of each expert's age, and of its rate."""
    ages = group_of_age[np.minimum(now - last, group_of_age.size - 1)]
    return ages, group_of_rate[(rate * (group_of_rate.size - 1)).astype(np.int64)]
