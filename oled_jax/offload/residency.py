"""Which page lies in which slot. The one table of the whole engine, owned by the cache manager's thread.

Slots are global: a layer owns a number of them (its capacity), never particular ones, so moving capacity between
layers moves integers. Slots that hold no resident page are free; at least `spare` of them are, between passes.
"""

import numpy as np
from jaxtyping import Bool, Int

NO_SLOT = -1


class Residency:
    """Slot table [L, E] and a stack of free slots.

    Args:
      num_layers, num_experts: L, E.
      num_slots: slots of the pool, N = sum of C_l + spare.
    """

    def __init__(self, *, num_layers: int, num_experts: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slot = np.full((num_layers, num_experts), NO_SLOT, np.int32)
        self.last_use = np.full((num_layers, num_experts), -1, np.int64)
        self._free = np.arange(num_slots, dtype=np.int32)
        self.free_slots = num_slots

    def clear(self) -> None:
        """Forgets every resident page (their slots may hold anything)."""
        self.slot[:] = NO_SLOT
        self._free[:] = np.arange(self.num_slots)
        self.free_slots = self.num_slots

    def resident(self, layer: int) -> Bool[np.ndarray, " E"]:
        return self.slot[layer] >= 0

    def counts(self) -> Int[np.ndarray, " L"]:
        return np.count_nonzero(self.slot >= 0, axis=1)

    def admit(self, layer: int, experts: Int[np.ndarray, " M"]) -> Int[np.ndarray, " M"]:
        """Gives pages of a layer a free slot each.

        Raises:
          RuntimeError: one of them is resident, or there are fewer free slots.
        """
        row, count = self.slot[layer], len(experts)
        if count > self.free_slots or row[experts].max(initial=NO_SLOT) >= 0:
            raise RuntimeError(
                f"experts {experts.tolist()} of layer {layer} cannot enter: {self.free_slots} slots are free"
            )
        self.free_slots -= count
        slots = self._free[self.free_slots : self.free_slots + count].copy()
        row[experts] = slots
        return slots

    def evict(self, layer: int, experts: Int[np.ndarray, " M"]) -> None:
        """Frees the slots of pages of a layer. Raises RuntimeError if one of them is not resident."""
        row = self.slot[layer]
        slots = row[experts]
        if slots.min(initial=0) < 0:
            raise RuntimeError(f"experts {experts.tolist()} of layer {layer} are not all resident")
        self._free[self.free_slots : self.free_slots + len(experts)] = slots
        self.free_slots += len(experts)
        row[experts] = NO_SLOT

    def check(self) -> None:
        """Raises RuntimeError unless every slot is either free or holds exactly one page."""
        slots = np.concatenate([self.slot[self.slot >= 0], self._free[: self.free_slots]])
        if not np.array_equal(np.sort(slots), np.arange(self.num_slots)):
            raise RuntimeError("a slot is lost or holds two pages")
