"""From a decision to the order of execution: which page is moved and computed in which round, in which slot."""

import numpy as np
from jaxtyping import Int

from oled_jax.offload.plan import PlanLayout
from oled_jax.offload.residency import Residency
from oled_jax.ops.grouping import group_pairs
from oled_jax.policies.base import Decision, LayerRouting


def schedule(
    residency: Residency,
    routing: LayerRouting,
    decision: Decision,
    pair_expert: Int[np.ndarray, " P"],
    layout: PlanLayout,
    plan: dict[str, np.ndarray],
) -> None:
    """Writes items and transfers into the plan and leaves exactly `decision.keep` resident.

    Hits and the first transfers make round 0; later rounds reuse the slots of what is not kept.

    Args:
      pair_expert: expert of each (token, k) pair, E where the token is padding.
      plan: fields of a plan of this layout; what lies beyond the ends that are written here is never read.
    """
    hits = ((routing.loads > 0) & routing.resident).nonzero()[0]
    moved, num_hits = decision.to_gpu, hits.size
    sequence = np.concatenate([hits, moved])
    position = np.full(routing.loads.size + 1, sequence.size)
    position[sequence] = np.arange(sequence.size)
    plan["pair_row"][:], items = group_pairs(position[pair_expert], sequence.size, layout.items)

    slots = np.empty(sequence.size, np.int32)
    slots[:num_hits] = residency.slot[routing.layer, hits]
    ends = _place(residency, routing, decision, slots[num_hits:])
    item_slots = slots if layout.items.direct else np.repeat(slots, items)
    plan["item_slot"][: item_slots.size] = item_slots
    plan["transfer_expert"][: moved.size] = moved
    plan["transfer_slot"][: moved.size] = slots[num_hits:]
    plan["num_rounds"][0] = len(ends)
    plan["transfer_end"][:] = moved.size
    plan["item_end"][:] = item_slots.size
    if len(ends) > 1:
        plan["transfer_end"][: len(ends)] = ends
        plan["item_end"][: len(ends)] = items.cumsum()[np.asarray(ends) + num_hits - 1]


def _place(residency: Residency, routing: LayerRouting, decision: Decision, slots: Int[np.ndarray, " G"]) -> list[int]:
    """Gives each transfer its slot. Returns the end of each round among the transfers."""
    layer, moved = routing.layer, decision.to_gpu
    passing = moved[~decision.keep[moved]]  # computed and dropped in the round that brings them
    leaving = (routing.resident & ~decision.keep).nonzero()[0]
    if moved.size <= residency.free_slots:
        slots[:] = residency.admit(layer, moved)
        residency.evict(layer, np.concatenate([leaving, passing]))
        return [moved.size]
    ends: list[int] = []
    done = 0
    while done < moved.size:
        end = min(moved.size, done + residency.free_slots)
        if end == done:
            raise RuntimeError(f"no slot is free for layer {layer}")
        slots[done:end] = residency.admit(layer, moved[done:end])
        if not ends:
            residency.evict(layer, leaving)
        residency.evict(layer, moved[done:end][~decision.keep[moved[done:end]]])
        done = end
        ends.append(end)
    return ends
