"""A routing trace replayed into a cache manager: hits, transfers and evictions, without a device.

Policy, manager and tables are the engine's own, driven in the order in which an engine drove them. What is left out is
the plan, which nobody would carry out. Imports no JAX.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from oled_jax.offload.manager import CacheManager
from oled_jax.offload.residency import DEFAULT_SPARE
from oled_jax.offload.schedule import Move, PlacedLayer
from oled_jax.offload.statistics import CacheStatistics, routed_loads
from oled_jax.ops.grouping import ItemShape
from oled_jax.passes import PassKind
from oled_jax.policies.base import FutureRouting, Policy
from oled_jax.traces.trace import Trace, TraceHeader, TracePass

BEFORE = -1  # a page was asked for before the pass began, not by one of its layers


class LayerWork(NamedTuple):
    """What a layer asked of link, device and CPU. An item is one page with the rows of its tokens.

    moved: pages transferred on demand. resident_items, moved_items: items of pages that were resident, and of those
    that were transferred. cpu_experts, cpu_tokens: experts that the CPU computed, and the sum of their tokens.
    """

    moved: int
    resident_items: int
    moved_items: int
    cpu_experts: int
    cpu_tokens: int


class PassWork(NamedTuple):
    """What a pass asked for.

    rows: of an item. planned: the host was asked about each layer. ahead: pages that were moved ahead of their use, as
    (layer that asked or BEFORE, its own layer).
    """

    kind: PassKind
    rows: int
    layers: list[LayerWork]
    planned: bool = True
    ahead: Sequence[tuple[int, int]] = ()


@runtime_checkable
class Replay(Protocol):
    """Takes a trace pass by pass. statistics: what happened so far."""

    statistics: CacheStatistics

    def run_pass(self, step: TracePass) -> PassWork:
        """Replays the next pass. Raises what the policy raises."""
        ...

    def capacities(self) -> list[int]:
        """C_l as it is now."""
        ...


class ManagedReplay:
    """A trace under a policy.

    Misses that the policy leaves to the CPU are counted and computed by nobody.

    Args:
      policy: new, for the trace's shape.
      page_bytes: for the statistics.
      spare: as the engine has it: prefetches land only where a slot is free.
      overlapping: as the engine's carrier is: whether prefetches leave at once or with the layer before their own.
      watch: is shown every layer as it was decided.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        page_bytes: int,
        spare: int = DEFAULT_SPARE,
        overlapping: bool = False,
        watch: Callable[[PlacedLayer], None] | None = None,
    ) -> None:
        self.manager = CacheManager(policy, spare=spare, page_bytes=page_bytes)
        self.manager.overlapping = overlapping
        self.statistics = self.manager.statistics
        self._num_experts = policy.context.num_experts
        self._staged: list[Move] = []
        self._watch = watch
        self.manager.place_free_residents()

    def run_pass(self, step: TracePass) -> PassWork:
        manager, staged = self.manager, self._staged
        for prompt in step.prompts:
            staged += manager.begin_request(prompt)
        for _ in range(step.new_blocks):
            staged += manager.begin_block()
        manager.begin_pass(step.info)
        loads = pass_loads(step, self._num_experts)
        work = _Work(step, self._num_experts, [(BEFORE, layer) for layer, _, _ in staged])
        for layer, layer_loads in enumerate(loads):
            placed = manager.replay_route(layer, step.expert_ids[layer], step.gates[layer], layer_loads)
            work.add(placed)
            if self._watch is not None:
                self._watch(placed)
        self._staged = manager.end_iteration(step.outcome)
        manager.place_free_residents()
        return work.done()

    def capacities(self) -> list[int]:
        return [int(capacity) for capacity in self.manager.policy.capacities()]


class ResidentReplay:
    """A trace with every page resident (policy `all`): each activated expert is a hit."""

    def __init__(self, header: TraceHeader) -> None:
        self._shape = (header.num_layers, header.num_experts)
        self.statistics = CacheStatistics(num_layers=header.num_layers, num_experts=header.num_experts, page_bytes=0)

    def run_pass(self, step: TracePass) -> PassWork:
        _, E = self._shape
        items = _items(step, E)
        layers = []
        for layer, loads in enumerate(pass_loads(step, E)):
            activated = int(np.count_nonzero(loads))
            self.statistics.add(step.info.kind, layer, activated=activated, hits=activated, capacity=E)
            layers.append(LayerWork(0, _item_count(loads[loads > 0], items), 0, 0, 0))
        return PassWork(step.info.kind, items.rows, layers, planned=False)

    def capacities(self) -> list[int]:
        L, E = self._shape
        return [E] * L


class _Work:
    """Collects the work of a pass."""

    def __init__(self, step: TracePass, num_experts: int, ahead: list[tuple[int, int]]) -> None:
        self._kind = step.info.kind
        self._items = _items(step, num_experts)
        self._direct = self._items.direct
        self._layers: list[LayerWork] = []
        self._ahead = ahead
        self._asked: dict[tuple[int, int], int] = {}

    def add(self, placed: PlacedLayer) -> None:
        routing, decision, hits = placed[:3]
        moved, to_cpu = decision.to_gpu, decision.to_cpu
        if self._direct:
            resident_items, moved_items = hits.size, moved.size
        else:
            resident_items = _item_count(routing.loads[hits], self._items)
            moved_items = _item_count(routing.loads[moved], self._items)
        cpu_tokens = sum(routing.loads[to_cpu].tolist())  # few: quicker than a reduction
        self._layers.append(LayerWork(moved.size, resident_items, moved_items, to_cpu.size, cpu_tokens))
        for request in decision.prefetch:
            self._asked.setdefault((request.layer, request.expert), routing.layer)
        for layer, expert, _ in placed.prefetches:
            self._ahead.append((self._asked[layer, expert], layer))

    def done(self) -> PassWork:
        return PassWork(self._kind, self._items.rows, self._layers, ahead=self._ahead)


def _items(step: TracePass, num_experts: int) -> ItemShape:
    _, N, K = step.expert_ids.shape
    return ItemShape(num_tokens=N, top_k=K, num_experts=num_experts)


def _item_count(loads: Int[np.ndarray, " M"], items: ItemShape) -> int:
    """Items of experts with so many tokens each."""
    return loads.size if items.direct else int((-(-loads // items.rows)).sum())


def pass_loads(step: TracePass, num_experts: int) -> Int[np.ndarray, "L E"]:
    """Tokens per layer and expert; padding counts nothing."""
    return routed_loads(step.expert_ids, step.info.token_mask, num_experts)


def future_of(trace: Trace) -> FutureRouting:
    """What every pass of a trace activates, for the oracles: L * E bytes a pass, one more time through the trace."""
    header = trace.header
    activated = np.zeros((len(trace), header.num_layers, header.num_experts), bool)
    for row, step in zip(activated, trace, strict=True):
        row[:] = pass_loads(step, header.num_experts) > 0
    return FutureRouting(activated=activated)
