"""Figure 13: how far policies are from the oracle, over capacities. All of them replay the same trace."""

import dataclasses

from oled_jax.bench.paper import lineup
from oled_jax.bench.paper.plots import Panel
from oled_jax.bench.paper.record import Findings, Row, extremes
from oled_jax.bench.paper.study import Study
from oled_jax.bench.paper.subject import Work

MEASURED, ESTIMATED = "measured", "estimated"
SHARES, QUICK_SHARES = (1 / 16, 1 / 4, 1 / 2, 3 / 4), ()


def bound(study: Study) -> Findings:
    """Figure 13."""
    work, sizes = study.works[0], study.estimates.sizes
    rows: list[Row] = []
    for capacity in study.sweep(QUICK_SHARES if study.quick else SHARES):
        rows += _measured(study, work, capacity)
        for size in sizes:
            rows += _estimated(study, work, capacity, size)
    ours = [row for row in rows if row.policy == lineup.OLED and row.capacity in study.capacities]
    summary: dict[str, float | None] = {}
    for panel in (MEASURED, ESTIMATED):
        over = [row.values["over_oracle"].mean for row in ours if row.panel == panel]
        summary |= extremes(f"{panel}_{lineup.OLED}_over_oracle", over)
    return Findings(
        rows=rows,
        pictures={"": _panels(MEASURED), **{f"estimated-{size}": _panels(ESTIMATED, size) for size in sizes}},
        summary=summary,
        notes=[f"Workload {work.workload}. The oracle's residents appear free of charge: no system can do that."],
    )


def _panels(panel: str, size: str | None = None) -> list[Panel]:
    setting, of = (None, "") if size is None else (f"pages of {size}", f", {size} pages")
    return [
        Panel(panel=panel, value="tpot_ms", title=f"Time per token{of}", label="ms", setting=setting),
        Panel(
            panel=panel, value="over_oracle", title="Time over the oracle's", label="%", scale=100, setting=setting
        ),
        Panel(panel=panel, value="hit_rate", title="Hit rate", label="hits / activated", setting=setting),
    ]  # fmt: skip


def _policies() -> list[str]:
    return [lineup.LRU, *lineup.own(), *lineup.bounds()]


def _measured(study: Study, work: Work, capacity: int) -> list[Row]:
    jobs = [study.job(policy, capacity, work, replayed=True) for policy in _policies()]
    return _over_oracle([found.row(MEASURED) for found in study.subject.measure(jobs)])


def _estimated(study: Study, work: Work, capacity: int, size: str) -> list[Row]:
    estimate = study.estimates.row
    return _over_oracle([estimate(ESTIMATED, work, policy, capacity, size=size) for policy in _policies()])


def _over_oracle(rows: list[Row]) -> list[Row]:
    """With the time over the oracle's, as a share of it."""
    ideal = next(row for row in rows if row.policy == lineup.ORACLE).values["tpot_ms"].mean
    return [
        dataclasses.replace(
            row, values={**row.values, "over_oracle": row.values["tpot_ms"].map(lambda ms: ms / ideal - 1)}
        )
        for row in rows
    ]
