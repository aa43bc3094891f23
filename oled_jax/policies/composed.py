"""Policies made of parts: what stays (retention), how many slots a layer owns (allocation), where misses go
(dispatch).

The abstract parts and their composition. The parts themselves are in `retention.py`, `allocation.py`,
`dispatch.py`.
"""

# ruff: noqa: B027  (optional hooks: doing nothing is what they do by default)

import abc
import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from oled_jax.passes import PassKind
from oled_jax.policies.base import (
    Decision,
    IterationOutcome,
    LayerRouting,
    PageRequest,
    PassInfo,
    Policy,
    PolicyContext,
    best_residents,
)


class Retention(abc.ABC):
    """Which residents stay: a score per expert. `observe` sees every routing before `scores` is asked."""

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    def observe(self, routing: LayerRouting) -> None:
        """Sees every routing of a pass, before misses are handled."""

    @abc.abstractmethod
    def scores(self, layer: int) -> Float[np.ndarray, " E"]:
        """Greater is better; ties are broken by last use. The array belongs to the rule."""

    def begin_request(self) -> None:
        """A request starts: per-request counts are forgotten here."""

    def begin_iteration(self, info: PassInfo) -> None:
        """A forward pass starts."""

    def end_iteration(self, outcome: IterationOutcome) -> None:
        """A pass is over: what depends on this pass's confidence is re-ranked here."""


class Allocation(abc.ABC):
    """How many slots each layer owns."""

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    @abc.abstractmethod
    def capacities(self) -> Int[np.ndarray, " L"]:
        """C_l. The array belongs to the rule."""

    def observe(self, routing: LayerRouting) -> None:
        """Sees every routing of a pass, before misses are handled."""

    def end_iteration(self, outcome: IterationOutcome) -> None:
        """A pass is over: capacities may change here and nowhere else."""


class Dispatch(abc.ABC):
    """Which misses are transferred and which are computed on the CPU. uses_cpu: some may be."""

    uses_cpu: bool = True

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    @abc.abstractmethod
    def split(
        self, routing: LayerRouting, scores: Float[np.ndarray, " E"]
    ) -> tuple[Int[np.ndarray, " G"], Int[np.ndarray, " H"]]:
        """The misses as (to_gpu, to_cpu)."""


class ComposedPolicy(Policy):
    """Retention + allocation + dispatch: keep = Top_{C_l}(resident | to_gpu) by (score, last use).

    In prefill every miss is transferred, whatever the dispatch rule says.
    """

    def __init__(
        self,
        context: PolicyContext,
        *,
        name: str,
        retention: Retention,
        allocation: Allocation,
        dispatch: Dispatch,
    ) -> None:
        super().__init__(context)
        self.name = name
        self.retention = retention
        self.allocation = allocation
        self.dispatch = dispatch
        self.uses_cpu = dispatch.uses_cpu

    def begin_request(self, prompt_ids: Int[np.ndarray, " P"]) -> Sequence[PageRequest]:
        self.retention.begin_request()
        return ()

    def begin_iteration(self, info: PassInfo) -> None:
        self.retention.begin_iteration(info)

    def on_route(self, routing: LayerRouting) -> Decision:
        times = self.clock.micros
        start = time.perf_counter()
        self.retention.observe(routing)
        scores = self.retention.scores(routing.layer)
        observed = time.perf_counter()
        self.allocation.observe(routing)
        allocated = time.perf_counter()
        if routing.info.kind is PassKind.PREFILL:
            to_gpu, to_cpu = everything_transferred(routing)
        else:
            to_gpu, to_cpu = self.dispatch.split(routing, scores)
        dispatched = time.perf_counter()
        keep = keep_best(routing, to_gpu, scores)
        times["allocation"] += (allocated - observed) * 1e6
        times["dispatch"] += (dispatched - allocated) * 1e6
        times["priority"] += (observed - start + time.perf_counter() - dispatched) * 1e6
        return Decision(to_gpu=to_gpu, to_cpu=to_cpu, keep=keep)

    def end_iteration(self, outcome: IterationOutcome) -> Sequence[PageRequest]:
        with self.clock.part("priority"):
            self.retention.end_iteration(outcome)
        with self.clock.part("allocation"):
            self.allocation.end_iteration(outcome)
        return ()

    def capacities(self) -> Int[np.ndarray, " L"]:
        return self.allocation.capacities()

    def scores(self, layer: int) -> Float[np.ndarray, " E"]:
        return self.retention.scores(layer)


def everything_transferred(routing: LayerRouting) -> tuple[Int[np.ndarray, " G"], Int[np.ndarray, " H"]]:
    """The misses as (to_gpu, to_cpu): all of them and none."""
    misses = routing.misses
    return misses, misses[:0]


def keep_best(
    routing: LayerRouting, to_gpu: Int[np.ndarray, " G"], scores: Float[np.ndarray, " E"]
) -> Bool[np.ndarray, " E"]:
    """Top_{C_l}(resident | to_gpu) by (score, last use)."""
    return best_residents(routing.resident, to_gpu, scores, routing.last_use, routing.capacity)
