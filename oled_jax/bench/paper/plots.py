"""Pictures of rows: bars or lines, with the origin of the rows in every panel's title."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from oled_jax.figures import legend_below, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from oled_jax.bench.paper.record import Row

BAR_SPAN = 0.8  # of the distance between two groups of bars
MANY = 4  # entries in a row of the legend
ROOM = 48  # characters below an axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes.

    panel: whose rows. value: of them, on the vertical axis. x, series: fields of a row; a series is a colour. bars: or
    lines. setting, capacity: only rows with these. scale: factor for the axis. log: of the vertical axis. across: what
    the horizontal axis shows, if the field's name does not say it.
    """

    panel: str
    value: str
    title: str
    label: str
    x: str = "capacity"
    series: str | None = "policy"
    bars: bool = False
    setting: str | None = None
    capacity: int | None = None
    scale: float = 1.0
    log: bool = False
    across: str | None = None

    def shows(self, row: "Row") -> bool:
        """Whether the row is one of its points."""
        return (
            row.panel == self.panel
            and self.value in row.values
            and self.setting in (None, row.setting)
            and self.capacity in (None, row.capacity)
        )


def draw_panels(rows: "Sequence[Row]", panels: Sequence[Panel]) -> "Figure | None":
    """A figure of panels side by side; None if no row belongs to any."""
    drawn = [(panel, [row for row in rows if panel.shows(row)]) for panel in panels]
    drawn = [(panel, chosen) for panel, chosen in drawn if chosen]
    if not drawn:
        return None
    figure, axes = new_figure(len(drawn))
    for each, (panel, chosen) in zip(axes, drawn, strict=True):
        (_draw_bars if panel.bars else _draw_lines)(each, panel, chosen)
        each.set_title(f"{panel.title}\n({origin(chosen)})", fontsize="small")
        each.set_ylabel(panel.label)
        if panel.log:
            each.set_yscale("log")
        else:
            each.set_ylim(bottom=min(0.0, each.get_ylim()[0]))
    if drawn[0][0].series is not None:
        series = _ordered(drawn[0][1], drawn[0][0].series)
        legend_below(figure, axes[0], columns=min(len(series), MANY))
    return figure


def origin(rows: "Sequence[Row]") -> str:
    """`measured: generated, replayed`, or `ESTIMATED by the simulator`."""
    methods: dict[str, dict[str, None]] = {}
    for row in rows:
        methods.setdefault(row.method.source, {})[row.method.value] = None
    words = []
    for source, names in methods.items():
        words.append("ESTIMATED by the simulator" if source == "estimated" else f"{source}: {', '.join(names)}")
    return "; ".join(words)


def _draw_lines(axes: "Axes", panel: Panel, rows: "Sequence[Row]") -> None:
    for name in _ordered(rows, panel.series):
        points = _points(panel, [row for row in rows if _field(row, panel.series) == name])
        places = sorted(points)
        means, spreads = zip(*(points[place] for place in places), strict=True)
        axes.errorbar(places, means, yerr=spreads, marker="o", markersize=4, capsize=2, label=str(name))
    axes.set_xlabel(panel.across or _WORDS.get(panel.x, panel.x))


def _draw_bars(axes: "Axes", panel: Panel, rows: "Sequence[Row]") -> None:
    groups, series = _ordered(rows, panel.x), _ordered(rows, panel.series)
    width = BAR_SPAN / len(series)
    for number, name in enumerate(series):
        points = _points(panel, [row for row in rows if _field(row, panel.series) == name])
        places = [groups.index(group) - BAR_SPAN / 2 + width * (number + 0.5) for group in points]
        means, spreads = zip(*points.values(), strict=True)
        axes.bar(places, means, width, yerr=spreads if any(spreads) else None, capsize=1, label=_entry(panel, name))
    axes.set_xlabel(panel.across or "")
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    if max(len(str(group)) for group in groups) * len(groups) > ROOM:
        axes.tick_params(axis="x", labelrotation=90, labelsize="x-small")
    else:
        axes.tick_params(axis="x", labelsize="small")


def _points(panel: Panel, rows: "Sequence[Row]") -> dict[Any, tuple[float, float]]:
    """By place: mean over the rows there (workloads, for one) and half the mean spread of their repeats."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(_field(row, panel.x), []).append(row)
    return {
        place: (
            float(np.mean([row.values[panel.value].mean for row in there])) * panel.scale,
            float(np.mean([row.values[panel.value].spread for row in there])) * panel.scale / 2,
        )
        for place, there in found.items()
    }


def _entry(panel: Panel, name: Any) -> str:
    """Of the legend."""
    return f"capacity {name}" if panel.series == "capacity" else str(name)


def _field(row: "Row", name: str | None) -> Any:
    return "" if name is None else getattr(row, name)


def _ordered(rows: "Sequence[Row]", name: str | None) -> list[Any]:
    return list(dict.fromkeys(_field(row, name) for row in rows))


_WORDS = {
    "capacity": "capacity, experts per layer",
    "batch": "batch size",
    "block_length": "block length",
}
