"""Synthetic traces: routing of any shape with set locality, for simulations without a model.

`synthesise` makes a `Trace` that generates its passes anew whenever it is gone through, and holds one at a time. What
the decoder does is made up in `script.py`, the routes in `score_router.py`; `calibration.py` finds the parameters with
which the routes have the wanted figures. The same specification gives the same trace on every run.
"""

import dataclasses
from collections.abc import Iterator

from oled_jax.traces.calibration import achieved, calibrate, deviations
from oled_jax.traces.locality import Locality
from oled_jax.traces.score_router import Knobs, routed_passes
from oled_jax.traces.script import Script
from oled_jax.traces.spec import SyntheticSpec
from oled_jax.traces.trace import TraceHeader, TracePass

TOLERANCE = 0.05  # relative; absolute for a target of 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticTrace:
    """A `Trace`. Made by `synthesise`."""

    header: TraceHeader
    spec: SyntheticSpec
    knobs: Knobs

    def __len__(self) -> int:
        return sum(1 for _ in Script(self.spec))

    def __iter__(self) -> Iterator[TracePass]:
        return routed_passes(self.spec, self.knobs)


def synthesise(spec: SyntheticSpec) -> SyntheticTrace:
    """Finds the parameters (some seconds for the presets) and returns the trace. Makes no pass yet."""
    header = header_of(spec)
    return SyntheticTrace(header=header, spec=spec, knobs=calibrate(spec, header))


def header_of(spec: SyntheticSpec) -> TraceHeader:
    """The header of the trace; its settings are the specification."""
    return TraceHeader(
        source="synthetic",
        model=spec.name,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        hidden_size=spec.hidden_size,
        moe_intermediate_size=spec.moe_intermediate_size,
        dtype=spec.dtype,
        block_length=spec.block_length,
        settings=dataclasses.asdict(spec),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One target and what became of it. achieved: NaN if the trace holds nothing to measure it by."""

    name: str
    wanted: float
    achieved: float
    missed: bool


def compare(spec: SyntheticSpec, found: Locality) -> list[Outcome]:
    """Every target beside what was measured on the trace; missed: by more than `TOLERANCE`, or not measured."""
    values, apart = achieved(found), deviations(spec.targets, found)
    return [
        Outcome(name=name, wanted=wanted, achieved=values[name], missed=not abs(apart[name]) <= TOLERANCE)
        for name, wanted in dataclasses.asdict(spec.targets).items()
    ]
