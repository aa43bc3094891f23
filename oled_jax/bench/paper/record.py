"""What a figure consists of: rows with their origin, pictures of them, and a summary. Values only."""

import dataclasses
import enum
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oled_jax.bench.paper.plots import Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Method(enum.StrEnum):
    """How a row came about.

    GENERATED: an engine generated text. REPLAYED: an engine ran recorded or synthetic routes. SIMULATED: the simulator
    replayed a trace; its counts are exact, its times estimates. ROUTING: counted from a trace alone.
    """

    GENERATED = "generated"
    REPLAYED = "replayed"
    SIMULATED = "simulated"
    ROUTING = "routing"

    @property
    def source(self) -> str:
        """`measured`, `estimated` or `counted`: the word that stands beside every figure."""
        return {Method.SIMULATED: "estimated", Method.ROUTING: "counted"}.get(self, "measured")


@dataclasses.dataclass(frozen=True)
class Value:
    """A figure of some repeats."""

    runs: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.runs)

    @property
    def spread(self) -> float:
        """Greatest minus least."""
        return max(self.runs) - min(self.runs)

    def map(self, function: Callable[[float], float]) -> "Value":
        """The function of every run."""
        return Value(tuple(map(function, self.runs)))

    def as_json(self) -> dict[str, Any]:
        """`mean`, `spread` and all `runs`."""
        return {"mean": self.mean, "spread": self.spread, "runs": list(self.runs)}


Values = Mapping[str, Value]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One point of a figure. What does not apply is None.

    Attributes:
      panel: the part of the figure that it belongs to.
      policy: its specification. capacity: experts per MoE layer.
      setting: what else is varied, in words. x: the same as a number.
      digest: of the generated token ids; equal digests, equal text.
    """

    panel: str
    method: Method
    values: Values
    policy: str | None = None
    capacity: int | None = None
    workload: str | None = None
    batch: int | None = None
    block_length: int | None = None
    setting: str | None = None
    x: float | None = None
    digest: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON; `source` says in a word whether it was measured."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values = {name: value.as_json() for name, value in self.values.items()}
        return {**fields, "method": self.method.value, "source": self.method.source, "values": values}


Picture = Sequence[Panel] | Callable[[], "Figure | None"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """A figure that was made.

    Attributes:
      pictures: by the end of the file's name; empty for the figure's only one. Panels of rows, or a drawing.
      summary: numbers to quote, such as the least and the greatest speed-up. None: there is none.
      notes: sentences that a reader needs to judge the rows.
    """

    rows: Sequence[Row]
    pictures: Mapping[str, Picture]
    summary: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()


def find(rows: Sequence[Row], **wanted: Any) -> Row | None:
    """The first row with these fields, if there is one."""
    return next((row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())), None)


def extremes(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """`name_min` and `name_max`."""
    return {f"{name}_min": min(values, default=None), f"{name}_max": max(values, default=None)}
