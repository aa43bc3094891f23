"""Figure 15: OLED's parts switched on one after the other, and each part against its alternatives."""

import dataclasses
import itertools
from collections.abc import Sequence

from oled_jax.bench.paper import lineup
from oled_jax.bench.paper.plots import Panel
from oled_jax.bench.paper.record import Findings, Row
from oled_jax.bench.paper.study import Study

PRIORITY, ALLOCATION, DISPATCH = "retention", "allocation", "dispatch"


def ablation(study: Study) -> Findings:
    """Figure 15."""
    rows: list[Row] = []
    specs = [*lineup.STEPS.values(), lineup.LFU_RETENTION, lineup.LOAD_ONLY]
    on_cpu = {lineup.STEPS["+ dispatch"], lineup.LOAD_ONLY}
    for work in study.works:
        for capacity in study.capacities:
            found = study.subject.measure([study.job(spec, capacity, work, cpu=spec in on_cpu) for spec in specs])
            steps = dict(zip(lineup.STEPS, found, strict=False))
            lfu, load_only = found[len(steps) :]
            rows += [each.row("steps", name) for name, each in steps.items()]
            rows += [steps[name].row(PRIORITY, label) for name, label in (("LRU", "lru"), ("+ priority", "priority"))]
            rows += [
                lfu.row(PRIORITY, "lfu"),
                steps["+ priority"].row(ALLOCATION, "uniform"),
                steps["+ allocation"].row(ALLOCATION, "adaptive"),
                load_only.row(DISPATCH, "load only"),
                steps["+ dispatch"].row(DISPATCH, "reuse-aware"),
            ]
    rows += _estimated(study)
    return Findings(
        rows=rows,
        pictures=_pictures(study),
        summary=_summary(study, rows),
        notes=["The first three steps transfer every miss; the fourth computes some on the CPU."],
    )


def _estimated(study: Study) -> list[Row]:
    """The steps again, and load-only dispatch beside the last, with pages of each size."""
    rows = []
    for size in study.estimates.sizes:
        for work in study.works:
            for capacity in study.capacities:
                for name, spec in {**lineup.STEPS, "load only": lineup.LOAD_ONLY}.items():
                    row = study.estimates.row(f"estimated, {size}", work, spec, capacity, size=size)
                    rows.append(dataclasses.replace(row, setting=name))
    return rows


def _pictures(study: Study) -> dict[str, list[Panel]]:
    def bars(panel: str, value: str, title: str, label: str, capacity: int) -> Panel:
        return Panel(
            panel=panel, value=value, title=f"{title}, capacity {capacity}", label=label, x="setting",
            series="workload", bars=True, capacity=capacity,
        )  # fmt: skip

    pictures = {}
    for capacity in study.capacities:
        pictures[f"steps-{capacity}"] = [
            bars("steps", "tpot_ms", "Time per output token", "ms", capacity),
            bars("steps", "hit_rate", "Hit rate", "hits / activated", capacity),
        ]
        pictures[f"estimated-{capacity}"] = [
            bars(f"estimated, {size}", "tpot_ms", f"Pages of {size}", "ms per token, experts only", capacity)
            for size in study.estimates.sizes
        ]
        pictures[f"parts-{capacity}"] = [
            bars(PRIORITY, "hit_rate", "Retention", "hits / activated", capacity),
            bars(ALLOCATION, "utilization", "Allocation", "hits / capacity", capacity),
            bars(DISPATCH, "effective_transfer_ratio", "Dispatch", "transfers used again", capacity),
        ]
    return pictures


def _summary(study: Study, rows: Sequence[Row]) -> dict[str, float | None]:
    """What each step takes off the time per token, mean over workloads, at each capacity."""
    panels = {"": "steps", **{f", estimated for {size}": f"estimated, {size}" for size in study.estimates.sizes}}
    summary: dict[str, float | None] = {}
    for suffix, panel in panels.items():
        for capacity in study.capacities:
            at = [row for row in rows if row.panel == panel and row.capacity == capacity and "tpot_ms" in row.values]
            means = {
                name: _mean([row.values["tpot_ms"].mean for row in at if row.setting == name]) for name in lineup.STEPS
            }
            for (_, before), (name, after) in itertools.pairwise(means.items()):
                saved = None if before is None or after is None else 1 - after / before
                summary[f"saved by {name.removeprefix('+ ')} at {capacity}{suffix}"] = saved
    return summary


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
