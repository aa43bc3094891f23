"""Figures 4, 7 and 10: what traces alone say. No time is involved."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from oled_jax.bench.paper.record import Findings, Method, Picture, Row, Value
from oled_jax.bench.paper.study import Study
from oled_jax.traces.locality import GAPS, STATES, Locality, confidence_groups
from oled_jax.traces.locality_meter import measure_locality
from oled_jax.traces.plots import PLOTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


REQUESTS = 16  # of each workload


def cost(study: Study) -> Findings:
    """Figure 4: bytes and FLOPs of routed experts, blocks against one token at a time."""
    found = _localities(study)
    rows = []
    for name, each in found.items():
        costs = each.cost
        block = {"pass_mb": costs.pass_bytes, "token_mb": costs.token_bytes, "token_mflop": costs.token_flops}
        single = {"pass_mb": costs.single_bytes, "token_mb": costs.single_bytes, "token_mflop": costs.single_flops}
        for setting, figures in (("block decoding", block), ("one token at a time", single)):
            values = {key: value / 1e6 for key, value in figures.items() if value is not None}
            rows.append(_row(study, "cost", name, values, setting=setting))
    single_pass = [each.cost.pass_bytes / each.cost.single_bytes for each in found.values() if each.cost.pass_bytes]
    return Findings(
        rows=rows,
        pictures=_pictures(found, {"": "cost.png"}),
        summary={"pass_bytes_ratio": float(np.mean(single_pass)) if single_pass else None},
    )


def locality(study: Study) -> Findings:
    """Figure 7: how much of an iteration's experts later ones need, and how similar their inputs are."""
    found = _localities(study)
    rows = []
    for name, each in found.items():
        for gap in range(1, GAPS + 1):
            values = {"overlap": each.overlap[gap - 1].mean(), "cosine": each.cosine[gap - 1].mean()}
            rows.append(_row(study, "overlap", name, values, setting=f"{gap} apart", x=gap))
        rows.append(_row(study, "overlap", name, {"overlap": each.boundary.mean()}, setting="next block"))
    return Findings(
        rows=[row for row in rows if row.values],
        pictures=_pictures(found, {"overlap": "overlap.png", "cosine": "cosine.png"}),
        summary={
            "adjacent_overlap": _mean([each.overlap[0].mean() for each in found.values()]),
            "boundary_overlap": _mean([each.boundary.mean() for each in found.values()]),
        },
    )


def signals(study: Study) -> Findings:
    """Figure 10: what confidence says about kept routes, and how layers differ."""
    found = _localities(study)
    rows = []
    for name, each in found.items():
        for s, state in enumerate(STATES):
            for g, group in enumerate(confidence_groups()):
                values = {"kept": each.kept[s, g], "tokens": float(each.tokens[s, g])}
                rows.append(_row(study, "confidence", name, values, setting=f"{state}, {group}", x=g))
        for layer, ratio in enumerate(each.activation_ratio):
            rows.append(_row(study, "layers", name, {"activation_ratio": ratio}, setting=f"layer {layer}", x=layer))
    return Findings(
        rows=[row for row in rows if row.values],
        pictures=_pictures(found, {"confidence": "stability.png", "layers": "layers.png"}),
        summary={
            "confidence_correlation": _mean([each.correlation["unwritten"] for each in found.values()]),
            "layer_heterogeneity": _mean([each.heterogeneity for each in found.values()]),
        },
    )


def _localities(study: Study) -> dict[str, Locality]:
    """Of longer traces than those of the other figures: nothing is timed, and short answers say little."""
    works = study.works
    if not study.quick:
        works = [dataclasses.replace(work, requests=REQUESTS, compared=study.subject.generates) for work in works]
    return {work.workload: measure_locality(study.subject.trace(work)) for work in works}


def _pictures(found: Mapping[str, Locality], files: Mapping[str, str]) -> dict[str, Picture]:
    return {suffix: functools.partial(_drawn, PLOTS[file], found) for suffix, file in files.items()}


def _drawn(draw: "Callable[[Mapping[str, Locality]], Figure | None]", found: Mapping[str, Locality]) -> "Figure | None":
    """With the origin in the title."""
    figure = draw(found)
    if figure is not None:
        kind = next(iter(found.values())).header.source
        figure.suptitle(f"{figure.get_suptitle()} (counted from {kind} routing)".strip())
    return figure


def _row(
    study: Study, panel: str, workload: str, values: Mapping[str, float], setting: str, x: float | None = None
) -> Row:
    known = {name: Value((float(value),)) for name, value in values.items() if not np.isnan(value)}
    return Row(
        panel=panel, method=Method.ROUTING, workload=workload, batch=1, block_length=study.subject.block_length,
        setting=setting, x=x, values=known,
    )  # fmt: skip


def _mean(values: list[float]) -> float | None:
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else None
