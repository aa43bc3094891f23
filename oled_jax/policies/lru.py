"""Least recently used: one list per layer, or one for all layers."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from oled_jax.policies.allocation import UniformAllocation
from oled_jax.policies.base import Decision, LayerRouting, Policy, PolicyContext
from oled_jax.policies.composed import ComposedPolicy, everything_transferred
from oled_jax.policies.dispatch import TransferAll
from oled_jax.policies.options import NoOptions, PolicyEntry
from oled_jax.policies.retention import Recency


class LruPolicy(ComposedPolicy):
    """Keeps each layer's most recently activated experts. Moves every miss, also in prefill.

    Source: the OLED-MoE paper's Naive-LRU. Within a pass all activated experts are equally recent; the lower
    expert number stays.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(
            context,
            name="lru",
            retention=Recency(context),
            allocation=UniformAllocation(context),
            dispatch=TransferAll(context),
        )


class GlobalLruPolicy(Policy):
    """Keeps the most recently activated pages of all layers in one list. Moves every miss, also in prefill.

    Layers run in turn, so the oldest pages are always those of the layers that come next: with room for less
    than a whole pass the list cycles and hits almost nothing. Say which of the two LRUs a figure shows.

    A layer's capacity follows the list. Slots that no layer has used yet belong to the layer that is routed
    next, so that the sum of C_l is `total_slots` at all times; when none is left, the oldest pages of other
    layers make room (`Decision.evict`).
    """

    name = "lru-global"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        shape = (context.num_layers, context.num_experts)
        self._held = np.zeros(shape, bool)
        self._counts = np.zeros(context.num_layers, np.int64)
        self._stamp = np.full(shape, -1, np.int64)
        self._clock = 0
        self._next_layer = 0
        self._zeros = np.zeros(context.num_experts)

    def capacities(self) -> Int[np.ndarray, " L"]:
        capacities = self._counts.copy()
        free = self.context.total_slots - int(capacities.sum())
        capacities[self._next_layer] += min(free, self.context.num_experts - int(capacities[self._next_layer]))
        return capacities

    def scores(self, layer: int) -> Float[np.ndarray, " E"]:
        return self._zeros

    def on_route(self, routing: LayerRouting) -> Decision:
        with self.clock.part("priority"):
            layer = routing.layer
            self._clock += 1
            self._stamp[layer, routing.activated] = self._clock
            to_gpu, to_cpu = everything_transferred(routing)
            present = routing.resident.copy()
            present[to_gpu] = True
            self._held[layer] = present
            self._counts[layer] = np.count_nonzero(present)
            evict = self._oldest_pages(int(self._counts.sum()) - self.context.total_slots, layer)
            keep = self._held[layer].copy()
            self._next_layer = (layer + 1) % self.context.num_layers
        return Decision(to_gpu=to_gpu, to_cpu=to_cpu, keep=keep, evict=evict)

    def _oldest_pages(self, excess: int, layer: int) -> Sequence[tuple[int, int]]:
        """Drops the `excess` oldest pages from the list; returns those of other layers.

        A layer that activates more than the whole cache holds drops some of its own.
        """
        if excess <= 0:
            return ()
        E = self.context.num_experts
        pages = np.flatnonzero(self._held)
        # One stamp is one layer of one pass; within it the lower expert number stays longer.
        age = self._stamp.ravel()[pages] * E - pages % E
        layers, experts = np.divmod(pages[np.argpartition(age, excess - 1)[:excess]], E)
        self._held[layers, experts] = False
        self._counts -= np.bincount(layers, minlength=self._counts.size)
        pairs = zip(layers.tolist(), experts.tolist(), strict=True)
        return sorted(pair for pair in pairs if pair[0] != layer)

    def forget_residents(self) -> None:
        self._held[:] = False
        self._counts[:] = 0
        self._next_layer = 0


def build_lru(options: NoOptions, context: PolicyContext) -> Policy:
    return LruPolicy(context)


def build_global(options: NoOptions, context: PolicyContext) -> Policy:
    return GlobalLruPolicy(context)


ENTRIES = (
    PolicyEntry(name="lru", summary="least recently used expert leaves, one list per layer", build=build_lru),
    PolicyEntry(
        name="lru-global",
        summary="least recently used expert leaves, one list for all layers",
        build=build_global,
    ),
)
