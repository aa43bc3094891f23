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
      plan: fields of an empty plan of this layout.
    """
    hits = np.flatnonzero((routing.loads > 0) & routing.resident)
    moved = decision.to_gpu
    sequence = np.concatenate([hits, moved])
    position = np.full(routing.loads.shape[0] + 1, sequence.size, np.int64)
    position[sequence] = np.arange(sequence.size)
    plan["pair_row"][:], items = group_pairs(position[pair_expert], sequence.size, layout.items)

    slots = np.empty(sequence.size, np.int32)
    slots[: hits.size] = residency.slot[routing.layer, hits]
    ends = _place(residency, routing, decision, slots[hits.size :])
    item_slots = np.repeat(slots, items)
    item_end = np.cumsum(items, dtype=np.int32)
    plan["item_slot"][: item_slots.size] = item_slots
    plan["transfer_expert"][: moved.size] = moved
    plan["transfer_slot"][: moved.size] = slots[hits.size :]
    plan["num_rounds"][0] = len(ends)
    plan["transfer_end"][:] = moved.size
    plan["item_end"][:] = item_slots.size
    for index, end in enumerate(ends[:-1]):
        plan["transfer_end"][index] = end
        plan["item_end"][index] = item_end[hits.size + end - 1]


def _place(
    residency: Residency, routing: LayerRouting, decision: Decision, slots: Int[np.ndarray, " G"]
) -> list[int]:
    """Gives each transfer its slot. Returns the end of each round among the transfers."""
    layer, moved = routing.layer, decision.to_gpu
    kept = decision.keep[moved]
    leaving = np.flatnonzero(routing.resident & ~decision.keep)
    ends: list[int] = []
    done = 0
    while not ends or done < moved.size:
        end = min(moved.size, done + residency.free_slots)
        if end == done < moved.size:
            raise RuntimeError(f"no slot is free for layer {layer}")
        slots[done:end] = residency.admit(layer, moved[done:end])
        if not ends:
            residency.evict(layer, leaving)
        residency.evict(layer, moved[done:end][~kept[done:end]])
        done = end
        ends.append(end)
    return ends
