"""A small residency simulator that obeys the cache manager's rules, and random routings to run it on."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from oled_jax.cost.profile import CostProfile
from oled_jax.passes import PassKind
from oled_jax.policies.base import (
    Decision,
    FutureRouting,
    IterationOutcome,
    LayerRouting,
    PageRequest,
    PassInfo,
    Policy,
    PolicyContext,
    top_scored,
)

COSTS = CostProfile(h2d_us=120.0, cpu_fixed_us=90.0, cpu_token_us=15.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One recorded pass: ids and gates [L, N, K]."""

    info: PassInfo
    outcome: IterationOutcome
    ids: np.ndarray
    gates: np.ndarray
    begins_request: bool = False
    begins_block: bool = False

    def loads(self, layer: int, num_experts: int) -> np.ndarray:
        return np.bincount(self.ids[layer][self.info.token_mask].ravel(), minlength=num_experts)


def context(**changes: object) -> PolicyContext:
    values: dict = {"num_layers": 3, "num_experts": 16, "top_k": 2, "total_slots": 18, "costs": COSTS}
    values |= {"cpu_available": True, **changes}
    return PolicyContext(**values)


def make_pass(ids: object, gates: object | None = None, *, kind: PassKind = PassKind.DENOISE, **fields: object) -> Pass:
    """A pass from ids [L, N, K]; gates default to 1 / K, confidence to 1, every token is real and masked."""
    experts = np.asarray(ids, np.int32)
    _, N, K = experts.shape
    flags = {
        "begins_request": fields.pop("begins_request", False),
        "begins_block": fields.pop("begins_block", False),
    }
    values: dict = {
        "token_ids": np.arange(N, dtype=np.int32),
        "masked": np.ones(N, bool),
        "token_mask": np.ones(N, bool),
        "confidence": np.ones(N, np.float32),
        "confidence_after": np.ones(N, np.float32),
        "written": np.zeros(N, bool),
    }
    values |= fields
    after, written = values.pop("confidence_after"), values.pop("written")
    info = PassInfo(kind=kind, **values)
    outcome = IterationOutcome(
        kind=kind, token_ids=info.token_ids, written=written, masked=info.masked, confidence=after
    )
    weights = np.full(experts.shape, 1.0 / K) if gates is None else np.asarray(gates)
    return Pass(info=info, outcome=outcome, ids=experts, gates=weights.astype(np.float32), **flags)


def make_routing(*, loads: np.ndarray, resident: np.ndarray, **fields) -> LayerRouting:
    """A routing whose hits and misses follow from loads and residents."""
    hits, misses = np.flatnonzero((loads > 0) & resident), np.flatnonzero((loads > 0) & ~resident)
    return LayerRouting(loads=loads, resident=resident, hits=hits, misses=misses, **fields)


def _kind(step: int, block: int) -> PassKind:
    """The kind of a request's step-th pass."""
    if step == 0:
        return PassKind.PREFILL
    ends = {block - 2: PassKind.EDIT, block - 1: PassKind.COMMIT}
    return ends.get((step - 1) % block, PassKind.DENOISE)


def random_passes(
    seed: int,
    count: int,
    *,
    num_layers: int = 3,
    num_experts: int = 16,
    top_k: int = 2,
    tokens: int = 8,
    stay: float = 0.7,
    block: int = 6,
    request: int = 18,
) -> list[Pass]:
    """Requests of a prefill, then blocks of denoise passes that end in an edit and a commit pass.

    stay: chance that a token keeps its experts of the previous pass.
    """
    rng = np.random.default_rng(seed)
    popularity = rng.dirichlet(np.full(num_experts, 0.3), num_layers) + 1e-3
    passes: list[Pass] = []
    previous = None
    for number in range(count):
        step = number % request
        kind = _kind(step, block)
        N = tokens * 3 if kind is PassKind.PREFILL else tokens
        keys = np.log(popularity)[:, None] + rng.gumbel(size=(num_layers, N, num_experts))
        ids = np.argsort(-keys, axis=2)[:, :, :top_k]
        if previous is not None and previous.shape == ids.shape:
            ids = np.where(rng.random((num_layers, N, 1)) < stay, previous, ids)
        previous = ids
        mask = np.ones(N, bool)
        mask[N - int(rng.integers(0, 3)) :] = False
        passes.append(
            make_pass(
                ids,
                rng.random(ids.shape) + 0.05,
                kind=kind,
                token_ids=rng.integers(0, 50, N).astype(np.int32),
                masked=rng.random(N) < 0.5,
                token_mask=mask,
                confidence=rng.random(N).astype(np.float32),
                confidence_after=rng.random(N).astype(np.float32),
                written=rng.random(N) < 0.2,
                begins_request=step == 0,
                begins_block=step > 0 and (step - 1) % block == 0,
            )
        )
    return passes


