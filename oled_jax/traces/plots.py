"""Plots of locality, several traces in each."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from oled_jax.figures import legend_below, new_figure, save_figure
from oled_jax.traces.locality import GAPS, STATES, Locality, confidence_groups
from oled_jax.traces.tables import STATE_NAMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Traces = Mapping[str, Locality]
SINGLE_COLOUR = "0.7"
MANY = 4  # as many traces leave no room for numbers over bars
WIDE = 100.0
BOUNDARY = GAPS + 1.3  # where the overlap across a block boundary is drawn


def write_plots(traces: Traces, directory: Path) -> list[Path]:
    """Draws every plot that the traces have figures for. Returns the files.

    Raises:
      UsageError: one cannot be written.
    """
    written = []
    for name, draw in PLOTS.items():
        figure = draw(traces)
        if figure is not None:
            save_figure(figure, directory / name)
            written.append(directory / name)
    return written


def _overlap(traces: Traces) -> "Figure":
    figure, (axes,) = new_figure(1)
    gaps = np.arange(1, GAPS + 1)
    for number, (name, found) in enumerate(traces.items()):
        axes.plot(gaps, found.overlap.mean(-1), marker="o", color=f"C{number}", label=name)
        place = BOUNDARY + 0.15 * (number - (len(traces) - 1) / 2)  # beside each other: they may be equal
        axes.plot([place], [found.boundary.mean()], marker="D", color=f"C{number}", linestyle="none")
    axes.axvline(GAPS + 0.6, color="0.85", linewidth=1)
    axes.set_xticks([*gaps, BOUNDARY], [*map(str, gaps), "next\nblock"])
    axes.set_ylim(0, 1.02)
    axes.set(xlabel="iterations apart, in one block", ylabel="share of experts in common")
    axes.set_title("Expert overlap between iterations")
    legend_below(figure, axes, columns=min(len(traces), MANY))
    return figure


def _cosine(traces: Traces) -> "Figure | None":
    recorded = {name: found.cosine.mean(-1) for name, found in traces.items() if not np.isnan(found.cosine).all()}
    if not recorded:
        return None
    figure, (axes,) = new_figure(1)
    for number, name in enumerate(traces):
        if name in recorded:
            axes.plot(np.arange(1, GAPS + 1), recorded[name], marker="o", color=f"C{number}", label=name)
    axes.set(xlabel="iterations apart, in one block", ylabel="cosine, mean over layers and tokens")
    axes.set_title("Similarity of layer inputs between iterations")
    legend_below(figure, axes, columns=min(len(recorded), MANY))
    return figure


def _stability(traces: Traces) -> "Figure":
    figure, panels = new_figure(len(STATES))
    groups = np.arange(len(confidence_groups()))
    for s, (axes, state) in enumerate(zip(panels, STATES, strict=True)):
        for number, (name, found) in enumerate(traces.items()):
            axes.plot(groups, found.kept[s], marker="o", color=f"C{number}", label=name)
        axes.set_xticks(groups, confidence_groups(), fontsize="small")
        axes.set(title=STATE_NAMES[state], xlabel="confidence", xlim=(-0.3, groups[-1] + 0.3), ylim=(0, 1.02))
    panels[0].set_ylabel("share of a token's experts\nthat the next iteration keeps")
    figure.suptitle("Routing stability by token state and confidence")
    legend_below(figure, panels[0], columns=min(len(traces), MANY))
    return figure


def _layers(traces: Traces) -> "Figure":
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = new_figure(1)
    for number, (name, found) in enumerate(traces.items()):
        layers = np.arange(found.header.num_layers)
        axes.plot(layers, found.activation_ratio, marker="o", color=f"C{number}", label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="MoE layer", ylabel="activated experts / experts", title="Activation ratio by layer")
    legend_below(figure, axes, columns=min(len(traces), MANY))
    return figure


def _cost(traces: Traces) -> "Figure":
    figure, panels = new_figure(3)
    costs = [found.cost for found in traces.values()]
    bars = (
        ("Activated by a pass", "B", [c.pass_bytes for c in costs], [c.single_bytes for c in costs]),
        ("Activated per generated token", "B", [c.token_bytes for c in costs], [c.single_bytes for c in costs]),
        ("Computed per generated token", "FLOP", [c.token_flops for c in costs], [c.single_flops for c in costs]),
    )
    places = np.arange(len(traces))
    for axes, (title, unit, block, single) in zip(panels, bars, strict=True):
        largest = max(value or 0.0 for value in (*block, *single))
        prefix, scale = ("G", 1e9) if largest >= 1e9 else ("M", 1e6)
        for offset, values, label in ((-0.2, single, "one token at a time"), (0.2, block, "block decoding")):
            heights = [(value or 0.0) / scale for value in values]
            colour = SINGLE_COLOUR if offset < 0 else [f"C{number}" for number in places]
            drawn = axes.bar(places + offset, heights, 0.38, color=colour, label=label)
            if len(traces) < MANY:
                axes.bar_label(drawn, fmt="{:.3g}", fontsize="x-small", padding=2)
        if largest > WIDE * min(single):  # or small models would not be seen
            axes.set_yscale("log")
        axes.set_xticks(places, list(traces), rotation=20 if len(traces) > 2 else 0, fontsize="small")
        axes.set(title=title, ylabel=prefix + unit)
        axes.margins(y=0.12)
    figure.suptitle("Routed experts: block decoding (coloured) against one token at a time (grey)")
    return figure


PLOTS: Mapping[str, Callable[[Traces], "Figure | None"]] = {
    "overlap.png": _overlap,
    "cosine.png": _cosine,
    "stability.png": _stability,
    "layers.png": _layers,
    "cost.png": _cost,
}
