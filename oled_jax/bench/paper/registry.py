"""The figures: what the paper shows, what this system shows instead, and what makes it. One line each."""

import dataclasses
from collections.abc import Callable

from oled_jax.bench.paper.ablation import ablation
from oled_jax.bench.paper.bound import bound
from oled_jax.bench.paper.comparison import comparison
from oled_jax.bench.paper.failures import failures
from oled_jax.bench.paper.overhead import overhead
from oled_jax.bench.paper.prefill import prefill
from oled_jax.bench.paper.record import Findings
from oled_jax.bench.paper.routing import cost, locality, signals
from oled_jax.bench.paper.shapes import shapes
from oled_jax.bench.paper.study import Study
from oled_jax.bench.paper.sweeps import sweeps


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """One figure of the paper, or two that show the same runs.

    numbers: of the paper. shows: what the paper shows there. here: what this system shows. make: makes it.
    """

    numbers: tuple[int, ...]
    shows: str
    here: str
    make: Callable[[Study], Findings]

    @property
    def name(self) -> str:
        """Of its files: `figure05-12`."""
        return "figure" + "-".join(f"{number:02}" for number in self.numbers)


FIGURES = (
    PaperFigure(
        numbers=(4,),
        shows="activation footprint and expert FLOPs of block decoding against one token at a time",
        here="the same, counted from routing",
        make=cost,
    ),
    PaperFigure(
        numbers=(5, 12),
        shows="utilization of existing policies; TPOT and utilization of all, by workload and capacity",
        here="TPOT, utilization and hit rate of every policy, both bounds and full residency",
        make=comparison,
    ),
    PaperFigure(
        numbers=(6,),
        shows="four failure patterns of existing policies",
        here="the same, counted by the simulator over the same routing",
        make=failures,
    ),
    PaperFigure(
        numbers=(7,),
        shows="experts shared by iterations, within a block and across its boundary",
        here="the same, and the similarity of layer inputs",
        make=locality,
    ),
    PaperFigure(
        numbers=(10,),
        shows="design signals: confidence and stability, activation by layer",
        here="kept routes by token state and confidence, activation ratio by layer",
        make=signals,
    ),
    PaperFigure(
        numbers=(13,),
        shows="gap to the oracle bound over capacities",
        here="the same under replayed routing, beside Belady's bound",
        make=bound,
    ),
    PaperFigure(
        numbers=(14,),
        shows="breakdown of prefill",
        here="prefill by resident computation, planning, and waiting for pages",
        make=prefill,
    ),
    PaperFigure(
        numbers=(15,),
        shows="ablation, and each mechanism against its alternatives",
        here="the same four steps and three comparisons",
        make=ablation,
    ),
    PaperFigure(
        numbers=(16,),
        shows="batch size and block length",
        here="the same at both capacities",
        make=shapes,
    ),
    PaperFigure(
        numbers=(17,),
        shows="capacity up to full residency; bandwidth of the link",
        here="capacities measured, bandwidths estimated by the simulator",
        make=sweeps,
    ),
    PaperFigure(
        numbers=(18,),
        shows="LLaDA2.0 against 2.1 sampling; overhead of the policy",
        here="both samplers on one model; planning per pass by part",
        make=overhead,
    ),
)
BY_NUMBER = {number: figure for figure in FIGURES for number in figure.numbers}
