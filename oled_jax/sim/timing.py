"""How long a replayed pass takes: a model of link, CPU and device (docs/simulator.md). No JAX.

For a layer with G transfers, and H experts with S tokens on the CPU:

    link   = what has not arrived of its pages fetched ahead + G * T_H2D
    cpu    = a * H + b * S
    device = link + ffn(resident) + ffn(moved)               carrier portable: transfers, then the FFN
           = max(link, ffn(resident)) + ffn(moved)           carrier native: resident pages are computed meanwhile
    layer  = trunk + planning + max(device, cpu)

A pass takes the sum over its layers, and what it spends outside them. Pages fetched ahead move whenever the link has
nothing else to do, from the moment when they were asked for: that is the overlap which the policy claims.
"""

import bisect
import dataclasses
import enum
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from oled_jax.cost.profile import FfnTime
from oled_jax.sim.hardware import Hardware
from oled_jax.sim.replay import BEFORE, LayerWork, PassWork


class Carrier(enum.StrEnum):
    """Whether transfers overlap with the arithmetic of the resident pages."""

    PORTABLE = "portable"
    NATIVE = "native"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeOptions:
    """What neither a trace nor a hardware profile says, in microseconds.

    trunk_us: everything of a layer but its routed experts. planning_us: planning a layer on the host, its callback
    included. head_us: what a pass does outside its layers.
    """

    carrier: Carrier = Carrier.PORTABLE
    trunk_us: float = 0.0
    planning_us: float = 0.0
    head_us: float = 0.0


class PassTime(NamedTuple):
    """Microseconds of a pass in `total`; the rest says how long each part was busy, partly at the same time.

    demand: transfers of misses. ahead: transfers ahead of use; late: the part of those that layers waited for.
    cpu: experts on the CPU; cpu_late: the part of it after the device was done. ffn: experts on the device.
    """

    total: float = 0.0
    demand: float = 0.0
    ahead: float = 0.0
    late: float = 0.0
    cpu: float = 0.0
    ffn: float = 0.0
    cpu_late: float = 0.0

    def plus(self, other: "PassTime") -> "PassTime":
        """The sum, part by part."""
        return PassTime(*map(operator.add, self, other))


class TimeModel:
    """Gives every pass its time on one machine."""

    def __init__(self, hardware: Hardware, options: TimeOptions) -> None:
        self.hardware = hardware
        self.options = options
        self._ffn: dict[tuple[int, int], float] = {}

    def pass_time(self, work: PassWork) -> PassTime:
        """How long a pass takes."""
        options, page_us = self.options, self.hardware.alone.h2d_us
        native = options.carrier is Carrier.NATIVE
        start_us = options.trunk_us + (options.planning_us if work.planned else 0.0)
        arrivals = _Arrivals(work.ahead, len(work.layers), page_us)
        total = demand = late = cpu = ffn = cpu_late = 0.0
        for number, layer in enumerate(work.layers):
            wait_us = arrivals.before(number, start_us)
            demand_us, cpu_us = self._link_and_cpu(layer)
            resident_us = self._ffn_us(layer.resident_items, work.rows)
            moved_us = self._ffn_us(layer.moved_items, work.rows)
            link_us = wait_us + demand_us
            device_us = (max(link_us, resident_us) if native else link_us + resident_us) + moved_us
            experts_us = max(device_us, cpu_us)
            arrivals.during(number, experts_us - link_us)
            total += start_us + experts_us
            demand, late, cpu, ffn = demand + demand_us, late + wait_us, cpu + cpu_us, ffn + resident_us + moved_us
            cpu_late += experts_us - device_us
        return PassTime(total + options.head_us, demand, len(work.ahead) * page_us, late, cpu, ffn, cpu_late)

    def _link_and_cpu(self, layer: LayerWork) -> tuple[float, float]:
        """Microseconds of transfers on demand and of experts on the CPU."""
        costs = self.hardware.together if layer.moved and layer.cpu_experts else self.hardware.alone
        cpu_us = costs.cpu_fixed_us * layer.cpu_experts + costs.cpu_token_us * layer.cpu_tokens
        return costs.h2d_us * layer.moved, cpu_us

    def _ffn_us(self, items: int, rows: int) -> float:
        us = self._ffn.get((items, rows))
        if us is None:
            us = self._ffn[items, rows] = ffn_us(self.hardware.ffn, items, rows)
        return us


def ffn_us(times: Sequence[FfnTime], items: int, rows: int) -> float:
    """The expert FFN of so many work items of so many rows, from what was measured; 0 where nothing was.

    Of the measured numbers of tokens the next above `rows` counts, or the greatest. Between the measured numbers of
    pages, and from 0 to the first, the time is linear; past the last it is in proportion.
    """
    if not times or items == 0:
        return 0.0
    tokens = sorted({time.tokens for time in times})
    chosen = tokens[min(bisect.bisect_left(tokens, rows), len(tokens) - 1)]
    points = [(0, 0.0), *sorted((time.pages, time.us) for time in times if time.tokens == chosen)]
    place = bisect.bisect_left([pages for pages, _ in points], items)
    if place == len(points):
        pages, us = points[-1]
        return us * items / pages
    (left, left_us), (right, right_us) = points[place - 1], points[place]
    return left_us + (right_us - left_us) * (items - left) / (right - left)


class _Arrivals:
    """Pages on their way to later layers during one pass. Those for the nearest layer move first."""

    def __init__(self, ahead: Iterable[tuple[int, int]], num_layers: int, page_us: float) -> None:
        self._page_us = page_us
        self._asked: dict[int, list[int]] = {}
        for asker, layer in ahead:
            self._asked.setdefault(asker, []).append(layer)
        self._rest = [0.0] * num_layers
        self._moving = bool(self._asked)
        if self._moving:
            self._ask(BEFORE)

    def before(self, layer: int, idle_us: float) -> float:
        """The link is idle until the layer is routed. Returns what its pages still take then."""
        if not self._moving:
            return 0.0
        self._move(idle_us)
        rest, self._rest[layer] = self._rest[layer], 0.0
        return rest

    def during(self, layer: int, idle_us: float) -> None:
        """The layer was routed and has asked for pages; the link is idle for so long until it is done."""
        if self._moving:
            self._ask(layer)
            self._move(idle_us)

    def _ask(self, asker: int) -> None:
        for layer in self._asked.get(asker, ()):
            self._rest[layer] += self._page_us

    def _move(self, idle_us: float) -> None:
        for layer, rest in enumerate(self._rest):
            moved = min(rest, idle_us)
            self._rest[layer] -= moved
            idle_us -= moved
