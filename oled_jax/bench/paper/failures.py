"""Figure 6: four ways in which policies fail, counted by the simulator over the subject's traces."""

import dataclasses

import numpy as np
from jaxtyping import Bool

from oled_jax.bench.paper import lineup
from oled_jax.bench.paper.plots import Panel
from oled_jax.bench.paper.record import Findings
from oled_jax.bench.paper.study import Study
from oled_jax.bench.paper.values import DECODE
from oled_jax.offload.schedule import PlacedLayer
from oled_jax.passes import PassKind
from oled_jax.sim.grid import CellResult
from oled_jax.sim.timing import PassTime

PATTERNS = {
    "late_prefetches": "Late prefetches",
    "cpu_critical_share": "Waiting for the CPU",
    "useful_evicted": "Evicted, needed next",
    "reused_on_cpu": "On the CPU, needed next",
}


@dataclasses.dataclass
class _Last:
    """What became of a layer in the pass before. present: resident, or transferred, while it ran."""

    kind: PassKind
    present: Bool[np.ndarray, " E"]
    to_cpu: Bool[np.ndarray, " E"]


class FailureCounter:
    """Watches a replay (`sim.replay.ManagedReplay`).

    Attributes:
      useful_evicted: pages that were present in a layer's pass, are not resident at its next, and are needed there.
      reused_on_cpu: experts that the CPU computed and that the layer's next pass needs.
      layers: passes of layers that were compared with the pass before. Denoise and edit passes, after any but prefill.
    """

    def __init__(self) -> None:
        self.useful_evicted = self.reused_on_cpu = self.layers = 0
        self._last: dict[int, _Last] = {}

    def __call__(self, placed: PlacedLayer) -> None:
        """The next layer that was decided."""
        routing, decision = placed.routing, placed.decision
        activated, resident, last = routing.activated, routing.resident, self._last.get(routing.layer)
        if last is not None and routing.info.kind in DECODE and last.kind is not PassKind.PREFILL:
            self.layers += 1
            self.useful_evicted += int(np.count_nonzero(last.present & ~resident & activated))
            self.reused_on_cpu += int(np.count_nonzero(last.to_cpu & activated))
        present = resident.copy()  # what a routing holds is lent
        present[decision.to_gpu] = True
        to_cpu = np.zeros_like(present)
        to_cpu[decision.to_cpu] = True
        self._last[routing.layer] = _Last(routing.info.kind, present, to_cpu)

    def values(self, result: CellResult, page_us: float) -> dict[str, float]:
        """The four patterns. Per layer and pass, but for the CPU's share of the time of passes."""
        time = PassTime()
        for kind in DECODE:
            time = time.plus(result.times[kind])
        layers = sum(result.passes[kind] for kind in DECODE) * len(result.capacities)
        compared = max(1, self.layers)
        return {
            "late_prefetches": time.late / page_us / layers,
            "cpu_critical_share": time.cpu_late / time.total if time.total else 0.0,
            "useful_evicted": self.useful_evicted / compared,
            "reused_on_cpu": self.reused_on_cpu / compared,
        }


def failures(study: Study) -> Findings:
    """Figure 6: the four patterns, for every deployable policy."""
    rows = []
    size = study.estimates.sizes[0]
    page_us = study.estimates.hardware(size).alone.h2d_us
    for work in study.works:
        for capacity in study.capacities:
            for policy in lineup.deployable():
                counter = FailureCounter()
                rows.append(
                    study.estimates.row(
                        "failures", work, policy, capacity, size=size, watch=counter,
                        more=lambda result, counter=counter: counter.values(result, page_us),  # type: ignore[misc]
                    )
                )  # fmt: skip
    panels = {
        name: [
            Panel(panel="failures", value=name, title=f"{text}, capacity {capacity}", label=_unit(name), x="policy",
                  series="workload", bars=True, capacity=capacity)
            for capacity in study.capacities
        ]
        for name, text in PATTERNS.items()
    }  # fmt: skip
    return Findings(
        rows=rows,
        pictures=panels,
        notes=[
            f"Pages of {size}. Evictions and experts left to the CPU are exact counts over the whole trace, the first "
            "request included; late pages and the CPU's share follow from the simulator's times.",
        ],
    )


def _unit(name: str) -> str:
    return "share of the time of passes" if name.endswith("share") else "per layer and pass"
