"""How many slots each layer owns: the same for all, or following what each layer makes of them (OLED)."""

import numpy as np
from jaxtyping import Float, Int

from oled_jax.passes import PassKind
from oled_jax.policies.base import IterationOutcome, LayerRouting, PolicyContext
from oled_jax.policies.composed import Allocation

ADAPTING_PASSES = (PassKind.DENOISE, PassKind.EDIT)


def uniform_capacities(context: PolicyContext) -> Int[np.ndarray, " L"]:
    """The same number for every layer; the remainder goes to the first layers, one each."""
    L = context.num_layers
    share, rest = divmod(context.total_slots, L)
    return np.minimum(share + (np.arange(L) < rest), context.num_experts)


def apportion(
    weights: Float[np.ndarray, " L"], total: int, floor: Int[np.ndarray, " L"], ceiling: Int[np.ndarray, " L"]
) -> Int[np.ndarray, " L"]:
    """Divides `total` in proportion to the weights, within bounds, as whole numbers with an exact sum.

    Layers that would leave their bounds get the bound; the others share the rest in proportion. Rounding is
    by largest remainder, the lower layer first among equals. The sum is `total`, or the nearest the bounds
    allow.
    """
    total = min(max(total, int(floor.sum())), int(ceiling.sum()))
    shares = _bounded_shares(weights, total, floor, ceiling)
    whole = np.floor(shares + 1e-9).astype(np.int64)
    remainders = np.where(whole < ceiling, shares - whole, -1.0)
    order = (-remainders).argsort(kind="stable")
    whole[order[: total - int(whole.sum())]] += 1
    return whole


def _bounded_shares(
    weights: Float[np.ndarray, " L"], total: int, floor: Int[np.ndarray, " L"], ceiling: Int[np.ndarray, " L"]
) -> Float[np.ndarray, " L"]:
    """Real shares s * w_l clipped to the bounds, with s such that they add up to `total`.

    Each round fixes the layers on the side that is violated more: they can only lie on that bound in the
    solution, because meeting their bound moves s further away from them. At most L rounds.
    """
    # A weight of 0 still has to absorb what layers at their ceiling cannot take.
    weights = np.maximum(weights, 1e-9 * max(float(weights.max()), 1e-9)).astype(np.float64)
    shares = np.zeros(weights.size)
    free = np.ones(weights.size, bool)
    while True:
        rest = total - shares[~free].sum()
        unbounded = weights[free]
        shares[free] = rest * unbounded / unbounded.sum()
        clipped = np.minimum(np.maximum(shares, floor), ceiling)  # quicker than np.clip
        excess = float((clipped - shares)[free].sum())
        if excess == 0:
            return clipped
        fixed = free & (shares < floor if excess > 0 else shares > ceiling)
        shares[fixed] = clipped[fixed]
        free &= ~fixed


class UniformAllocation(Allocation):
    """Every layer owns the same number of slots; the remainder goes to the first layers."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._capacities = uniform_capacities(context)

    def capacities(self) -> Int[np.ndarray, " L"]:
        return self._capacities


class AdaptiveAllocation(Allocation):
    """C_l in proportion to w_l = a_l * u_l, every `interval` denoise or edit passes (OLED-MoE,
    layer-adaptive capacity).

    a_l and u_l are running means of |A_l| / E and of the utilization |resident & activated| / C_l before
    misses are handled. No layer falls below min(K, floor(C_total / L)) or rises above E. The paper gives
    neither that floor nor the decay of the means. Prefill and commit passes count nothing: they activate
    what denoising will not ask for.

    Args:
      decay: weight of the past in the running means; the first observation starts them.
      interval: passes between two divisions of the slots.
    """

    def __init__(self, context: PolicyContext, *, decay: float = 0.8, interval: int = 5) -> None:
        super().__init__(context)
        L, E = context.num_layers, context.num_experts
        self.decay = decay
        self.interval = interval
        self._capacities = uniform_capacities(context)
        self.floor = np.full(L, min(context.top_k, context.total_slots // L), np.int64)
        self.ceiling = np.full(L, E, np.int64)
        # Plain floats: indexing an array element by element costs more than the arithmetic.
        self._activation: list[float | None] = [None] * L
        self._utilization: list[float | None] = [None] * L
        self._seen: dict[
            int, LayerRouting
        ] = {}  # by layer, of the pass that runs; read at its end, when no layer waits
        self._passes = 0

    def capacities(self) -> Int[np.ndarray, " L"]:
        return self._capacities

    def observe(self, routing: LayerRouting) -> None:
        self._seen[routing.layer] = routing

    def _blend(self, means: list[float | None], layer: int, value: float) -> None:
        past = means[layer]
        means[layer] = value if past is None else self.decay * past + (1.0 - self.decay) * value

    def end_iteration(self, outcome: IterationOutcome) -> None:
        seen, self._seen = self._seen, {}
        if outcome.kind not in ADAPTING_PASSES:
            return
        for routing in seen.values():
            self._blend(self._activation, routing.layer, routing.num_activated / self.context.num_experts)
            self._blend(self._utilization, routing.layer, routing.hits.size / max(routing.capacity, 1))
        self._passes += 1
        if self._passes % self.interval == 0:
            pairs = zip(self._activation, self._utilization, strict=True)
            weights = np.array([(a or 0.0) * (u or 0.0) for a, u in pairs])
            if weights.any():
                self._capacities = apportion(weights, self.context.total_slots, self.floor, self.ceiling)
