"""Slots by what one more would hit: the allocation of `oled+`."""

import numpy as np
from jaxtyping import Float, Int

from oled_jax.policies.allocation import ADAPTING_PASSES, uniform_capacities
from oled_jax.policies.base import Decision, IterationOutcome, LayerRouting, PolicyContext
from oled_jax.policies.composed import Allocation

EDGE = 8  # experts on either side of a layer's edge whose uses are counted
DECAY = 0.98  # weight of the past in the counts, per pass
INTERVAL, MOVES = 2, 4  # passes between two divisions of the slots, and the most slots that one moves
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
        self.gain: list[float] = [0.0] * L
        self.loss: list[float] = [0.0] * L
        self._ghosts: list[Int[np.ndarray, " G"]] = [np.empty(0, np.int64)] * L
        self._lowest: list[Int[np.ndarray, " H"]] = [np.empty(0, np.int64)] * L
        self._passes = 0

    def capacities(self) -> Int[np.ndarray, " L"]:
        return self._capacities

    def observe(self, routing: LayerRouting) -> None:
        if routing.info.kind not in ADAPTING_PASSES:
            return
        layer, loads, resident = routing.layer, routing.loads, routing.resident
        ghosts, lowest = self._ghosts[layer], self._lowest[layer]
        gained = np.count_nonzero(loads[ghosts] * ~resident[ghosts])
        lost = np.count_nonzero(loads[lowest] * resident[lowest])
        self.gain[layer] += (1.0 - DECAY) * (gained - self.gain[layer])
        self.loss[layer] += (1.0 - DECAY) * (lost - self.loss[layer])

    def decided(self, routing: LayerRouting, decision: Decision, scores: Float[np.ndarray, " E"]) -> None:
        """A layer's residents were chosen: notes who is at the edge."""
        layer = routing.layer
        dropped = np.concatenate([decision.to_gpu, routing.resident.nonzero()[0]])
        dropped = dropped[~decision.keep[dropped]]
        dropped = dropped[np.lexsort((-routing.last_use[dropped], -scores[dropped]))][:EDGE]
        if dropped.size < EDGE:
            older = self._ghosts[layer]
            gone = ~(decision.keep[older] | (routing.loads[older] > 0) | routing.resident[older])
            dropped = np.concatenate([dropped, older[gone][: EDGE - dropped.size]])
        self._ghosts[layer] = dropped
        kept = decision.keep.nonzero()[0]
        self._lowest[layer] = kept[np.lexsort((routing.last_use[kept], scores[kept]))][:EDGE]

    def end_iteration(self, outcome: IterationOutcome) -> None:
        if outcome.kind not in ADAPTING_PASSES:
            return
        self._passes += 1
        if self._passes % INTERVAL == 0:
            self._capacities = self._moved()

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
