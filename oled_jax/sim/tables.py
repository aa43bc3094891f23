"""What a grid of replays found: the JSON object, CSV rows, and the table for a terminal. No JAX."""

import csv
import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import oled_jax
from oled_jax.offload.residency import DEFAULT_SPARE
from oled_jax.offload.statistics import GROUPS, cache_figures
from oled_jax.sim.grid import CellResult, Machine
from oled_jax.sim.timing import Carrier, PassTime
from oled_jax.traces.tables import aligned
from oled_jax.traces.trace import Trace, TraceHeader

Figures = Mapping[str, Any]

DECODE, PREFILL = "cache", "cache_prefill"
CSV_GROUP = "passes_of"
OVERLAP = {
    Carrier.PORTABLE: "a layer's transfers, then the FFN of its pages (carrier portable); the CPU beside both",
    Carrier.NATIVE: "a layer's transfers beside the FFN of its resident pages (carrier native); the CPU beside both",
}
AHEAD = "pages fetched ahead move while the link is idle, as the policy claims; a layer waits for what is late"


def cell_object(result: CellResult, header: TraceHeader) -> dict[str, Any]:
    """One cell, ready for JSON (docs/simulator.md)."""
    decode_us = sum(result.times[kind].total for name in (DECODE, "cache_commit") for kind in GROUPS[name])
    return {
        "policy": result.cell.policy,
        "capacity": result.cell.capacity,
        "capacity_share": result.cell.capacity / header.num_experts,
        "tokens": result.tokens,
        "tpot_s": decode_us / result.tokens / 1e6 if result.tokens else None,
        **{name: _group(result, name) for name in GROUPS},
        "notes": list(result.notes),
        "replay_s": result.seconds,
    }


def _group(result: CellResult, name: str) -> dict[str, Any]:
    """The figures of docs/statistics.md over a group of passes, and what only a replay has."""
    kinds = GROUPS[name]
    figures = cache_figures(
        result.statistics,
        policy=result.cell.policy,
        capacities=result.capacities,
        kinds=kinds,
        tokens=result.tokens,
    )
    passes = sum(result.passes[kind] for kind in kinds)
    time = PassTime()
    for kind in kinds:
        time = time.plus(result.times[kind])
    return {
        **figures,
        "planning_us": None,  # nobody waits for the planning of a replay
        "cpu_share": figures["to_cpu"] / figures["misses"] if figures["misses"] else None,
        "prefetch_wasted": figures["prefetched"] - figures["prefetch_used"],
        "pass_us": {part: value / passes for part, value in time._asdict().items()} if passes else None,
    }


def grid_object(results: Sequence[CellResult], trace: Trace, path: Path, machine: Machine) -> dict[str, Any]:
    """Everything that was found and assumed, ready for JSON."""
    return {
        "version": oled_jax.__version__,
        "trace": {"file": str(path), "passes": len(trace), **dataclasses.asdict(trace.header)},
        "hardware": dataclasses.asdict(machine.hardware),
        "assumed": {
            **dataclasses.asdict(machine.options),
            "cpu_experts": machine.cpu_available,
            "spare_slots": DEFAULT_SPARE,
            "overlap": [OVERLAP[machine.options.carrier], AHEAD],
        },
        "cells": [cell_object(result, trace.header) for result in results],
    }


def csv_text(cells: Sequence[Figures]) -> str:
    """One line for each cell and group of passes. What does not apply is empty."""
    rows = [row for cell in cells for row in _csv_rows(cell)]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_rows(cell: Figures) -> Iterator[dict[str, Any]]:
    shared = {name: cell[name] for name in ("policy", "capacity", "capacity_share", "tokens", "tpot_s")}
    for name in GROUPS:
        group = dict(cell[name])
        times = group.pop("pass_us") or dict.fromkeys(PassTime._fields)
        figures = {key: value for key, value in group.items() if key not in shared and not isinstance(value, list)}
        yield {**shared, CSV_GROUP: name, **figures, **{f"pass_us_{part}": value for part, value in times.items()}}


def loads_per_layer(group: Figures) -> float | None:
    """Pages moved to the device by a layer in a pass, ahead of use or on demand; None without passes."""
    layers = group["passes"] * len(group["capacities"])
    return (group["to_gpu"] + group["prefetched"]) / layers if layers else None


def assumption_lines(machine: Machine) -> Iterator[str]:
    """For people: where times come from, which are measured, which are not."""
    yield from machine.hardware.origins
    options = machine.options
    yield (
        f"assumed: rest of a layer {options.trunk_us:g} us, planning {options.planning_us:g} us a layer, "
        f"{options.head_us:g} us outside the layers; {OVERLAP[options.carrier]}; {AHEAD}"
    )


def summary_tables(cells: Sequence[Figures]) -> str:
    """Decode and prefill apart, a line for each cell."""
    decode = [_DECODE_HEAD, *(_decode_row(cell) for cell in cells)]
    prefill = [_PREFILL_HEAD, *(_prefill_row(cell) for cell in cells)]
    blocks = ["decode: denoise and edit passes; TPOT: commit passes too", aligned(decode)]
    if any(cell[PREFILL]["passes"] for cell in cells):
        blocks += ["", "prefill", aligned(prefill)]
    return "\n".join(blocks)


_SHARED_HEAD = ("policy", "capacity", "hits", "utilization", "loads/layer", "CPU share")
_DECODE_HEAD = (*_SHARED_HEAD, "effective", "ahead", "used", "MB/token", "ms/pass", "TPOT ms")
_PREFILL_HEAD = (*_SHARED_HEAD, "ms/pass")


def _shared_cells(cell: Figures, group: Figures) -> tuple[str, ...]:
    return (
        cell["policy"],
        f"{cell['capacity']} {cell['capacity_share']:.0%}",
        _share(group["hit_rate"]),
        _share(group["utilization"]),
        _number(loads_per_layer(group)),
        _share(group["cpu_share"]),
    )


def _decode_row(cell: Figures) -> tuple[str, ...]:
    group = cell[DECODE]
    per_token, tpot = group["bytes_per_token"], cell["tpot_s"]
    return (
        *_shared_cells(cell, group),
        _share(group["effective_transfer_ratio"]),
        str(group["prefetched"]),
        str(group["prefetch_used"]),
        _number(None if per_token is None else per_token / 1e6),
        _milliseconds(group),
        _number(None if tpot is None else tpot * 1e3),
    )


def _prefill_row(cell: Figures) -> tuple[str, ...]:
    return (*_shared_cells(cell, cell[PREFILL]), _milliseconds(cell[PREFILL]))


def _milliseconds(group: Figures) -> str:
    return _number(None if group["pass_us"] is None else group["pass_us"]["total"] / 1e3)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"
