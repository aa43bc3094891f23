"""Policies that know the future: bounds to compare with, not systems. They run on recorded routing only."""

import numpy as np
from jaxtyping import Bool, Float, Int

from oled_jax.errors import PolicyError
from oled_jax.policies.allocation import UniformAllocation, apportion, uniform_capacities
from oled_jax.policies.base import (
    FutureRouting,
    IterationOutcome,
    LayerRouting,
    PassInfo,
    PolicyContext,
)
from oled_jax.policies.composed import Allocation, ComposedPolicy, Retention
from oled_jax.policies.dispatch import TransferAll
from oled_jax.policies.oled import DispatchOptions, build_dispatch
from oled_jax.policies.options import NoOptions, PolicyEntry
from oled_jax.policies.retention import Priority


def required_future(context: PolicyContext) -> FutureRouting:
    """The recorded routing. Raises RuntimeError without one: the registry refuses such a policy before."""
    if context.future is None:
        raise RuntimeError("an oracle was built without recorded routing")
    return context.future


class OracleAllocation(Allocation):
    """Divides the slots before each pass so that the sum of min(C_l, |A_l|) is greatest.

    Layers get slots in proportion to |A_l| up to |A_l|, which reaches min(C_total, sum of |A_l|); what is
    left over is spread evenly. Past the end of the record, the last division stays.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._future = required_future(context).activated
        self._pass = 0
        self._capacities = uniform_capacities(context)
        self._divide()

    def _divide(self) -> None:
        if self._pass >= self._future.shape[0]:
            return
        L, E = self.context.num_layers, self.context.num_experts
        total = self.context.total_slots
        needed = self._future[self._pass].sum(axis=1)
        if needed.sum() >= total:
            self._capacities = apportion(needed.astype(np.float64), total, np.zeros(L, np.int64), needed)
        else:
            self._capacities = apportion(np.ones(L), total, needed, np.full(L, E, np.int64))

    def end_iteration(self, outcome: IterationOutcome) -> None:
        self._pass += 1
        self._divide()

    def capacities(self) -> Int[np.ndarray, " L"]:
        return self._capacities

    def residents(self) -> Bool[np.ndarray, "L E"]:
        """The first C_l activated experts of each layer in the next pass."""
        if self._pass >= self._future.shape[0]:
            return np.zeros(self._future.shape[1:], bool)
        activated = self._future[self._pass]
        return activated & (activated.cumsum(axis=1) <= self._capacities[:, None])


class OraclePolicy(ComposedPolicy):
    """The content oracle: before each pass, as many of the experts it will activate as fit are resident,
    free of charge.

    Slots are divided among layers so that the most activated experts are resident; where not all fit, the
    lowest expert numbers do. The misses that remain go where `oled` would send them; prefill too finds its
    residents free of charge and transfers the rest. Source: the ideal bound of the OLED-MoE paper.
    """

    def __init__(self, options: DispatchOptions, context: PolicyContext) -> None:
        self._division = OracleAllocation(context)
        super().__init__(
            context,
            name="oracle",
            retention=Priority(context),
            allocation=self._division,
            dispatch=build_dispatch(context, options),
        )

    def free_residents(self) -> Bool[np.ndarray, "L E"]:
        return self._division.residents()


class NextUse(Retention):
    """Scores are minus the number of the next pass that activates the expert; minus infinity if none does."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._future = required_future(context).activated
        L, E = context.num_layers, context.num_experts
        # For every (layer, expert) the passes that activate it, ascending, ended by infinity.
        passes, layers, experts = np.nonzero(self._future)
        cells = layers * E + experts
        order = np.argsort(cells, kind="stable")
        counts = np.bincount(cells, minlength=L * E)
        self._uses = np.full(cells.size + L * E, np.inf)
        starts = np.concatenate([[0], np.cumsum(counts + 1)[:-1]])
        places = np.arange(cells.size) + cells[order]
        self._uses[places] = passes[order]
        self._cursor = starts.reshape(L, E)
        self._next = self._uses[self._cursor]
        self._pass = -1

    def begin_iteration(self, info: PassInfo) -> None:
        self._pass += 1

    def observe(self, routing: LayerRouting) -> None:
        layer = routing.layer
        recorded = self._pass < self._future.shape[0]
        if not recorded or not np.array_equal(self._future[self._pass, layer], routing.activated):
            raise PolicyError(f"policy 'belady': pass {self._pass}, layer {layer} is not routed as in the trace")
        self._cursor[layer] += routing.activated
        self._next[layer] = self._uses[self._cursor[layer]]

    def scores(self, layer: int) -> Float[np.ndarray, " E"]:
        return -self._next[layer]


class BeladyPolicy(ComposedPolicy):
    """Keeps the experts whose next use comes soonest. Moves every miss, also in prefill; a transferred
    expert that is needed later than all residents is not kept.

    Least transfers of all policies with the same number of slots in every layer that transfer on demand
    only. Source: Belady's MIN with bypass. It must be told the routing of every pass, in order.
    """

    def __init__(self, options: NoOptions, context: PolicyContext) -> None:
        super().__init__(
            context,
            name="belady",
            retention=NextUse(context),
            allocation=UniformAllocation(context),
            dispatch=TransferAll(context),
        )


ENTRIES = (
    PolicyEntry(
        name="oracle",
        summary="ideal bound: the next experts are resident free of charge, as many as fit (needs a trace)",
        build=OraclePolicy,
        options=DispatchOptions,
        needs_future=True,
        simulated_only=True,
    ),
    PolicyEntry(
        name="belady",
        summary="least transfers at uniform capacity: what is used furthest ahead leaves (needs a trace)",
        build=BeladyPolicy,
        needs_future=True,
    ),
)
