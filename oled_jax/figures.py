"""What every command that draws shares. matplotlib is optional: it is imported when something is drawn."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oled_jax.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150


def check_plots(directory: Path) -> None:
    """Raises UsageError if no plot can be made or written there, before any work is done."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--out draws plots, which needs matplotlib: pip install 'oled_jax[plots]'")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {directory} cannot be made: {error.strerror}") from error


def save_figure(figure: "Figure", path: Path) -> None:
    """Writes a PNG, whole or not at all. Raises UsageError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(temporary, dpi=DPI, format="png")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def new_figure(panels: int) -> "tuple[Figure, Sequence[Axes]]":
    """A figure of panels side by side, in the style of all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0) if panels == 1 else (3.6 * panels, 3.8), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for each in axes:
        each.grid(axis="y", color="0.9")
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def legend_below(figure: "Figure", axes: "Axes", *, columns: int) -> None:
    """The legend of one panel for the whole figure, below it, where it hides nothing."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)