def future_of(passes: Sequence[Pass], num_experts: int = 16) -> FutureRouting:
    return FutureRouting(
        activated=np.stack([np.stack([p.loads(layer, num_experts) > 0 for layer in range(len(p.ids))]) for p in passes])
    )


class Driver:
    """Runs one policy; asserts every rule of the engine at every step.

    log: the routing and the decision of every layer, in order. staged: pages that a stage request brought in.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        shape = (policy.context.num_layers, policy.context.num_experts)
        self.resident = np.zeros(shape, bool)
        self.last_use = np.full(shape, -1, np.int64)
        self.log: list[tuple[LayerRouting, Decision]] = []
        self.staged: list[tuple[int, int]] = []
        self.prefetched: list[tuple[int, int]] = []
        self._number = 0
        self._take_free()

    def run(self, passes: Sequence[Pass]) -> "Driver":
        for step in passes:
            self.run_pass(step)
        return self

    def run_pass(self, step: Pass) -> None:
        if step.begins_request:
            self.staged += self._land(self.policy.begin_request(step.info.token_ids))
        if step.begins_block:
            self.staged += self._land(self.policy.begin_block())
        self._number += 1
        self.policy.begin_iteration(step.info)
        for layer in range(self.policy.context.num_layers):
            self._route(step, layer)
        self.staged += self._land(self.policy.end_iteration(step.outcome))
        self._shrink()
        self._take_free()

    def _route(self, step: Pass, layer: int) -> None:
        policy = self.policy
        loads = step.loads(layer, policy.context.num_experts)
        self.last_use[layer, loads > 0] = self._number
        capacities = policy.capacities()
        assert capacities.sum() <= policy.context.total_slots
        assert np.all(self.resident.sum(axis=1) <= capacities)
        routing = make_routing(
            layer=layer,
            info=step.info,
            expert_ids=step.ids[layer].copy(),
            gates=step.gates[layer].copy(),
            loads=loads,
            resident=self.resident[layer].copy(),
            last_use=self.last_use[layer],
            capacity=int(capacities[layer]),
        )
        before = routing.resident.copy()
        decision = policy.on_route(routing)
        assert np.array_equal(routing.resident, before), "a policy must not write into the routing"
        self._check(routing, decision)
        self.log.append((routing, decision))
        # The carrier reuses its buffers: nothing that a policy remembers may alias them.
        routing.expert_ids[:] = 0
        routing.gates[:] = 0.0
        self.resident[layer] = decision.keep
        for other, expert in decision.evict:
            assert other != layer
            assert self.resident[other, expert]
            self.resident[other, expert] = False
        assert all(request.layer > layer for request in decision.prefetch)
        self.prefetched += self._land(decision.prefetch)

    def _check(self, routing: LayerRouting, decision: Decision) -> None:
        handled = np.concatenate([decision.to_gpu, decision.to_cpu])
        assert np.array_equal(np.sort(handled), routing.misses)
        present = routing.resident.copy()
        present[decision.to_gpu] = True
        assert not np.any(decision.keep & ~present)
        assert decision.keep.sum() <= routing.capacity + len(decision.evict)
        if not self.policy.context.cpu_available:
            assert decision.to_cpu.size == 0

    def _land(self, requests: Sequence[PageRequest]) -> list[tuple[int, int]]:
        """Every page that is not resident lands; a full layer gives up its lowest-ranked older resident."""
        landed = []
        fresh = np.zeros_like(self.resident)
        capacities = self.policy.capacities()
        for request in sorted(requests, key=lambda wanted: -wanted.priority):
            layer, expert = request.layer, request.expert
            full = self.resident[layer].sum() >= capacities[layer]
            victims = self.resident[layer] & ~fresh[layer]
            if self.resident[layer, expert] or (full and not victims.any()):
                continue
            if full:
                self._evict_lowest(layer, victims, 1)
            self.resident[layer, expert] = fresh[layer, expert] = True
            landed.append((layer, expert))
        return landed

    def _shrink(self) -> None:
        capacities = self.policy.capacities()
        for layer in np.flatnonzero(self.resident.sum(axis=1) > capacities):
            excess = int(self.resident[layer].sum() - capacities[layer])
            self._evict_lowest(int(layer), self.resident[layer].copy(), excess)

    def _evict_lowest(self, layer: int, candidates: np.ndarray, count: int) -> None:
        stay = int(candidates.sum()) - count
        scores, last_use = self.policy.scores(layer), self.last_use[layer]
        self.resident[layer] &= ~candidates | top_scored(candidates, scores, last_use, stay)

    def _take_free(self) -> None:
        free = self.policy.free_residents()
        if free is not None:
            self.resident = free.copy()

    def decisions(self) -> Iterator[Decision]:
        return (decision for _, decision in self.log)

    @property
    def hits(self) -> int:
        return sum(int((routing.activated & routing.resident).sum()) for routing, _ in self.log)

    @property
    def transfers(self) -> int:
        return sum(decision.to_gpu.size for decision in self.decisions())
