"""The cache manager: hits, misses, the policy's decision, slots, the plan. NumPy only, no device array.

One manager belongs to one engine. Between passes the engine's thread calls `begin_*` and `end_*`; during a pass a
carrier calls `on_route` and `collect` for each MoE layer, and `account` where it waits for the device anyway, from a
host-callback thread. The two never overlap, because the engine waits for a pass before it goes on; so there is no lock.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32

from oled_jax.errors import PolicyError
from oled_jax.offload.compiled_planner import compiled_planner
from oled_jax.offload.cpu_experts.base import CpuExperts, CpuWork
from oled_jax.offload.plan import MAX_PREFETCHES, PlanLayout
from oled_jax.offload.residency import KEEPS_ABSENT, KEEPS_TOO_MANY, NOT_THE_MISSES, Residency
from oled_jax.offload.schedule import Move, PlacedLayer, place, write_plan
from oled_jax.offload.shares import CacheShares
from oled_jax.offload.statistics import CacheStatistics
from oled_jax.ops.grouping import ItemShape
from oled_jax.passes import PassKind
from oled_jax.policies.base import (
    Decision,
    IterationOutcome,
    LayerRouting,
    PageRequest,
    PassInfo,
    Policy,
    top_scored,
)
from oled_jax.traces.record import TraceRecorder


class _PassBuffers(NamedTuple):
    """What passes of one size are planned in.

    expert_ids, gates: of the layer that is being planned. plans: one per layer, since the device may read it until the
    pass is over.
    """

    layout: PlanLayout
    expert_ids: Int32[np.ndarray, "N K"]
    gates: Float32[np.ndarray, "N K"]
    plans: list[Int32[np.ndarray, " size"]]


class CacheManager:
    """Plans every MoE layer of every pass under one policy.

    Args:
      policy: decides; its context gives the shape of the cache.
      spare: slots beyond the sum of C_l, at least 1: transfers land in them.
      page_bytes: for the statistics.
      cpu_experts: computes the misses that a policy leaves on the CPU; None if it may leave none there.
    """

    def __init__(self, policy: Policy, *, spare: int, page_bytes: int, cpu_experts: CpuExperts | None = None) -> None:
        context = policy.context
        shape = {"num_layers": context.num_layers, "num_experts": context.num_experts}
        self.policy = policy
        self.spare = spare
        self.cpu_experts = cpu_experts
        self.residency = Residency(**shape, num_slots=context.total_slots + spare)
        self.statistics = CacheStatistics(**shape, page_bytes=page_bytes)
        self.failure: BaseException | None = None
        self.idle = False  # passes run, but nothing is planned or counted
        self.overlapping = False  # set by the engine: the carrier moves pages beside the arithmetic
        self.shares: CacheShares | None = None  # of the run that goes on
        self.recorder: TraceRecorder | None = None  # is told what was routed; the rest it hears from the engine
        self._buffers: dict[int, _PassBuffers] = {}
        self._loads = np.zeros(context.num_experts, np.int64)  # of the layer that is being planned
        self._compiled = compiled_planner(policy, self.residency, self._loads)
        self._info: PassInfo | None = None
        self._pass_number = 0
        self._planning_us = self._accounting_us = 0.0
        # Is not counted yet. A layer number alone: the compiled planner knows the rest.
        self._settled: tuple[LayerRouting, Decision] | int | None = None
        self._wanted: dict[int, list[PageRequest]] = {}
        self._divided = np.full(context.num_layers, -1)  # capacities that every layer is known to keep to

    def layout(self, num_tokens: int) -> PlanLayout:
        """The plan layout of a pass over this many tokens (batch rows x positions)."""
        return self._buffers_for(num_tokens).layout

    def _buffers_for(self, num_tokens: int) -> _PassBuffers:
        if num_tokens not in self._buffers:
            context = self.policy.context
            N, K = num_tokens, context.top_k
            items = ItemShape(num_tokens=N, top_k=K, num_experts=context.num_experts)
            layout = PlanLayout(items=items, spare=self.spare)
            plans = [layout.empty() for _ in range(context.num_layers)]
            self._buffers[N] = _PassBuffers(layout, np.zeros((N, K), np.int32), np.zeros((N, K), np.float32), plans)
        return self._buffers[num_tokens]

    # Between passes

    def begin_request(self, prompt_ids: Int[np.ndarray, " P"]) -> list[Move]:
        """A request starts. Returns pages to stage now."""
        return self._stage(self.policy.begin_request(prompt_ids), PassKind.PREFILL)

    def begin_block(self) -> list[Move]:
        """A block starts. Returns pages to stage now."""
        return self._stage(self.policy.begin_block(), PassKind.DENOISE)

    def begin_pass(self, info: PassInfo) -> None:
        """A forward pass starts."""
        self._settled = None
        if self.idle:
            return
        self._info = info
        self._pass_number += 1
        self._planning_us = self._accounting_us = 0.0
        self.policy.begin_iteration(info)

    def end_iteration(self, outcome: IterationOutcome) -> list[Move]:
        """A pass is over and the decoder has acted. Returns pages to stage now."""
        start = time.perf_counter()
        if self._compiled is not None:
            self._compiled.end_pass()
        requests = self.policy.end_iteration(outcome)
        self._shrink()
        staged = self._stage(requests, outcome.kind)
        total = self._planning_us + (time.perf_counter() - start) * 1e6
        parts = self.policy.clock.micros
        self.policy.clock.clear()
        residency = total - sum(parts.values())
        parts |= {"residency": residency, "total": total, "accounting": self._accounting_us}
        self.statistics.add_planning(outcome.kind, parts)
        return staged

    def end_pass(self) -> None:
        """A forward pass has run: its last layer is counted.

        Raises:
          what a callback met, as itself, after forgetting all residents: the tables may promise pages that never
          arrived, so nothing they say can be kept.
        """
        self._planning_us += self._count_settled()
        failure, self.failure = self.failure, None
        if failure is not None:
            self.forget()
            raise failure

    def forget(self) -> None:
        """Empties the cache: the pool's content is no longer known. A failure that is kept goes, too."""
        if self.cpu_experts is not None:
            self.cpu_experts.reset()
        if self._compiled is not None:
            self._compiled.end_pass()
        self.policy.clock.clear()
        self.residency.clear()
        self.policy.forget_residents()
        self.statistics.forget()
        self.failure = self._settled = None
        self._wanted.clear()

    # During a pass

    def on_route(
        self, layer: int, packed: Int[np.ndarray, "N K2"], hidden: np.ndarray | None = None
    ) -> Int[np.ndarray, " size"]:
        """Plans one layer and starts its CPU share.

        Args:
          layer: MoE layer number.
          packed: expert ids, then gates (float32 bits), [N, 2K] int32.
          hidden: [N, D] layer input in the model dtype, if the policy may use the CPU; valid until `collect`.

        Returns:
          the plan (`PlanLayout`). It does nothing once an exception was kept in `failure`.
        """
        start = time.perf_counter()
        self._count_settled()
        buffers = self._buffers_for(packed.shape[0])
        if self.failure is not None or self.idle:
            return buffers.layout.empty()
        try:
            self._plan(layer, packed, hidden, buffers)
        except BaseException as failure:  # it must not cross the callback: the engine raises it
            self.failure = failure
            return buffers.layout.empty()
        self._planning_us += (time.perf_counter() - start) * 1e6
        return buffers.plans[layer]

    def account(self) -> None:
        """Counts the layer that was planned last, if that was not done yet.

        A carrier calls it while it waits for the device anyway. What is left is counted by the next layer's `on_route`,
        or at the end of the pass, as a part of planning.
        """
        self._accounting_us += self._count_settled()

    def collect(self, layer: int, shape: tuple[int, ...]) -> Float32[np.ndarray, "N D"]:
        """The CPU share of a layer whose plan had any: gated rows summed over k. Zeros after a failure."""
        try:
            if self.cpu_experts is None:
                raise RuntimeError(f"layer {layer} collects a CPU share, but there is no CPU backend")
            return self.cpu_experts.collect(layer)
        except BaseException as failure:  # as in on_route
            self.failure = self.failure or failure
            return np.zeros(shape, np.float32)

    def _plan(
        self, layer: int, packed: Int[np.ndarray, "N K2"], hidden: np.ndarray | None, buffers: _PassBuffers
    ) -> None:
        layout, ids, gates, plans = buffers
        info = self._info
        if info is None or info.token_mask.size != packed.shape[0]:
            raise RuntimeError(f"a route of {packed.shape[0]} tokens arrived outside a pass of that size")
        if self._compiled is not None:
            if self._compiled.pass_number != self._pass_number:
                self._compiled.begin_pass(info, self._pass_number, layout, ids, gates)
            to_cpu = self._compiled.plan(layer, packed, plans[layer])
            self._settled = layer
            if to_cpu is not None:
                self._start_cpu(layer, to_cpu, hidden, ids, gates, info)
            return
        activated = self.residency.activate_packed(
            layer, packed, info.token_mask, ids, gates, self._loads, self._pass_number
        )
        routing = self._routing(layer, ids, gates, self._loads, info, *activated)
        decision = self.policy.on_route(routing)
        placed = self._settle(routing, decision)
        if decision.to_cpu.size:
            self._start_cpu(layer, decision.to_cpu, hidden, ids, gates, info)
        write_plan(placed, layout, plans[layer])
        self._settled = routing, decision

    # Replays

    def replay_route(
        self,
        layer: int,
        ids: Int[np.ndarray, "N K"],
        gates: Float32[np.ndarray, "N K"],
        loads: Int[np.ndarray, " E"],
    ) -> PlacedLayer:
        """One layer of a replay: decided, counted and made true in the tables as in `on_route`, carried out by nobody.

        Args:
          loads: tokens per expert, padding not counted.

        Raises:
          whatever the policy raises, at once.
        """
        if self._info is None:
            raise RuntimeError("a route arrived outside a pass")
        activated = self.residency.activate(layer, loads, self._pass_number)
        routing = self._routing(layer, ids, gates, loads, self._info, *activated)
        decision = self.policy.on_route(routing)
        placed = self._settle(routing, decision)
        self._count(routing, decision)
        return placed

    def place_free_residents(self) -> None:
        """Puts the residents of a policy that has them free of charge in place: replays of the content oracle only."""
        wanted = self.policy.free_residents()
        if wanted is None:
            return
        resident = self.residency.slot >= 0
        for layer in range(len(wanted)):
            self._evict(layer, np.flatnonzero(resident[layer] & ~wanted[layer]))
        for layer in range(len(wanted)):
            self.residency.admit(layer, np.flatnonzero(wanted[layer] & ~resident[layer]))

    def _routing(
        self,
        layer: int,
        ids: Int[np.ndarray, "N K"],
        gates: Float32[np.ndarray, "N K"],
        loads: Int[np.ndarray, " E"],
        info: PassInfo,
        resident: Bool[np.ndarray, " E"],
        hits: Int[np.ndarray, " H"],
        misses: Int[np.ndarray, " M"],
    ) -> LayerRouting:
        return LayerRouting(
            layer=layer,
            info=info,
            expert_ids=ids,
            gates=gates,
            loads=loads,
            resident=resident,
            last_use=self.residency.last_use_rows[layer],
            hits=hits,
            misses=misses,
            capacity=self.policy.capacities().item(layer),
        )

    def _settle(self, routing: LayerRouting, decision: Decision) -> PlacedLayer:
        """Makes a decision true in the tables, which mean nothing if it breaks the engine's rules and is refused."""
        for other, expert in decision.evict:
            self._evict(other, np.array([expert]))
        fault, placed = place(self.residency, routing, decision)
        if fault:
            self._refuse_fault(fault, routing, decision)
        if decision.to_cpu.size and not self.policy.context.cpu_available:
            self._refuse(routing.layer, "it leaves experts to the CPU, but the engine has no CPU backend")
        if decision.prefetch or self._wanted:
            placed.prefetches.extend(self._prefetches(routing, decision))
        return placed

    def _refuse_fault(self, fault: int, routing: LayerRouting, decision: Decision) -> NoReturn:
        kept = decision.keep.sum()
        faults = {
            NOT_THE_MISSES: "its transfers and CPU experts are not exactly the misses, each once",
            KEEPS_ABSENT: "it keeps experts that are neither resident nor transferred",
            KEEPS_TOO_MANY: f"it keeps {kept} experts, the capacity is {routing.capacity}",
        }
        self._refuse(routing.layer, faults[fault])

    def _refuse(self, layer: int | None, why: str) -> NoReturn:
        where = "" if layer is None else f", layer {layer}"
        raise PolicyError(f"policy {self.policy.name!r}{where}: {why}")

    def _start_cpu(
        self,
        layer: int,
        experts: Int[np.ndarray, " H"],
        hidden: np.ndarray | None,
        ids: Int32[np.ndarray, "N K"],
        gates: Float32[np.ndarray, "N K"],
        info: PassInfo,
    ) -> None:
        if self.cpu_experts is None or hidden is None:
            raise RuntimeError("a CPU share was planned, but the layer's input was not sent to the host")
        mask = info.token_mask
        self.cpu_experts.submit(
            CpuWork(layer=layer, hidden=hidden, experts=experts, expert_ids=ids, gates=gates, token_mask=mask)
        )

    def _count_settled(self) -> float:
        """Counts the layer that was planned last and returns the microseconds that it took.

        What was lent to it still holds: the next layer's routes are written only after this.
        """
        settled, self._settled = self._settled, None
        if settled is None:
            return 0.0
        start = time.perf_counter()
        try:
            if isinstance(settled, int):
                assert self._compiled is not None
                settled = self._compiled.decided(settled)
            routing, decision = settled
            if self.recorder is not None:
                self.recorder.on_route(routing.layer, routing.expert_ids, routing.gates)
            self._count(routing, decision)
        except BaseException as failure:  # as in on_route
            self.failure = self.failure or failure
        return (time.perf_counter() - start) * 1e6

    def _count(self, routing: LayerRouting, decision: Decision) -> None:
        layer, kind, hits, to_gpu = routing.layer, routing.info.kind, routing.hits, decision.to_gpu
        if self.shares is not None:
            token_mask = routing.info.token_mask
            self.shares.add(routing.expert_ids, token_mask, hits, to_gpu, routing.num_activated)
        self.statistics.routed(kind, layer, hits, to_gpu, decision.keep)
        self.statistics.add(
            kind,
            layer,
            activated=routing.num_activated,
            hits=hits.size,
            to_gpu=to_gpu.size,
            to_cpu=decision.to_cpu.size,
            capacity=routing.capacity,
        )

    # Pages ahead of their use

    def _prefetches(self, routing: LayerRouting, decision: Decision) -> list[Move]:
        """Queues the policy's prefetches; those whose time has come leave with this plan.

        That is at once where the carrier moves pages beside the arithmetic. Where it moves them between two layers'
        arithmetic, a page for a far layer gains nothing by leaving early: it waits until the layer before its own.
        """
        layer = routing.layer
        for request in decision.prefetch:
            if not layer < request.layer < self.residency.slot.shape[0]:
                self._refuse(layer, f"it prefetches for layer {request.layer}, which does not come later in the pass")
            self._wanted.setdefault(request.layer, []).append(request)
        due = [layer + 1] if not self.overlapping else list(self._wanted)
        requests = [request for target in due for request in self._wanted.pop(target, ())]
        return self._land_all(requests, routing.info.kind, limit=MAX_PREFETCHES)

    def _stage(self, requests: Sequence[PageRequest], kind: PassKind) -> list[Move]:
        return self._land_all(requests, kind, limit=len(requests)) if requests else []

    def _land_all(self, requests: Sequence[PageRequest], kind: PassKind, *, limit: int) -> list[Move]:
        """Lands pages in descending priority, until `limit` have found room; they are counted for passes of a kind."""
        landed: list[Move] = []
        fresh = np.zeros(self.residency.slot.shape, bool)
        for request in sorted(requests, key=_descending_priority):
            if len(landed) == limit:
                break
            slot = self._land(request.layer, request.expert, kind, fresh[request.layer])
            if slot is not None:
                landed.append((request.layer, request.expert, slot))
        return landed

    def _land(self, layer: int, expert: int, kind: PassKind, fresh: Bool[np.ndarray, " E"]) -> int | None:
        """Gives the page a spare slot and evicts the layer's lowest-ranked resident that did not land just now."""
        residency = self.residency
        resident = residency.resident(layer)
        full = np.count_nonzero(resident) >= self.policy.capacities()[layer]
        victims = resident & ~fresh
        if resident[expert] or residency.free_slots == 0 or (full and not victims.any()):
            return None
        slot = int(residency.admit(layer, np.array([expert]))[0])
        if full:
            self._evict_lowest(layer, victims, 1)
        fresh[expert] = True
        self.statistics.fetched_ahead(kind, layer, expert)
        return slot

    def _shrink(self) -> None:
        """Evicts the lowest-ranked residents of layers that own fewer slots than before."""
        capacities, total = self.policy.capacities(), self.policy.context.total_slots
        if not np.count_nonzero(capacities != self._divided):
            return
        if capacities.sum() > total:
            self._refuse(None, f"its capacities add up to {capacities.sum()}, but {total} slots exist")
        counts = self.residency.counts()
        for layer in (counts > capacities).nonzero()[0].tolist():
            self._evict_lowest(layer, self.residency.resident(layer), int(counts[layer] - capacities[layer]))
        self._divided = capacities.copy()

    def _evict_lowest(self, layer: int, candidates: Bool[np.ndarray, " E"], count: int) -> None:
        stay = int(np.count_nonzero(candidates)) - count
        kept = top_scored(candidates, self.policy.scores(layer), self.residency.last_use[layer], stay)
        leaving = np.flatnonzero(candidates & ~kept)
        self._evict(layer, leaving)

    def _evict(self, layer: int, experts: Int[np.ndarray, " M"]) -> None:
        self.statistics.evicted(layer, experts.tolist())
        self.residency.evict(layer, experts)


def _descending_priority(request: PageRequest) -> float:
    return -request.priority
