"""Figure 15: OLED's parts switched on one after the other, and each part against its alternatives."""

from oled_jax.bench.paper import lineup
from oled_jax.bench.paper.plots import Panel
from oled_jax.bench.paper.record import Findings, Row
from oled_jax.bench.paper.study import Study

PRIORITY, ALLOCATION, DISPATCH = "retention", "allocation", "dispatch"


def ablation(study: Study) -> Findings:
    """Figure 15."""
    rows = []
    for work in study.works:
        for capacity in study.capacities:
            steps = {
                name: study.measure(spec, capacity, work, cpu=spec == lineup.STEPS["+ dispatch"])
                for name, spec in lineup.STEPS.items()
            }
            rows += [found.row("steps", name) for name, found in steps.items()]
            lfu = study.measure(lineup.LFU_RETENTION, capacity, work)
            load_only = study.measure(lineup.LOAD_ONLY, capacity, work, cpu=True)
            rows += [steps[name].row(PRIORITY, label) for name, label in (("LRU", "lru"), ("+ priority", "priority"))]
            rows += [
                lfu.row(PRIORITY, "lfu"),
                steps["+ priority"].row(ALLOCATION, "uniform"),
                steps["+ allocation"].row(ALLOCATION, "adaptive"),
                load_only.row(DISPATCH, "load only"),
                steps["+ dispatch"].row(DISPATCH, "reuse-aware"),
            ]
    return Findings(rows=rows, pictures=_pictures(study), summary=_summary(study, rows), notes=_notes())


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
        pictures[f"parts-{capacity}"] = [
            bars(PRIORITY, "hit_rate", "Retention", "hits / activated", capacity),
            bars(ALLOCATION, "utilization", "Allocation", "hits / capacity", capacity),
            bars(DISPATCH, "effective_transfer_ratio", "Dispatch", "transfers used again", capacity),
        ]
    return pictures


def _summary(study: Study, rows: list[Row]) -> dict[str, float | None]:
    """What each step takes off the time per token, mean over workloads, at each capacity."""
    summary: dict[str, float | None] = {}
    names = list(lineup.STEPS)
    for capacity in study.capacities:
        at = [row for row in rows if row.panel == "steps" and row.capacity == capacity and "tpot_ms" in row.values]
        means = [_mean([row.values["tpot_ms"].mean for row in at if row.setting == name]) for name in names]
        for name, before, after in zip(names[1:], means, means[1:], strict=False):
            key = f"saved_by_{name.removeprefix('+ ')}_at_{capacity}"
            summary[key] = None if before is None or after is None else 1 - after / before
    return summary


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _notes() -> list[str]:
    return ["The first three steps transfer every miss; the fourth computes some on the CPU."]
