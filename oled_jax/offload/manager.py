"""The cache manager: hits, misses, the policy's decision, slots, the plan. NumPy only, no device array.

One manager belongs to one engine. Between passes the engine's thread calls `begin_*` and `end_iteration`; during a pass
a carrier calls `on_route` and `collect` once per MoE layer, from a host-callback thread. The two never overlap, because
the engine waits for a pass before it goes on; so there is no lock.
"""

import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float32, Int

from oled_jax.errors import PolicyError
from oled_jax.offload.cpu_experts.base import CpuExperts, CpuWork
from oled_jax.offload.plan import MAX_PREFETCHES, PlanLayout
from oled_jax.offload.residency import Residency
from oled_jax.offload.schedule import schedule
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

Move = tuple[int, int, int]  # layer, expert, slot


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
        self._layouts: dict[int, PlanLayout] = {}
        self._plans: dict[tuple[int, int], tuple[np.ndarray, dict[str, np.ndarray]]] = {}
        self._info: PassInfo | None = None
        self._pass_number = 0
        self._planning_us = 0.0
        self._wanted: dict[int, list[PageRequest]] = {}
        self._ahead = np.zeros((context.num_layers, context.num_experts), bool)

    def layout(self, num_tokens: int) -> PlanLayout:
        """The plan layout of a pass over this many tokens (batch rows x positions)."""
        if num_tokens not in self._layouts:
            context = self.policy.context
            items = ItemShape(num_tokens=num_tokens, top_k=context.top_k, num_experts=context.num_experts)
            self._layouts[num_tokens] = PlanLayout(items=items, spare=self.spare)
        return self._layouts[num_tokens]

    # Between passes

    def begin_request(self, prompt_ids: Int[np.ndarray, " P"]) -> list[Move]:
        """A request starts. Returns pages to stage now."""
        return self._stage(self.policy.begin_request(prompt_ids))

    def begin_block(self) -> list[Move]:
        """A block starts. Returns pages to stage now."""
        return self._stage(self.policy.begin_block())

    def begin_pass(self, info: PassInfo) -> None:
        """A forward pass starts."""
        if self.idle:
            return
        self._info = info
        self._pass_number += 1
        self._planning_us = 0.0
        self.policy.begin_iteration(info)

    def end_iteration(self, outcome: IterationOutcome) -> list[Move]:
        """A pass is over and the decoder has acted. Returns pages to stage now."""
        start = time.perf_counter()
        requests = self.policy.end_iteration(outcome)
        self._shrink()
        staged = self._stage(requests)
        total = self._planning_us + (time.perf_counter() - start) * 1e6
        parts = dict(self.policy.clock.micros)
        self.policy.clock.micros = dict.fromkeys(parts, 0.0)
        residency = total - sum(parts.values())
        self.statistics.add_planning(outcome.kind, {**parts, "residency": residency, "total": total})
        return staged

    def raise_failure(self) -> None:
        """Raises what a callback of the last pass met, as itself, after forgetting all residents.

        The tables may promise pages that never arrived, so nothing they say can be kept.
        """
        failure, self.failure = self.failure, None
        if failure is not None:
            self.forget()
            raise failure

    def forget(self) -> None:
        """Empties the cache: the pool's content is no longer known."""
        if self.cpu_experts is not None:
            self.cpu_experts.reset()
        self.residency.clear()
        self.policy.forget_residents()
        self.statistics.forget()
        self._wanted.clear()
        self._ahead[:] = False

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
        layout = self.layout(packed.shape[0])
        if self.failure is not None or self.idle:
            return layout.empty()
        try:
            flat = self._plan(layer, packed, hidden, layout)
        except BaseException as failure:  # it must not cross the callback: the engine raises it
            self.failure = failure
            return layout.empty()
        self._planning_us += (time.perf_counter() - start) * 1e6
        return flat

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
        self, layer: int, packed: Int[np.ndarray, "N K2"], hidden: np.ndarray | None, layout: PlanLayout
    ) -> Int[np.ndarray, " size"]:
        routing, pair_expert = self._routing(layer, packed)
        decision = self.policy.on_route(routing)
        self._check(routing, decision)
        flat, plan = self._plan_buffer(layer, layout)
        plan["cpu_pairs"][0] = self._start_cpu(routing, decision, hidden) if decision.to_cpu.size else 0
        self._count(routing, decision)
        for other, expert in decision.evict:
            self.residency.evict(other, np.array([expert]))
        schedule(self.residency, routing, decision, pair_expert, layout, plan)
        plan["prefetch_count"][0] = 0
        if decision.prefetch or self._wanted:
            self._add_prefetches(layer, decision, plan)
        return flat

    def _plan_buffer(self, layer: int, layout: PlanLayout) -> tuple[Int[np.ndarray, " size"], dict[str, np.ndarray]]:
        """A plan to write and its fields. One per layer, since the device may read it until the pass is over."""
        key = (layer, layout.items.num_tokens)
        if key not in self._plans:
            flat = layout.empty()
            self._plans[key] = flat, layout.fields(flat)
        return self._plans[key]

    def _routing(self, layer: int, packed: Int[np.ndarray, "N K2"]) -> tuple[LayerRouting, Int[np.ndarray, " P"]]:
        info = self._info
        if info is None or info.token_mask.shape[0] != packed.shape[0]:
            raise RuntimeError(f"a route of {packed.shape[0]} tokens arrived outside a pass of that size")
        K, E = self.policy.context.top_k, self.policy.context.num_experts
        ids = packed[:, :K]
        pair_expert = np.where(info.token_mask[:, None], ids, E).ravel()
        loads = np.bincount(pair_expert, minlength=E + 1)[:E]
        last_use = self.residency.last_use[layer]
        last_use[loads > 0] = self._pass_number
        routing = LayerRouting(
            layer=layer,
            info=info,
            expert_ids=ids,
            gates=packed[:, K:].view(np.float32),
            loads=loads,
            resident=self.residency.resident(layer),
            last_use=last_use,
            capacity=int(self.policy.capacities()[layer]),
        )
        return routing, pair_expert

    def _check(self, routing: LayerRouting, decision: Decision) -> None:
        """Every miss handled once; keep is made of pages that are there and fits."""
        E = routing.loads.shape[0]
        handled = np.bincount(np.concatenate([decision.to_gpu, decision.to_cpu]), minlength=E)
        missed = (routing.loads > 0) & ~routing.resident
        if handled.size != E or (handled != missed).any():
            self._refuse(routing.layer, "its transfers and CPU experts are not exactly the misses, each once")
        present = routing.resident | missed
        if decision.to_cpu.size:
            present[decision.to_cpu] = False
            if self.cpu_experts is None:
                self._refuse(routing.layer, "it leaves experts to the CPU, but the engine has no CPU backend")
        if (decision.keep > present).any():
            self._refuse(routing.layer, "it keeps experts that are neither resident nor transferred")
        if np.count_nonzero(decision.keep) > routing.capacity + len(decision.evict):
            self._refuse(routing.layer, f"it keeps {decision.keep.sum()} experts, the capacity is {routing.capacity}")

    def _refuse(self, layer: int | None, why: str) -> None:
        where = "" if layer is None else f", layer {layer}"
        raise PolicyError(f"policy {self.policy.name!r}{where}: {why}")

    def _start_cpu(self, routing: LayerRouting, decision: Decision, hidden: np.ndarray | None) -> int:
        if self.cpu_experts is None or hidden is None:
            raise RuntimeError("a CPU share was planned, but the layer's input was not sent to the host")
        self.cpu_experts.submit(
            CpuWork(
                layer=routing.layer,
                hidden=hidden,
                experts=decision.to_cpu,
                expert_ids=routing.expert_ids,
                gates=routing.gates,
                token_mask=routing.info.token_mask,
            )
        )
        return int(routing.loads[decision.to_cpu].sum())

    def _count(self, routing: LayerRouting, decision: Decision) -> None:
        layer, kind = routing.layer, routing.info.kind
        hits = (routing.loads > 0) & routing.resident
        num_hits = int(np.count_nonzero(hits))
        early = self._ahead[layer] & hits
        self._ahead[layer] ^= early
        self.statistics.reused(layer, hits)
        self.statistics.add(
            kind,
            layer,
            activated=num_hits + decision.to_gpu.size + decision.to_cpu.size,
            hits=num_hits,
            to_gpu=decision.to_gpu.size,
            to_cpu=decision.to_cpu.size,
            capacity=routing.capacity,
            prefetch_used=int(np.count_nonzero(early)),
        )
        self.statistics.arrived(kind, layer, decision.to_gpu[decision.keep[decision.to_gpu]])

    # Pages ahead of their use

    def _add_prefetches(self, layer: int, decision: Decision, plan: dict[str, np.ndarray]) -> None:
        """Queues the policy's prefetches; those for the next layer leave with this plan.

        The portable carrier moves pages between two layers' arithmetic, where nothing overlaps: a page for a far layer
        gains nothing by leaving early, so it waits until the layer before its own.
        """
        for request in decision.prefetch:
            if not layer < request.layer < self.residency.slot.shape[0]:
                self._refuse(layer, f"it prefetches for layer {request.layer}, which does not come later in the pass")
            self._wanted.setdefault(request.layer, []).append(request)
        moves = self._land_all(self._wanted.pop(layer + 1, ()), limit=MAX_PREFETCHES)
        plan["prefetch_count"][0] = len(moves)
        for index, (_, expert, slot) in enumerate(moves):
            plan["prefetch_expert"][index] = expert
            plan["prefetch_slot"][index] = slot

    def _stage(self, requests: Sequence[PageRequest]) -> list[Move]:
        return self._land_all(requests, limit=len(requests)) if requests else []

    def _land_all(self, requests: Sequence[PageRequest], *, limit: int) -> list[Move]:
        """Lands pages in descending priority, until `limit` have found room."""
        landed: list[Move] = []
        fresh = np.zeros_like(self._ahead)
        for request in sorted(requests, key=_descending_priority):
            if len(landed) == limit:
                break
            slot = self._land(request.layer, request.expert, fresh[request.layer])
            if slot is not None:
                landed.append((request.layer, request.expert, slot))
        return landed

    def _land(self, layer: int, expert: int, fresh: Bool[np.ndarray, " E"]) -> int | None:
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
        self._ahead[layer, expert] = True
        kind = self._info.kind if self._info else PassKind.PREFILL
        self.statistics.count(kind, layer, "prefetched", 1)
        return slot

    def _shrink(self) -> None:
        """Evicts the lowest-ranked residents of layers that own fewer slots than before."""
        capacities, total = self.policy.capacities(), self.policy.context.total_slots
        if capacities.sum() > total:
            self._refuse(None, f"its capacities add up to {capacities.sum()}, but {total} slots exist")
        counts = self.residency.counts()
        for layer in np.flatnonzero(counts > capacities):
            excess = int(counts[layer] - capacities[layer])
            self._evict_lowest(int(layer), self.residency.resident(int(layer)), excess)

    def _evict_lowest(self, layer: int, candidates: Bool[np.ndarray, " E"], count: int) -> None:
        stay = int(np.count_nonzero(candidates)) - count
        kept = top_scored(candidates, self.policy.scores(layer), self.residency.last_use[layer], stay)
        leaving = np.flatnonzero(candidates & ~kept)
        self._ahead[layer, leaving] = False
        self.residency.evict(layer, leaving)


def _descending_priority(request: PageRequest) -> float:
    return -request.priority
