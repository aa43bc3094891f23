"""Counters of the expert cache, per layer and pass kind, and the JSON objects made of them. Plain NumPy."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from oled_jax import native
from oled_jax.passes import PassKind

# Figures are given for these kinds of passes together; the first group holds those to quote.
GROUPS = {
    "cache": (PassKind.DENOISE, PassKind.EDIT),
    "cache_prefill": (PassKind.PREFILL,),
    "cache_commit": (PassKind.COMMIT,),
}
PLANNING_PARTS = ("priority", "allocation", "dispatch", "residency", "total", "accounting")


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


@dataclasses.dataclass(slots=True)
class _LayerCounts:
    """Of one layer in passes of one kind. Plain integers: to add to an element of an array costs more."""

    passes: int = 0
    activated: int = 0
    hits: int = 0
    to_gpu: int = 0
    to_cpu: int = 0
    capacity: int = 0
    prefetched: int = 0
    prefetch_used: int = 0
    kept_used: int = 0


class CacheStatistics:
    """Counts what the manager did. `E` and the page size turn counts into ratios and bytes."""

    def __init__(self, *, num_layers: int, num_experts: int, page_bytes: int) -> None:
        self.num_experts = num_experts
        self.page_bytes = page_bytes
        self._num_layers = num_layers
        self.restart()
        # Pages that a layer's last pass transferred and kept, and the kind of that pass.
        self._arrived = np.zeros((num_layers, num_experts), bool)
        self._arrival_kind = [PassKind.PREFILL] * num_layers
        self._ahead: list[dict[int, PassKind]] = [{} for _ in range(num_layers)]

    def restart(self) -> None:
        """Counts from here on: what was before was a warm-up. What has arrived stays known."""
        self._counts = {kind: [_LayerCounts() for _ in range(self._num_layers)] for kind in PassKind}
        self._planning_us = {kind: dict.fromkeys(PLANNING_PARTS, 0.0) for kind in PassKind}

    def add(
        self,
        kind: PassKind,
        layer: int,
        *,
        activated: int,
        hits: int,
        to_gpu: int = 0,
        to_cpu: int = 0,
        capacity: int,
    ) -> None:
        """Counts a layer's pass."""
        counts = self._counts[kind][layer]
        counts.passes += 1
        counts.activated += activated
        counts.hits += hits
        counts.to_gpu += to_gpu
        counts.to_cpu += to_cpu
        counts.capacity += capacity

    def add_planning(self, kind: PassKind, micros: dict[str, float]) -> None:
        for part, value in micros.items():
            self._planning_us[kind][part] += value

    def fetched_ahead(self, kind: PassKind, layer: int, expert: int) -> None:
        """A page was moved ahead of its use, for a pass of this kind; whether it is used is counted there, too."""
        self._counts[kind][layer].prefetched += 1
        self._ahead[layer][expert] = kind

    def routed(
        self,
        kind: PassKind,
        layer: int,
        hits: Int[np.ndarray, " H"],
        to_gpu: Int[np.ndarray, " G"],
        keep: Bool[np.ndarray, " E"],
    ) -> None:
        """A pass hits these pages of a layer, transfers those and leaves `keep` resident."""
        used = exchange_arrivals(layer, hits, to_gpu, keep, self._arrived)
        self._counts[self._arrival_kind[layer]][layer].kept_used += used
        self._arrival_kind[layer] = kind
        if self._ahead[layer]:
            self._settle_ahead(layer, set(hits.tolist()), keep)

    def _settle_ahead(self, layer: int, hits: set[int], keep: Bool[np.ndarray, " E"]) -> None:
        for expert, kind in list(self._ahead[layer].items()):
            if expert in hits:
                self._counts[kind][layer].prefetch_used += 1
            if expert in hits or not keep[expert]:
                del self._ahead[layer][expert]

    def evicted(self, layer: int, experts: Iterable[int]) -> None:
        """Pages left between two passes of their layer."""
        for expert in experts:
            self._ahead[layer].pop(expert, None)

    def forget(self) -> None:
        """The cache was emptied: nothing that arrived can be used again."""
        self._arrived[:] = False
        for pages in self._ahead:
            pages.clear()

    def per_layer(self, kinds: Iterable[PassKind], name: str) -> Int[np.ndarray, " L"]:
        """The sum over kinds of passes of a counter: a field of `_LayerCounts`."""
        return np.sum([[getattr(counts, name) for counts in self._counts[kind]] for kind in kinds], axis=0)

    def summary(self, *kinds: PassKind) -> CacheSummary:
        """Totals over all layers, for passes of these kinds."""
        total = {name: int(self.per_layer(kinds, name).sum()) for name in _LayerCounts.__slots__}
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


def cache_figures(
    statistics: CacheStatistics, *, policy: str, capacities: Sequence[int], kinds: Sequence[PassKind], tokens: int
) -> dict[str, Any]:
    """Cache figures over the passes of some kinds, ready for JSON (docs/statistics.md).

    Args:
      policy: its specification.
      capacities: C_l as it is now.
      tokens: generated ones, for `bytes_per_token`; prefill serves the prompt, so there it does not apply.
    """
    summary = dataclasses.asdict(statistics.summary(*kinds))
    per_token = tokens > 0 and PassKind.PREFILL not in kinds
    return {
        "policy": policy,
        "capacity": sum(capacities) / len(capacities) if capacities else None,
        "capacities": list(capacities),
        **summary,
        "bytes_per_token": summary["bytes_h2d"] / tokens if per_token else None,
    }


@native.compiled
def exchange_arrivals(
    layer: int,
    hits: Int[np.ndarray, " H"],
    to_gpu: Int[np.ndarray, " G"],
    keep: Bool[np.ndarray, " E"],
    arrived: Bool[np.ndarray, "L E"],
) -> int:
    """Counts the hits among a layer's arrivals, which are then those of `to_gpu` that are kept."""
    row = arrived[layer]
    used = int(np.count_nonzero(row[hits]))
    row[:] = False
    row[to_gpu] = keep[to_gpu]
    return used


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def routed_loads(
    expert_ids: Int[np.ndarray, "L N K"], token_mask: Bool[np.ndarray, " N"], num_experts: int
) -> Int[np.ndarray, "L E"]:
    """Tokens per layer and expert; padding counts nothing."""
    loads = np.empty((expert_ids.shape[0], num_experts), np.int64)
    count_loads(expert_ids, token_mask, loads)
    return loads


@native.compiled
def count_loads(
    expert_ids: Int[np.ndarray, "L N K"], token_mask: Bool[np.ndarray, " N"], loads: Int[np.ndarray, "L E"]
) -> None:
    """Writes what `routed_loads` returns."""
    L, E = loads.shape
    cells = expert_ids[:, token_mask] + np.arange(0, L * E, E)[:, None, None]
    loads[:] = np.bincount(cells.ravel(), minlength=L * E).reshape(L, E)
