"""The plan: what the manager decides for one layer of one pass, as one flat int32 array of fixed size.

The manager writes it through NumPy views, the program reads it by static slices; `PlanLayout` is the only place that
knows where things are.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
from jaxtyping import Int

from oled_jax.ops.grouping import ItemShape

MAX_PREFETCHES = 16
# Fields that every plan has written anew, in the order in which csrc/planning.cc numbers them.
WRITTEN = (
    "num_rounds", "cpu_pairs", "hit_end", "prefetch_count", "early_rounds", "late_items", "transfer_end", "item_end",
    "transfer_expert", "transfer_slot", "item_slot", "pair_row",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanLayout:
    """Offsets of a plan for a pass of `items` over a layer with `spare` spare slots.

    Fields of a plan (int32):
      num_rounds []; cpu_pairs []: (token, k) pairs that the CPU computes, 0 if none;
      hit_end []: end of the items whose pages were resident: they come first and wait for no transfer;
      early_rounds []: rounds before the last, nearly always 0; late_items [3]: of the items that these leave the first,
        the end of those that wait for no transfer, and the end;
      transfer_end [R], item_end [R]: end of each round's transfers and items, the last value repeated;
      transfer_expert [E], transfer_slot [E];
      item_slot [I]; pair_row [P]: see `ops.grouping.group_pairs`;
      prefetch_count []; prefetch_layer, prefetch_expert, prefetch_slot [MAX_PREFETCHES]: pages of later MoE layers.
    """

    items: ItemShape
    spare: int

    @property
    def max_rounds(self) -> int:
        """Every round but the last moves at least half of the spare slots' number of pages (`residency.move_pages`)."""
        return -(-self.items.num_experts // max(1, self.spare // 2))

    @functools.cached_property
    def slices(self) -> dict[str, slice]:
        """Where each field lies."""
        E, R = self.items.num_experts, self.max_rounds
        sizes = {
            "num_rounds": 1,
            "cpu_pairs": 1,
            "hit_end": 1,
            "prefetch_count": 1,
            "early_rounds": 1,
            "late_items": 3,
            "transfer_end": R,
            "item_end": R,
            "transfer_expert": E,
            "transfer_slot": E,
            "item_slot": self.items.max_items,
            "pair_row": self.items.pairs,
            "prefetch_layer": MAX_PREFETCHES,
            "prefetch_expert": MAX_PREFETCHES,
            "prefetch_slot": MAX_PREFETCHES,
        }
        ends = np.cumsum(list(sizes.values())).tolist()
        return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}

    @functools.cached_property
    def bounds(self) -> Int[np.ndarray, "12 2"]:
        """First and last position plus one of each field of `WRITTEN`, for `schedule.write_layer`."""
        return np.array([(self.slices[name].start, self.slices[name].stop) for name in WRITTEN], np.int64)

    @functools.cached_property
    def size(self) -> int:
        return max(field.stop for field in self.slices.values())

    def fields(self, flat: Any) -> dict[str, Any]:
        """Views of a flat plan by field name, for NumPy and for JAX arrays alike."""
        return {name: flat[field] for name, field in self.slices.items()}

    def empty(self) -> Int[np.ndarray, " size"]:
        """The plan that does nothing."""
        flat = np.zeros(self.size, np.int32)
        flat[self.slices["pair_row"]] = -1
        return flat
