"""From a decision to the order of execution: which page is moved and computed in which round, in which slot.

`place` changes the tables; `write_plan` tells the device, and a replay leaves it out.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from oled_jax import native
from oled_jax.offload.plan import WRITTEN, PlanLayout
from oled_jax.offload.residency import Residency
from oled_jax.ops.grouping import ItemShape, group_pairs
from oled_jax.policies.base import Decision, LayerRouting

Move = tuple[int, int, int]  # layer, expert, slot


def by_layer(moves: Iterable[Move]) -> list[tuple[int, list[int], list[int]]]:
    """(layer, experts, slots) of every layer that pages move to, layers ascending, in order within a layer."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for layer, expert, slot in moves:
        experts, slots = found.setdefault(layer, ([], []))
        experts.append(expert)
        slots.append(slot)
    return [(layer, *found[layer]) for layer in sorted(found)]


class PlacedLayer(NamedTuple):
    """A layer's decision with slots.

    hits: activated experts that were resident, ascending. slots: of `hits`, then of `decision.to_gpu`.
    ends: of each round among the transfers, lent until the next layer is placed. prefetches: pages of later layers
    that leave with this plan.
    """

    routing: LayerRouting
    decision: Decision
    hits: Int[np.ndarray, " H"]
    slots: Int32[np.ndarray, " S"]
    ends: Int32[np.ndarray, " R"]
    prefetches: list[Move]


def place(residency: Residency, routing: LayerRouting, decision: Decision) -> tuple[int, PlacedLayer]:
    """Gives every transfer a slot and leaves exactly `decision.keep` resident, if the decision is legal.

    Hits and the first transfers make round 0; later rounds reuse the slots of what is not kept.

    Returns:
      the decision's fault (`Residency.exchange`), or 0.
    """
    hits, keep, most = routing.hits, decision.keep, routing.capacity + len(decision.evict)
    fault, slots, ends = residency.exchange(
        routing.layer, hits, routing.misses, decision.to_gpu, decision.to_cpu, keep, most
    )
    return fault, PlacedLayer(routing, decision, hits, slots, ends, [])


def write_plan(placed: PlacedLayer, layout: PlanLayout, plan: Int32[np.ndarray, " size"]) -> None:
    """Writes items, transfers and prefetches into a plan of this layout.

    What lies beyond the ends that are written here is never read.
    """
    routing, decision, hits, slots, ends, prefetches = placed
    token_mask, moved = routing.info.token_mask, decision.to_gpu
    write_layer(routing.expert_ids, token_mask, hits, moved, slots, ends, layout.items, layout.bounds, plan)
    if prefetches:
        fields = layout.fields(plan)
        fields["prefetch_count"][0] = len(prefetches)
        for index, (layer, expert, slot) in enumerate(prefetches):
            fields["prefetch_layer"][index] = layer
            fields["prefetch_expert"][index] = expert
            fields["prefetch_slot"][index] = slot


@native.compiled
def write_layer(
    expert_ids: Int32[np.ndarray, "N K"],
    token_mask: Bool[np.ndarray, " N"],
    hits: Int[np.ndarray, " H"],
    moved: Int[np.ndarray, " G"],
    slots: Int32[np.ndarray, " S"],
    ends: Int32[np.ndarray, " R"],
    items: ItemShape,
    bounds: Int[np.ndarray, "12 2"],
    plan: Int32[np.ndarray, " size"],
) -> None:
    """What `write_plan` does for a plan without prefetches. bounds: `PlanLayout.bounds`."""
    E, num_hits, num_keys = items.num_experts, hits.size, slots.size
    key = np.full(E + 1, num_keys)
    key[hits] = np.arange(num_hits)
    key[moved] = np.arange(num_hits, num_keys)
    keys = key[np.where(token_mask[:, None], expert_ids, E).ravel()]
    pair_row, per_key = group_pairs(keys, num_keys, items)
    item_ends = np.zeros(num_keys + 1, np.int64)
    per_key.cumsum(out=item_ends[1:])
    fields = {name: plan[start:stop] for name, (start, stop) in zip(WRITTEN, bounds.tolist(), strict=True)}
    fields["num_rounds"][0] = ends.size
    fields["cpu_pairs"][0] = np.count_nonzero(token_mask) * items.top_k - np.count_nonzero(keys < num_keys)
    fields["hit_end"][0] = item_ends[num_hits]
    fields["prefetch_count"][0] = 0
    fields["early_rounds"][0] = early = ends.size - 1
    first = item_ends[num_hits + ends[early - 1]] if early else 0
    fields["late_items"][:] = first, first if early else item_ends[num_hits], item_ends[-1]
    fields["transfer_end"][:] = moved.size
    fields["transfer_end"][: ends.size] = ends
    fields["item_end"][:] = item_ends[-1]
    fields["item_end"][: ends.size] = item_ends[num_hits + ends]
    fields["transfer_expert"][: moved.size] = moved
    fields["transfer_slot"][: moved.size] = slots[num_hits:]
    fields["item_slot"][: item_ends[-1]] = slots.repeat(per_key)
    fields["pair_row"][:] = pair_row
