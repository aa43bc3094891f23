"""Slots by what one more would hit: the allocation of `oled+`."""

import numpy as np
from jaxtyping import Bool, Float, Int

from oled_jax import native
from oled_jax.policies.allocation import ADAPTING_PASSES, uniform_capacities
from oled_jax.policies.base import Decision, IterationOutcome, LayerRouting, PolicyContext
from oled_jax.policies.composed import Allocation

EDGE = 8  # experts on either side of a layer's edge whose uses are counted, but at most a quarter of its slots
DECAY = 0.96  # weight of the past in the counts
MOVES = 4  # the most slots that one division moves
LEAST = 0.02  # uses a pass that a move must promise beyond MARGIN times what it costs
MARGIN = 1.1
SETTLE = 0.1  # what a move takes off the expected difference, until counts follow


class MarginalAllocation(Allocation):
    """Moves slots from the layer whose last slots are used least to the one that would use more slots most.

    A layer gains from more slots what the EDGE experts would hit that its ranking dropped last (ghosts), and loses
    from fewer what the EDGE lowest-ranked residents hit. Both are running means over denoise and edit passes. It begins
    with the same number for every layer; none falls below min(K, floor(C_total / L)) or rises above E.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        L = context.num_layers
        self._capacities = uniform_capacities(context).astype(np.int64)
        self._floor = min(context.top_k, context.total_slots // L)
        self.gain = np.zeros(L)
        self.loss = np.zeros(L)
        shape = (L, context.num_experts)
        self._resident = np.zeros(shape, bool)
        self._activated = np.zeros(shape, bool)
        self._keep = np.zeros(shape, bool)
        self._scores = np.zeros(shape)
        self._ghosts = np.zeros(shape, bool)
        self._lowest = np.zeros(shape, bool)
        self._edge = max(1, min(EDGE, context.total_slots // L // 4))
        self._marked = False

    def capacities(self) -> Int[np.ndarray, " L"]:
        return self._capacities

    def decided(self, routing: LayerRouting, decision: Decision, scores: Float[np.ndarray, " E"]) -> None:
        """A layer's residents were chosen by these scores."""
        layer = routing.layer
        self._resident[layer] = routing.resident
        self._activated[layer] = routing.activated
        self._keep[layer] = decision.keep
        self._scores[layer] = scores

    def end_iteration(self, outcome: IterationOutcome) -> None:
        # Edges are marked after every other pass: it costs as much as ranking a layer does.
        if self._marked and outcome.kind in ADAPTING_PASSES:
            self._count(self.gain, self._ghosts & self._activated & ~self._resident)
            self._count(self.loss, self._lowest & self._activated & self._resident)
            self._capacities = self._moved()
        self._marked = not self._marked
        if self._marked:
            self._mark_edges()

    def _count(self, means: Float[np.ndarray, " L"], used: Bool[np.ndarray, "L E"]) -> None:
        means += (1.0 - DECAY) * (used.sum(axis=1) - means)

    def _mark_edges(self) -> None:
        """Who is on either side of each layer's edge: the next pass may use them."""
        present = self._resident | self._activated
        dropped = present & ~self._keep
        older = self._ghosts & ~present & ~self._keep
        # Ghosts of this pass before those of passes before it.
        mark_greatest(np.where(dropped, self._scores, np.where(older, -1.0, -np.inf)), self._edge, self._ghosts)
        # A layer with empty slots loses nothing.
        full = self._keep.sum(axis=1) >= self._capacities
        mark_greatest(np.where(self._keep & full[:, None], -self._scores, -np.inf), self._edge, self._lowest)

    def _moved(self) -> Int[np.ndarray, " L"]:
        capacities, gain, loss = self._capacities.copy(), self.gain, self.loss
        for _ in range(MOVES):
            wants = np.where(capacities < self.context.num_experts, gain, -1.0)
            spares = np.where(capacities > self._floor, loss, np.inf)
            taker, giver = int(wants.argmax()), int(spares.argmin())
            if taker == giver or not wants[taker] > MARGIN * spares[giver] + LEAST:
                break
            capacities[taker] += 1
            capacities[giver] -= 1
            gain[taker] *= 1.0 - SETTLE
            loss[giver] += SETTLE * (loss[giver] + 0.05)
        return capacities


@native.compiled
def mark_greatest(keys: Float[np.ndarray, "L E"], count: int, chosen: Bool[np.ndarray, "L E"]) -> None:
    """Writes which keys are among a layer's `count` greatest and not minus infinity; lower numbers win ties."""
    best = (-keys).argsort(axis=1, kind="stable")[:, :count]
    chosen[:] = False
    np.put_along_axis(chosen, best, True, axis=1)
    chosen &= keys > -np.inf
