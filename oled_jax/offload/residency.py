"""Which page lies in which slot. The one table of the whole engine, owned by the cache manager's thread.

Slots are global: a layer owns a number of them (its capacity), never particular ones, so moving capacity between
layers moves integers. Slots that hold no resident page are free; at least `spare` of them are, between passes.
"""

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32

from oled_jax import native

NO_SLOT = -1
NOT_THE_MISSES, KEEPS_ABSENT, KEEPS_TOO_MANY = 1, 2, 3  # faults of a decision
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

    @property
    def last_resident(self) -> Bool[np.ndarray, " E"]:
        """Who was resident when a layer was activated last, lent until the next is."""
        return self._resident

    def tables(self) -> dict[str, np.ndarray]:
        """What the extension reads and writes when it plans whole layers; `free_slots` it is told and tells."""
        return {"slot": self.slot, "last_use": self.last_use, "free": self._free, "resident": self._resident}

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
        hits, misses = split_activated(layer, pass_number, loads, self.slot, self.last_use, self._resident)
        return self._resident, hits, misses

    def activate_packed(
        self,
        layer: int,
        packed: Int[np.ndarray, "N K2"],
        token_mask: Bool[np.ndarray, " N"],
        expert_ids: Int32[np.ndarray, "N K"],
        gates: Float32[np.ndarray, "N K"],
        loads: Int[np.ndarray, " E"],
        pass_number: int,
    ) -> tuple[Bool[np.ndarray, " E"], Int[np.ndarray, " H"], Int[np.ndarray, " M"]]:
        """`activate` for a route as it comes from the device; writes its ids, gates and tokens per expert.

        Args:
          packed: expert ids, then gates (float32 bits).
          token_mask: padding counts nothing.

        Raises:
          ValueError: there is no such expert.
        """
        tables = self.slot, self.last_use, self._resident
        hits, misses = unpack_activated(layer, pass_number, packed, token_mask, expert_ids, gates, loads, *tables)
        return self._resident, hits, misses

    def exchange(
        self,
        layer: int,
        hits: Int[np.ndarray, " H"],
        misses: Int[np.ndarray, " M"],
        to_gpu: Int[np.ndarray, " G"],
        to_cpu: Int[np.ndarray, " C"],
        keep: Bool[np.ndarray, " E"],
        most: int,
    ) -> tuple[int, Int32[np.ndarray, " S"], Int32[np.ndarray, " R"]]:
        """Gives every page that enters a layer a slot, in rounds, and leaves exactly `keep` resident.

        One round, if there are as many free slots. Else each round takes half of the free ones; slots of what is not
        kept become free when the round after theirs has been planned.

        Args:
          most: that may be kept.

        Returns:
          what is wrong with the decision, and then nothing is done: the first of the faults above, or 0; slots of
          `hits`, then of `to_gpu`; where each round ends in `to_gpu`, lent until the next call.

        Raises:
          RuntimeError: no slot is free for a round.
        """
        fault, rounds, self.free_slots, slots = move_pages(
            layer, self.free_slots, hits, misses, to_gpu, to_cpu, keep, most, self.slot, self._free, self._ends
        )
        return fault, slots, self._ends[:rounds]

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
) -> tuple[Int[np.ndarray, " H"], Int[np.ndarray, " M"]]:
    """What `Residency.activate` does to the tables: writes who is resident. Returns hits and misses."""
    np.greater_equal(slot[layer], 0, out=resident)
    activated = loads > 0
    last_use[layer, activated] = pass_number
    return (activated & resident).nonzero()[0], (activated > resident).nonzero()[0]


@native.compiled
def unpack_activated(
    layer: int,
    pass_number: int,
    packed: Int32[np.ndarray, "N K2"],
    token_mask: Bool[np.ndarray, " N"],
    expert_ids: Int32[np.ndarray, "N K"],
    gates: Float32[np.ndarray, "N K"],
    loads: Int[np.ndarray, " E"],
    slot: Int32[np.ndarray, "L E"],
    last_use: Int[np.ndarray, "L E"],
    resident: Bool[np.ndarray, " E"],
) -> tuple[Int[np.ndarray, " H"], Int[np.ndarray, " M"]]:
    """What `Residency.activate_packed` does."""
    K, E = expert_ids.shape[1], loads.size
    expert_ids[:] = packed[:, :K]
    gates[:] = packed[:, K:].view(np.float32)
    counts = np.bincount(expert_ids[token_mask].ravel(), minlength=E)
    if counts.size > E:
        raise ValueError("there is no such expert")
    loads[:] = counts
    return split_activated(layer, pass_number, loads, slot, last_use, resident)


@native.compiled
def move_pages(
    layer: int,
    num_free: int,
    hits: Int[np.ndarray, " H"],
    misses: Int[np.ndarray, " M"],
    entering: Int[np.ndarray, " G"],
    to_cpu: Int[np.ndarray, " C"],
    keep: Bool[np.ndarray, " E"],
    most: int,
    slot: Int32[np.ndarray, "L E"],
    free: Int32[np.ndarray, " N"],
    ends: Int32[np.ndarray, " R"],
) -> tuple[int, int, int, Int32[np.ndarray, " S"]]:
    """What `Residency.exchange` does to the tables. Returns a fault, the number of rounds, of free slots, and slots."""
    row, num_hits = slot[layer], hits.size
    slots = np.empty(num_hits + entering.size, np.int32)
    fault = _find_fault(misses, entering, to_cpu, row >= 0, keep, most)
    if fault:
        return fault, 0, num_free, slots[:0]
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
    return 0, rounds, num_free + waiting.size, slots


def _find_fault(
    misses: Int[np.ndarray, " M"],
    to_gpu: Int[np.ndarray, " G"],
    to_cpu: Int[np.ndarray, " C"],
    resident: Bool[np.ndarray, " E"],
    keep: Bool[np.ndarray, " E"],
    most: int,
) -> int:
    """Every miss handled once; keep is made of pages that are there and fits. The first fault, or 0."""
    handled = np.concatenate([to_gpu, to_cpu]) if to_cpu.size else to_gpu
    if handled is not misses and (handled.size != misses.size or np.count_nonzero(np.sort(handled) != misses)):
        return NOT_THE_MISSES
    present = resident.copy()
    present[to_gpu] = True
    if np.count_nonzero(keep > present):
        return KEEPS_ABSENT
    return KEEPS_TOO_MANY if np.count_nonzero(keep) > most else 0
