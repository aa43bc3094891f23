"""Figure 13: how far policies are from the oracle, over capacities. All of them replay the same trace."""

import dataclasses

from oled_jax.bench.paper import lineup
from oled_jax.bench.paper.plots import Panel
from oled_jax.bench.paper.record import Findings, Row, Value, extremes
from oled_jax.bench.paper.study import Study
from oled_jax.bench.paper.subject import Work

SHARES, QUICK_SHARES = (1 / 16, 1 / 4, 1 / 2, 3 / 4), ()


def bound(study: Study) -> Findings:
    """Figure 13."""
    work = study.works[0]
    rows, over = [], []
    for capacity in study.sweep(QUICK_SHARES if study.quick else SHARES):
        here = _at(study, work, capacity)
        rows += here
        if capacity in study.capacities:
            over += [row.values["over_oracle"].mean for row in here if row.policy in lineup.own()]
    return Findings(
        rows=rows,
        pictures={
            "": [
                Panel(panel="bound", value="tpot_ms", title="Time per output token", label="ms"),
                Panel(panel="bound", value="over_oracle", title="Time over the oracle's", label="%", scale=100),
                Panel(panel="bound", value="hit_rate", title="Hit rate", label="hits / activated"),
            ]
        },
        summary=extremes("oled_over_oracle", over),
        notes=[f"Workload {work.workload}. The oracle's residents appear free of charge: no system can do that."],
    )


def _at(study: Study, work: Work, capacity: int) -> list[Row]:
    policies = [lineup.LRU, *lineup.own(), *lineup.bounds()]
    found = {policy: study.measure(policy, capacity, work, replayed=True).row("bound") for policy in policies}
    ideal = found[lineup.ORACLE].values["tpot_ms"].mean
    return [_over(row, ideal) for row in found.values()]


def _over(row: Row, ideal: float) -> Row:
    over = Value(tuple(run / ideal - 1 for run in row.values["tpot_ms"].runs))
    return dataclasses.replace(row, values={**row.values, "over_oracle": over})
