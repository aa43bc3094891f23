"""Which part of the expert cache's figures belongs to which row of a batch. Plain NumPy.

One object belongs to one run of an engine; whoever counts a layer's pass tells it what was routed.
"""

import numpy as np
from jaxtyping import Bool, Int

from oled_jax.passes import CacheShare


class CacheShares:
    """Counts for each place of a batch; see `CacheShare`.

    Args:
      places: rows B of the batch.
      num_experts: E of a layer.
    """

    def __init__(self, places: int, num_experts: int) -> None:
        self._places, self._num_experts = places, num_experts
        self._counted = np.zeros(places, bool)
        self._counts = False  # some row does
        self._waiting: list[tuple[np.ndarray, ...]] = []  # layers of this pass that are not divided yet
        self._passes = np.zeros(places, np.int64)
        self._activated = np.zeros(places, np.int64)
        self._hits = np.zeros(places, np.int64)
        self._transferred = np.zeros(places)

    def begin_pass(self, counted: Bool[np.ndarray, " B"]) -> None:
        """A pass starts; these rows denoise or edit in it, the others do something else or nothing."""
        self._divide()
        self._counted, self._counts = counted.copy(), bool(counted.any())
        self._passes += counted

    def add(
        self,
        expert_ids: Int[np.ndarray, "N K"],
        token_mask: Bool[np.ndarray, " N"],
        hits: Int[np.ndarray, " H"],
        to_gpu: Int[np.ndarray, " G"],
        num_activated: int,
    ) -> None:
        """Counts a layer of the pass, B rows of N / B tokens.

        What belongs to which row is found out when the pass is over: now the layer waits, with cold caches.

        Args:
          expert_ids: may change after the call; the other arrays stay.
          hits: activated experts that were resident before misses were handled.
          to_gpu: misses that were transferred.
          num_activated: experts that any row activates.
        """
        if not self._counts:
            return
        if self._places == 1:  # nothing to divide
            self._activated += num_activated
            self._hits += hits.size
            self._transferred += to_gpu.size
        else:
            self._waiting.append((expert_ids.copy(), token_mask, hits, to_gpu))

    def _divide(self) -> None:
        B, E = self._places, self._num_experts
        for expert_ids, token_mask, hits, to_gpu in self._waiting:
            keys = expert_ids.reshape(B, -1) + np.arange(B)[:, None] * E
            real = np.repeat(token_mask.reshape(B, -1), expert_ids.shape[1], axis=1)
            activated = np.zeros((B, E), bool)
            activated.reshape(-1)[keys[real]] = True
            waiting = activated[:, to_gpu]
            transferred = (waiting / np.maximum(waiting.sum(axis=0), 1)).sum(axis=1)
            self._activated += self._counted * activated.sum(axis=1)
            self._hits += self._counted * activated[:, hits].sum(axis=1)
            self._transferred += self._counted * transferred
        self._waiting.clear()

    def take(self, place: int) -> CacheShare:
        """The figures of the row that had this place; the next one starts with none."""
        self._divide()
        counts = self._passes, self._activated, self._hits, self._transferred
        passes, activated, hits, transferred = (count[place].item() for count in counts)
        for count in counts:
            count[place] = 0
        return CacheShare(passes=passes, activated=activated, hits=hits, transferred=transferred)
