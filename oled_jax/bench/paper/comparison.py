"""Figures 5 and 12: every policy by workload, at the paper's two capacities."""

from collections.abc import Sequence

from oled_jax.bench.paper import lineup
from oled_jax.bench.paper.plots import Panel
from oled_jax.bench.paper.record import Findings, Picture, Row, extremes, find
from oled_jax.bench.paper.study import Study

MEASURED, ESTIMATED = "measured", "estimated"


def comparison(study: Study) -> Findings:
    """Both figures: time per output token, utilization and hit rate of all policies, the bounds and `all`."""
    rows = _measured(study) + _estimated(study)
    pictures: dict[str, Picture] = {}
    for capacity in study.capacities:
        pictures[f"tpot-{capacity}"] = [_bars("tpot_ms", "Time per output token", "ms", MEASURED, capacity)] + [
            _bars("tpot_ms", "Time per token", "ms, experts only", ESTIMATED, capacity, setting=f"pages of {size}")
            for size in study.estimates.sizes
        ]
        pictures[f"cache-{capacity}"] = [
            _bars("utilization", "Utilization", "hits / capacity", MEASURED, capacity),
            _bars("hit_rate", "Hit rate", "hits / activated", MEASURED, capacity),
        ]
    return Findings(rows=rows, pictures=pictures, summary=_summary(rows), notes=_notes(rows))


def _bars(value: str, title: str, label: str, panel: str, capacity: int, setting: str | None = None) -> Panel:
    title = f"{title}, capacity {capacity}" + (f", {setting}" if setting else "")
    return Panel(
        panel=panel, value=value, title=title, label=label, x="policy", series="workload", bars=True,
        capacity=capacity, setting=setting,
    )  # fmt: skip


def _measured(study: Study) -> list[Row]:
    jobs = []
    for work in study.works:
        jobs += [
            study.job(policy, capacity, work)
            for capacity in study.capacities
            for policy in [*lineup.deployable(), *lineup.bounds()]
        ]
        jobs += [study.job(policy, 0, work) for policy in study.references]
    return [found.row(MEASURED) for found in study.subject.measure(jobs)]


def _estimated(study: Study) -> list[Row]:
    return [
        study.estimates.row(ESTIMATED, work, policy, capacity, size=size)
        for size in study.estimates.sizes
        for work in study.works
        for capacity in study.capacities
        for policy in [*lineup.deployable(), *lineup.bounds()]
    ]


def _summary(rows: Sequence[Row]) -> dict[str, float | None]:
    """How much faster, and how much better utilized, `oled` is than each other deployable policy."""
    summary: dict[str, float | None] = {}
    others = [policy for policy in lineup.deployable() if policy not in lineup.own()]
    for panel in (MEASURED, ESTIMATED):
        faster, fuller = [], []
        for ours in [row for row in rows if row.panel == panel and row.policy == lineup.OLED]:
            for policy in others:
                theirs = find(
                    rows, panel=panel, policy=policy, capacity=ours.capacity, workload=ours.workload,
                    setting=ours.setting,
                )  # fmt: skip
                if theirs is None:
                    continue
                faster += _ratio(theirs, ours, "tpot_ms")
                fuller += _ratio(ours, theirs, "utilization")
        summary |= extremes(f"{panel}_tpot_speedup", faster) | extremes(f"{panel}_utilization_ratio", fuller)
    return summary


def _ratio(row: Row, other: Row, name: str) -> list[float]:
    if name not in row.values or name not in other.values or not other.values[name].mean:
        return []
    return [row.values[name].mean / other.values[name].mean]


def _notes(rows: Sequence[Row]) -> list[str]:
    """Whether every policy generated the same text: exact where misses are transferred, else up to rounding."""
    differing = []
    for workload in dict.fromkeys(row.workload for row in rows):
        texts = {row.policy: row.digest for row in rows if row.workload == workload and row.digest is not None}
        expected = texts.get(lineup.reference(), next(iter(texts.values()), None))
        differing += [f"{policy} ({workload})" for policy, digest in texts.items() if digest != expected]
    if not differing:
        return []
    return [f"Other tokens than the reference, which experts computed on the CPU explain: {', '.join(differing)}."]
