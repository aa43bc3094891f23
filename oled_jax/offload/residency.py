"""Which page lies in which slot. The one table of the whole engine, owned by the cache manager's thread.

Slots are global: a layer owns a number of them (its capacity), never particular ones, so moving capacity between
layers moves integers. Slots that hold no resident page are free; at least `spare` of them are, between passes.
"""

import numpy as np
from jaxtyping import Bool, Int, Int32

from oled_jax import native

NO_SLOT = -1
DEFAULT_SPARE = 32  # slots beyond the sum of C_l that transfers land in


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
        self.last_use_rows = list(self.last_use)  # to take a row of a list costs less
        self._free = np.arange(num_slots, dtype=np.int32)
        self.free_slots = num_slots
        # Scratch: what is handed out of them is lent until the next layer.
        self._resident = np.zeros(num_experts, bool)
        self._ends = np.zeros(num_experts + 1, np.int32)

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
        if count > self.free_slots or np.count_nonzero(row[experts] >= 0):
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
        if np.count_nonzero(slots < 0):
            raise RuntimeError(f"experts {experts.tolist()} of layer {layer} are not all resident")
        self._free[self.free_slots : self.free_slots + len(experts)] = slots
        self.free_slots += len(experts)
        row[experts] = NO_SLOT

    def activate(
        self, layer: int, loads: Int[np.ndarray, " E"], pass_number: int
    ) -> tuple[Bool[np.ndarray, " E"], Int[np.ndarray, " H"], Int[np.ndarray, " M"]]:
        """Notes the last use of the experts that a layer of a pass activates.

        Args:
          loads: tokens per expert.

        Returns:
          who is resident, lent until the next call; hits and misses, ascending.
        """
        experts = np.empty(loads.size, np.int64)
        hits, activated = split_activated(layer, pass_number, loads, self.slot, self.last_use, self._resident, experts)
        return self._resident, experts[:hits], experts[hits:activated]

    def exchange(
        self,
        layer: int,
        hits: Int[np.ndarray, " H"],
        entering: Int[np.ndarray, " G"],
        keep: Bool[np.ndarray, " E"],
    ) -> tuple[Int32[np.ndarray, " S"], Int32[np.ndarray, " R"]]:
        """Gives every page that enters a layer a slot, in rounds, and leaves exactly `keep` resident.

        One round, if there are as many free slots. Else each round takes half of the free ones; slots of what is not
        kept become free when the round after theirs has been planned.

        Returns:
          slots of `hits`, then of `entering`; where each round ends in `entering`, lent until the next call.

        Raises:
          RuntimeError: a page that enters is resident, or no slot is free for a round.
        """
        slots = np.empty(hits.size + entering.size, np.int32)
        rounds, self.free_slots = move_pages(
            layer, self.free_slots, hits, entering, keep, self.slot, self._free, slots, self._ends
        )
        return slots, self._ends[:rounds]

    def check(self) -> None:
        """Raises RuntimeError unless every slot is either free or holds exactly one page."""
        slots = np.concatenate([self.slot[self.slot >= 0], self._free[: self.free_slots]])
        if not np.array_equal(np.sort(slots), np.arange(self.num_slots)):
            raise RuntimeError("a slot is lost or holds two pages")


@native.compiled
def split_activated(
    layer: int,
    pass_number: int,
    loads: Int[np.ndarray, " E"],
    slot: Int32[np.ndarray, "L E"],
    last_use: Int[np.ndarray, "L E"],
    resident: Bool[np.ndarray, " E"],
    experts: Int[np.ndarray, " E"],
) -> tuple[int, int]:
    """What `Residency.activate` does to the tables: writes who is resident, and hits, then misses to `experts`.

    Returns:
      the number of hits, and of hits and misses.
    """
    np.greater_equal(slot[layer], 0, out=resident)
    activated = loads > 0
    last_use[layer, activated] = pass_number
    hits = (activated & resident).nonzero()[0]
    misses = (activated > resident).nonzero()[0]
    experts[: hits.size] = hits
    experts[hits.size : hits.size + misses.size] = misses
    return hits.size, hits.size + misses.size


@native.compiled
def move_pages(
    layer: int,
    num_free: int,
    hits: Int[np.ndarray, " H"],
    entering: Int[np.ndarray, " G"],
    keep: Bool[np.ndarray, " E"],
    slot: Int32[np.ndarray, "L E"],
    free: Int32[np.ndarray, " N"],
    slots: Int32[np.ndarray, " S"],
    ends: Int32[np.ndarray, " R"],
) -> tuple[int, int]:
    """What `Residency.exchange` does to the tables. Returns the number of rounds, and of free slots."""
    row, num_hits = slot[layer], hits.size
    slots[:num_hits] = row[hits]
    leaving = ((row >= 0) & ~keep).nonzero()[0]
    # What a round frees waits for one round more, so that the next one's pages can move while it computes; and a round
    # leaves half of the free slots to the next one.
    waiting = np.empty(0, np.int32)
    several = entering.size > num_free
    done = rounds = 0
    while rounds == 0 or done < entering.size:
        if num_free == 0:
            free[: waiting.size], num_free, waiting = waiting, waiting.size, waiting[:0]
        half = (num_free + waiting.size + 1) // 2
        end = min(entering.size, done + (min(num_free, half) if several else num_free))
        if end == done < entering.size:
            raise RuntimeError("no slot is free")
        moved = entering[done:end]
        if np.count_nonzero(row[moved] >= 0):
            raise RuntimeError("a resident page cannot enter again")
        num_free -= moved.size
        slots[num_hits + done : num_hits + end] = row[moved] = free[num_free : num_free + moved.size]
        free[num_free : num_free + waiting.size] = waiting
        num_free += waiting.size
        dropped = moved[~keep[moved]]
        if rounds == 0:
            dropped = np.concatenate([leaving, dropped])
        waiting = row[dropped]
        row[dropped] = NO_SLOT
        ends[rounds] = done = end
        rounds += 1
    free[num_free : num_free + waiting.size] = waiting
    return rounds, num_free + waiting.size
