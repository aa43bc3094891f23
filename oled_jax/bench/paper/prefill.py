"""Figure 14: where the time of a prompt pass goes, replayed."""

import dataclasses

from oled_jax.bench.paper import lineup
from oled_jax.bench.paper.plots import Panel
from oled_jax.bench.paper.record import Findings, Row, Value, find
from oled_jax.bench.paper.study import Study
from oled_jax.bench.paper.subject import Work

LENGTHS, QUICK_LENGTHS = (128, 512), (96,)
POLICIES = (lineup.LRU, lineup.OLED)


def prefill(study: Study) -> Findings:
    """Figure 14."""
    rows: list[Row] = []
    workload = study.subject.workloads[0]
    shortest = 2 * study.subject.block_length  # a shorter prompt has no prompt pass: it begins the first block
    lengths = {max(length, shortest) for length in (QUICK_LENGTHS if study.quick else LENGTHS)}
    for length in sorted(lengths):
        work = Work(workload=workload, prompt_tokens=length)
        cells = [(policy, capacity) for capacity in study.capacities for policy in POLICIES]
        cells += [(policy, 0) for policy in study.references]
        jobs = [study.job(policy, capacity, work, replayed=True) for policy, capacity in cells]
        found = [each.row("prefill", f"prompt of {length}", length) for each in study.subject.measure(jobs)]
        resident = find(found, policy=lineup.reference())
        rows += found
        if resident is not None:
            ours = [row for row in found if row.policy == lineup.OLED]
            rows += [part for row in ours for part in _parts(row, resident)]
    panels = [
        Panel(panel="parts", value="part_ms", title=f"Prefill, {lineup.OLED}, capacity {capacity}", label="ms", x="x",
              across="tokens of the prompt", series="setting", bars=True, capacity=capacity)
        for capacity in study.capacities
    ]  # fmt: skip
    return Findings(
        rows=rows,
        pictures={"": panels},
        notes=[
            "The parts: the same pass with every expert resident; planning on the host, some of which overlaps under "
            "the native carrier; and what is left, moving pages and waiting for them.",
            "The cache holds what the request before left behind.",
        ],
    )


def _parts(row: Row, resident: Row) -> list[Row]:
    """A prompt pass divided. resident: the same with every expert resident."""
    total_ms, planning_ms = (row.values[name].mean for name in ("ttft_ms", "prefill_planning_ms"))
    resident_ms = resident.values["ttft_ms"].mean
    parts = {
        "computing": resident_ms,
        "planning": planning_ms,
        "moving and waiting": total_ms - resident_ms - planning_ms,
    }
    return [
        dataclasses.replace(row, panel="parts", setting=name, values={"part_ms": Value((ms,))})
        for name, ms in parts.items()
    ]
