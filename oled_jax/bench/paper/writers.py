"""A figure's files: JSON with everything, CSV with a line for each value, PNGs."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oled_jax.bench.paper.plots import draw_panels
from oled_jax.bench.paper.record import Findings, Row
from oled_jax.bench.paper.registry import PaperFigure
from oled_jax.figures import save_figure
from oled_jax.report import write_json, write_text

KEYS = ("panel", "source", "method", "policy", "capacity", "workload", "batch", "block_length", "setting", "x")
COLUMNS = (*KEYS, "value", "mean", "spread", "repeats")


def figure_object(figure: PaperFigure, findings: Findings, described: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object (`schema.py`). described: the run's part of it."""
    return {
        "figures": list(figure.numbers),
        "paper_shows": figure.shows,
        "here": figure.here,
        **described,
        "notes": list(findings.notes),
        "summary": dict(findings.summary),
        "rows": [row.as_json() for row in findings.rows],
    }


def csv_text(rows: Sequence[Row]) -> str:
    """A line for each value of each row. What does not apply is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        shared = row.as_json()
        for name, value in row.values.items():
            figures = {"value": name, "mean": value.mean, "spread": value.spread, "repeats": len(value.runs)}
            writer.writerow({**shared, **figures})
    return text.getvalue()


def write_figure(
    figure: PaperFigure, findings: Findings, described: Mapping[str, Any], directory: Path, label: str
) -> list[Path]:
    """Writes all files of a figure and returns them. label: of the subject and the machine, for the titles.

    Raises:
      UsageError: one cannot be written.
    """
    paths = [directory / f"{figure.name}.json", directory / f"{figure.name}.csv"]
    write_json(figure_object(figure, findings, described), str(paths[0]))
    write_text(csv_text(findings.rows), str(paths[1]))
    for suffix, picture in findings.pictures.items():
        drawn = picture() if callable(picture) else draw_panels(findings.rows, picture)
        if drawn is None:
            continue
        title = drawn.get_suptitle()
        numbers = " and ".join(map(str, figure.numbers))
        drawn.suptitle(f"Paper's figure {numbers}: {label}" + (f"\n{title}" if title else ""), fontsize="medium")
        paths.append(directory / (f"{figure.name}-{suffix}.png" if suffix else f"{figure.name}.png"))
        save_figure(drawn, paths[-1])
    return paths


def summary_lines(findings: Findings) -> list[str]:
    """For people: the summary and the notes."""
    numbers = [f"  {name}: {'-' if value is None else f'{value:.4g}'}" for name, value in findings.summary.items()]
    return [*numbers, *(f"  note: {text}" for text in findings.notes)]
