"""Plots of a grid of replays: figures of decoding over capacity, a line for each policy."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oled_jax.figures import legend_below, new_figure, save_figure
from oled_jax.sim.tables import DECODE, loads_per_layer

Figures = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """One picture: a figure of every cell. value: None where it does not apply."""

    file: str
    title: str
    label: str
    value: Callable[[Figures], float | None]


def _hit_rate(cell: Figures) -> float | None:
    return cell[DECODE]["hit_rate"]


def _utilization(cell: Figures) -> float | None:
    return cell[DECODE]["utilization"]


def _loads(cell: Figures) -> float | None:
    return loads_per_layer(cell[DECODE])


def _pass_ms(cell: Figures) -> float | None:
    times = cell[DECODE]["pass_us"]
    return None if times is None else times["total"] / 1e3


def _tpot_ms(cell: Figures) -> float | None:
    return None if cell["tpot_s"] is None else cell["tpot_s"] * 1e3


PLOTS = (
    Plot(file="hit_rate.png", title="Hit rate", label="hits / activated experts", value=_hit_rate),
    Plot(file="utilization.png", title="Utilization", label="hits / capacity", value=_utilization),
    Plot(file="loads.png", title="Pages moved to the device", label="pages per layer and pass", value=_loads),
    Plot(file="pass_time.png", title="Estimated time of a pass", label="ms", value=_pass_ms),
    Plot(file="tpot.png", title="Estimated time per output token", label="ms", value=_tpot_ms),
)


def write_plots(cells: Sequence[Figures], directory: Path, model: str) -> list[Path]:
    """Draws every plot and returns the files. Raises UsageError where one cannot be written.

    Args:
      model: of the trace, for the titles.
    """
    return [_draw(plot, cells, directory / plot.file, model) for plot in PLOTS]


def _draw(plot: Plot, cells: Sequence[Figures], path: Path, model: str) -> Path:
    figure, (axes,) = new_figure(1)
    policies = list(dict.fromkeys(cell["policy"] for cell in cells))
    for policy in policies:
        points = [(cell["capacity"], plot.value(cell)) for cell in cells if cell["policy"] == policy]
        known = [(capacity, value) for capacity, value in points if value is not None]
        axes.plot([x for x, _ in known], [y for _, y in known], marker="o", label=policy)
    axes.set(title=f"{plot.title}: {model}", xlabel="capacity, experts per layer", ylabel=plot.label)
    axes.set_ylim(bottom=0)
    legend_below(figure, axes, columns=min(len(policies), 3))
    save_figure(figure, path)
    return path
