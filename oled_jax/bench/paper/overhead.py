"""Figure 18: the two samplers, and what planning costs, by part."""

import dataclasses

from oled_jax.bench.paper import lineup
from oled_jax.bench.paper.plots import Panel
from oled_jax.bench.paper.record import Findings, Row, extremes
from oled_jax.bench.paper.study import Study
from oled_jax.offload.statistics import PLANNING_PARTS

SAMPLERS = {"LLaDA2.0": False, "LLaDA2.1 (edits)": True}


def overhead(study: Study) -> Findings:
    """Figure 18."""
    rows: list[Row] = []
    for work in study.works:
        for capacity in study.capacities:
            found = study.measure(lineup.OLED, capacity, work).row("planning")
            rows += [found, *_parts(found)]
    shares = [row.values["planning_share"].mean for row in rows if row.panel == "planning"]
    notes = ["Host time of a pass in the manager and the policy; under the native carrier some of it overlaps."]
    if study.subject.generates:
        rows += _samplers(study)
    else:
        notes.append("Replayed routes have no text: the samplers are compared by models that generate.")
    pictures = {
        "samplers": [
            Panel(panel="samplers", value=value, title=title, label=label, x="setting", series="policy", bars=True,
                  capacity=capacity)
            for capacity in study.capacities[:1]
            for value, title, label in (
                ("tpot_ms", f"Time per output token, capacity {capacity}", "ms"),
                ("tokens_per_pass", "Tokens per pass", "tokens"),
            )
        ],
        "planning": [
            Panel(panel="parts", value="us", title=f"Planning, {lineup.OLED}", label="us per pass", x="setting",
                  series="capacity", bars=True)
        ],
    }  # fmt: skip
    return Findings(rows=rows, pictures=pictures, summary=extremes("planning_share", shares), notes=notes)


def _samplers(study: Study) -> list[Row]:
    work = study.works[0]
    return [
        study.measure(policy, capacity, dataclasses.replace(work, editing=editing)).row("samplers", name)
        for name, editing in SAMPLERS.items()
        for capacity in study.capacities
        for policy in (lineup.LRU, lineup.OLED)
    ]


def _parts(row: Row) -> list[Row]:
    return [
        dataclasses.replace(row, panel="parts", setting=part, values={"us": row.values[f"planning_{part}_us"]})
        for part in PLANNING_PARTS
    ]
