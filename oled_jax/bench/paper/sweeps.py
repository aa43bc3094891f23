"""Figure 17: capacities up to full residency, measured; bandwidths of the link, estimated."""

from collections.abc import Sequence

from oled_jax.bench.paper import lineup
from oled_jax.bench.paper.plots import Panel
from oled_jax.bench.paper.record import Findings, Picture, Row, find
from oled_jax.bench.paper.study import Study

SHARES, QUICK_SHARES = (1 / 16, 1 / 4, 1 / 2, 3 / 4, 1.0), (1.0,)
BANDWIDTHS = (16.0, 32.0, 64.0, 128.0)  # 10^9 bytes a second
POLICIES = (lineup.LRU, lineup.OLED)


def sweeps(study: Study) -> Findings:
    """Figure 17."""
    work = study.works[0]
    capacities = study.sweep(QUICK_SHARES if study.quick else SHARES)
    jobs = [study.job(policy, capacity, work) for capacity in capacities for policy in POLICIES]
    jobs += [study.job(policy, 0, work) for policy in study.references]
    rows = [found.row("capacity") for found in study.subject.measure(jobs)]
    rows += [
        study.estimates.row("capacity, estimated", work, policy, capacity, size=size)
        for size in study.estimates.sizes
        for capacity in capacities
        for policy in POLICIES
    ]
    rows += [
        study.estimates.row("bandwidth", work, policy, capacity, size=size, h2d_gbs=h2d_gbs)
        for size in study.estimates.sizes
        for capacity in study.capacities
        for policy in POLICIES
        for h2d_gbs in BANDWIDTHS
    ]
    pictures: dict[str, Picture] = {
        "capacity": [
            Panel(panel="capacity", value="tpot_ms", title="Time per output token", label="ms"),
            Panel(panel="capacity", value="hit_rate", title="Hit rate", label="hits / activated"),
        ],
        "estimated": [
            Panel(panel="capacity, estimated", value="tpot_ms", title=f"Pages of {size}",
                  label="ms per token, experts only", setting=f"pages of {size}")
            for size in study.estimates.sizes
        ],
        "bandwidth": [
            Panel(panel="bandwidth", value="tpot_ms", title=f"Pages of {size}, {capacity}",
                  label="ms per token, experts only", x="x", across="GB/s of the link", setting=f"pages of {size}",
                  capacity=capacity)
            for size in study.estimates.sizes
            for capacity in study.capacities
        ],
    }  # fmt: skip
    return Findings(
        rows=rows,
        pictures=pictures,
        summary={"oled_over_full_residency": _over_full(study, rows)},
        notes=[f"Workload {work.workload}. Bandwidths replace that of the profile, in 10^9 bytes a second."],
    )


def _over_full(study: Study, rows: Sequence[Row]) -> float | None:
    """Time per token of `oled` at the greater of the two capacities over that of `all`, minus 1."""
    if not study.references or len(study.capacities) < 2:
        return None
    ours = find(rows, panel="capacity", policy=lineup.OLED, capacity=study.capacities[-1])
    full = find(rows, panel="capacity", policy=lineup.reference())
    if ours is None or full is None or "tpot_ms" not in ours.values:
        return None
    return ours.values["tpot_ms"].mean / full.values["tpot_ms"].mean - 1
