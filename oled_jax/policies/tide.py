"""TIDE: the busiest experts of a block become resident every few iterations; between that nothing moves."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from oled_jax.passes import PassKind
from oled_jax.policies.allocation import uniform_capacities
from oled_jax.policies.base import (
    Decision,
    LayerRouting,
    PageRequest,
    PassInfo,
    Policy,
    PolicyContext,
    top_scored,
)
from oled_jax.policies.options import PolicyEntry, require_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class TideOptions:
    """interval: iterations of a block from one refresh to the next."""

    interval: int = 2

    def __post_init__(self) -> None:
        require_range(self, "interval", 1)


class TidePolicy(Policy):
    """Keeps, from one refresh to the next, the C_l experts that most tokens of the block were routed to.

    A refresh is every `interval`-th denoise or edit pass of a block, its first one included, and every such
    pass of a request's first block. It transfers what becomes resident; all other misses, and every miss of
    the other passes, run on the CPU. Where a refresh activates fewer than C_l experts, the most recently
    used residents stay. In prefill every miss is transferred and the busiest C_l experts stay.

    Source: TIDE (Chen et al.). Differences: the original solves for the best interval, here it is an option.
    """

    name = "tide"

    def __init__(self, options: TideOptions, context: PolicyContext) -> None:
        super().__init__(context)
        self.options = options
        self._capacities = uniform_capacities(context)
        self._loads = np.zeros((context.num_layers, context.num_experts))
        self._blocks = 0
        self._iterations = 0
        self._refresh = False

    def begin_request(self, prompt_ids: Int[np.ndarray, " P"]) -> Sequence[PageRequest]:
        self._blocks = 0
        self._iterations = 0
        return ()

    def begin_block(self) -> Sequence[PageRequest]:
        self._blocks += 1
        self._iterations = 0
        return ()

    def begin_iteration(self, info: PassInfo) -> None:
        if info.kind in (PassKind.DENOISE, PassKind.EDIT):
            self._refresh = self._blocks <= 1 or self._iterations % self.options.interval == 0
            self._iterations += 1
        else:
            self._refresh = info.kind is PassKind.PREFILL

    def on_route(self, routing: LayerRouting) -> Decision:
        misses = routing.misses
        if not self._refresh:
            return Decision(to_gpu=misses[:0], to_cpu=misses, keep=routing.resident.copy())
        with self.clock.part("priority"):
            loads = routing.loads.astype(np.float64)
            self._loads[routing.layer] = loads
            candidates = routing.resident | routing.activated
            keep = top_scored(candidates, loads, routing.last_use, routing.capacity)
        if routing.info.kind is PassKind.PREFILL:
            return Decision(to_gpu=misses, to_cpu=misses[:0], keep=keep)
        enters = keep[misses]
        return Decision(to_gpu=misses[enters], to_cpu=misses[~enters], keep=keep)

    def capacities(self) -> Int[np.ndarray, " L"]:
        return self._capacities

    def scores(self, layer: int) -> Float[np.ndarray, " E"]:
        return self._loads[layer]


ENTRIES = (
    PolicyEntry(
        name="tide",
        summary="TIDE: a block's busiest experts become resident every 2nd iteration, the CPU does the rest",
        build=TidePolicy,
        options=TideOptions,
        needs_cpu=True,
    ),
)
