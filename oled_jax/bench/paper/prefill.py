"""Figure 14: where the time of a prompt pass goes, replayed."""

import dataclasses

from oled_jax.bench.paper import lineup
from oled_jax.bench.paper.plots import Panel
from oled_jax.bench.paper.record import Findings, Row, Value
from oled_jax.bench.paper.study import Study
from oled_jax.bench.paper.subject import Work

LENGTHS, QUICK_LENGTHS = (128, 512), (48,)


def prefill(study: Study) -> Findings:
    """Figure 14. resident: the same pass with every page on the device. planning: on the host. moving: the rest."""
    rows = []
    workload = study.subject.workloads[0]
    for length in QUICK_LENGTHS if study.quick else LENGTHS:
        work = Work(workload=workload, prompt_tokens=length)
        resident_ms = None
        for policy in study.references:
            reference = study.measure(policy, study.subject.config.num_experts, work, replayed=True)
            rows.append(reference.row("prefill", setting=f"prompt of {length}", x=length))
            resident_ms = reference.values["ttft_ms"].mean
        for capacity in study.capacities:
            for policy in (lineup.LRU, lineup.OLED):
                row = study.measure(policy, capacity, work, replayed=True).row("prefill", f"prompt of {length}", length)
                rows += [row, *_parts(row, resident_ms)]
    panels = [
        Panel(panel="parts", value="part_ms", title=f"Prefill, {lineup.OLED}, capacity {capacity}", label="ms",
              x="x", series="setting", bars=True, capacity=capacity)
        for capacity in study.capacities
    ]  # fmt: skip
    return Findings(
        rows=rows,
        pictures={"": panels},
        notes=[
            "The parts are: the pass with every page resident; planning on the host, which overlaps with the device "
            "under the native carrier; and what is left, waiting for pages.",
            "The cache holds what the request before left behind.",
        ],
    )


def _parts(row: Row, resident_ms: float | None) -> list[Row]:
    if row.policy != lineup.OLED or resident_ms is None:
        return []
    planning_ms, total_ms = row.values["prefill_planning_ms"].mean, row.values["ttft_ms"].mean
    parts = {
        "resident": resident_ms,
        "planning": planning_ms,
        "moving and waiting": total_ms - resident_ms - planning_ms,
    }
    return [
        dataclasses.replace(row, panel="parts", setting=name, values={"part_ms": Value((ms,))})
        for name, ms in parts.items()
    ]
