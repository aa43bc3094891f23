"""Figure 16: batch sizes and block lengths. Generated where the subject generates, else estimated by the simulator."""

import dataclasses

from oled_jax.bench.paper import lineup
from oled_jax.bench.paper.plots import Panel
from oled_jax.bench.paper.record import Findings, Row
from oled_jax.bench.paper.study import Study
from oled_jax.bench.paper.subject import Work

BATCHES, QUICK_BATCHES = (1, 2, 4, 8, 16, 32), (2,)
BLOCKS, QUICK_BLOCKS = (1, 4, 8, 16, 32, 64), (16,)
POLICIES = (lineup.LRU, lineup.OLED)


def shapes(study: Study) -> Findings:
    """Figure 16."""
    workload = study.subject.workloads[0]
    rows: list[Row] = []
    for batch in QUICK_BATCHES if study.quick else BATCHES:
        rows += _at(study, "batch", Work(workload=workload, batch=batch), batch)
    for block in QUICK_BLOCKS if study.quick else BLOCKS:
        rows += _at(study, "block", Work(workload=workload, block_length=block), block)
    pictures = {
        name: [
            Panel(panel=panel, value="tpot_ms", title=f"Time per token, capacity {capacity}", label="ms", x=x,
                  capacity=capacity, log=True)
            for capacity in study.capacities
        ]
        + [
            Panel(panel=panel, value="activated", title=f"Activated, capacity {capacity}", label="experts per layer",
                  x=x, capacity=capacity)
            for capacity in study.capacities[:1]
        ]
        for name, panel, x in (("batch", "batch", "batch"), ("block", "block", "block_length"))
    }  # fmt: skip
    return Findings(rows=rows, pictures=pictures, notes=[f"Workload {workload}.", _note(study)])


def _at(study: Study, panel: str, work: Work, x: int) -> list[Row]:
    if study.subject.generates:
        jobs = [study.job(policy, capacity, work) for capacity in study.capacities for policy in POLICIES]
        return [found.row(panel, x=x) for found in study.subject.measure(jobs)]
    size = study.estimates.sizes[0]
    rows = [
        study.estimates.row(panel, work, policy, capacity, size=size)
        for capacity in study.capacities
        for policy in POLICIES
    ]
    return [dataclasses.replace(row, x=x) for row in rows]


def _note(study: Study) -> str:
    if study.subject.generates:
        return "A block length is the decoder's: the text differs with it, as passes per token do."
    return "Estimated: every shape would compile programs of its own, which takes longer than its measurement."
