"""Counters of the expert cache, per layer and pass kind. Plain NumPy; the JSON object is made of them elsewhere."""

import dataclasses
from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Int

from oled_jax.passes import PassKind

_COUNTERS = (
    "passes", "activated", "hits", "to_gpu", "to_cpu", "capacity", "prefetched", "prefetch_used", "kept_used",
)  # fmt: skip
PLANNING_PARTS = ("priority", "allocation", "dispatch", "residency", "total")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSummary:
    """Totals over some layers and passes. Ratios are ratios of sums; None where nothing was counted.

    utilization: hits / sum of C_l. hit_rate: hits / activated. effective_transfer_ratio: transferred pages that
    stayed and were used by their layer's next pass / transferred pages. activation_ratio: activated / (passes x E).
    planning_us: mean host time per pass, by part.
    """

    passes: int
    hits: int
    misses: int
    to_gpu: int
    to_cpu: int
    prefetched: int
    prefetch_used: int
    bytes_h2d: int
    utilization: float | None
    hit_rate: float | None
    effective_transfer_ratio: float | None
    activation_ratio: float | None
    planning_us: dict[str, float] | None


class CacheStatistics:
    """Counts what the manager did. `E` and the page size turn counts into ratios and bytes."""

    def __init__(self, *, num_layers: int, num_experts: int, page_bytes: int) -> None:
        self.num_experts = num_experts
        self.page_bytes = page_bytes
        self._counts = {kind: {name: np.zeros(num_layers, np.int64) for name in _COUNTERS} for kind in PassKind}
        self._planning_us = {kind: dict.fromkeys(PLANNING_PARTS, 0.0) for kind in PassKind}
        self._arrived: dict[int, tuple[PassKind, Int[np.ndarray, " M"]]] = {}

    def add(self, kind: PassKind, layer: int, **amounts: int) -> None:
        counts = self._counts[kind]
        counts["passes"][layer] += 1
        for name, amount in amounts.items():
            counts[name][layer] += amount

    def count(self, kind: PassKind, layer: int, name: str, amount: int) -> None:
        self._counts[kind][name][layer] += amount

    def add_planning(self, kind: PassKind, micros: dict[str, float]) -> None:
        for part, value in micros.items():
            self._planning_us[kind][part] += value

    def arrived(self, kind: PassKind, layer: int, experts: Int[np.ndarray, " M"]) -> None:
        """The pages that this pass transferred and kept; whether the layer's next pass uses them is counted then."""
        self._arrived[layer] = (kind, experts)

    def reused(self, layer: int, hits: Bool[np.ndarray, " E"]) -> None:
        """The layer's next pass hit these."""
        if layer in self._arrived:
            kind, experts = self._arrived.pop(layer)
            self.count(kind, layer, "kept_used", int(np.count_nonzero(hits[experts])))

    def forget(self) -> None:
        """The cache was emptied: nothing that arrived can be used again."""
        self._arrived.clear()

    def per_layer(self, kinds: Iterable[PassKind], name: str) -> Int[np.ndarray, " L"]:
        return np.sum([self._counts[kind][name] for kind in kinds], axis=0)

    def summary(self, *kinds: PassKind) -> CacheSummary:
        """Totals over all layers, for passes of these kinds."""
        total = {name: int(self.per_layer(kinds, name).sum()) for name in _COUNTERS}
        passes = int(self.per_layer(kinds, "passes").max(initial=0))
        planning = {part: sum(self._planning_us[kind][part] for kind in kinds) for part in PLANNING_PARTS}
        return CacheSummary(
            passes=passes,
            hits=total["hits"],
            misses=total["activated"] - total["hits"],
            to_gpu=total["to_gpu"],
            to_cpu=total["to_cpu"],
            prefetched=total["prefetched"],
            prefetch_used=total["prefetch_used"],
            bytes_h2d=(total["to_gpu"] + total["prefetched"]) * self.page_bytes,
            utilization=_ratio(total["hits"], total["capacity"]),
            hit_rate=_ratio(total["hits"], total["activated"]),
            effective_transfer_ratio=_ratio(total["kept_used"], total["to_gpu"]),
            activation_ratio=_ratio(total["activated"], total["passes"] * self.num_experts),
            planning_us={part: value / passes for part, value in planning.items()} if passes else None,
        )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
