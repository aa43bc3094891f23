"""What a cache policy sees, what it answers, and how most policies are put together.

A policy decides and never acts: NumPy in, NumPy out, no JAX, no device memory. The cache manager (in the
engine) and the simulator call the same object. The manager owns residency; it checks every decision against
the engine's rules.

Most policies are a retention rule, an allocation rule and a dispatch rule: see `composed.py`.
"""

# ruff: noqa: B027  (optional hooks: doing nothing is what they do by default)

import abc
import dataclasses
import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from oled_jax import native
from oled_jax.cost.profile import CostProfile
from oled_jax.folding import own_tokens
from oled_jax.passes import PassKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class FutureRouting:
    """What every pass will activate, for the oracles. Row i is the i-th pass of the engine, of any kind."""

    activated: Bool[np.ndarray, "I L E"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyContext:
    """What a policy is built for. Constant while the engine lives.

    total_slots: sum of C_l over the layers, the spare slots not counted.
    cpu_available: the engine has a CPU expert backend; without one every miss must be transferred.
    future: the recorded routing that is going to be replayed, if any; None while text is being generated.
    model: tells the weights from other weights, in one line; None where nobody knows.
    """

    num_layers: int
    num_experts: int
    top_k: int
    total_slots: int
    costs: CostProfile
    cpu_available: bool = False
    future: FutureRouting | None = dataclasses.field(default=None, repr=False, compare=False)
    model: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassInfo:
    """One forward pass, as known when it starts. N = batch rows x positions of the pass.

    confidence: c of the previous iteration; 1.0 for prompt tokens and in a block's first iteration.
    masked: the position holds the mask token. token_mask: the position is real (padding never routes).
    folds: rows in which a finished block is taken in before the row's own (`folding.py`), the last pass over it; None
    if the pass is one block wide.
    """

    kind: PassKind
    token_ids: Int[np.ndarray, " N"]
    masked: Bool[np.ndarray, " N"]
    token_mask: Bool[np.ndarray, " N"]
    confidence: Float[np.ndarray, " N"]
    folds: Bool[np.ndarray, " B"] | None = None

    @property
    def own_mask(self) -> Bool[np.ndarray, " N"]:
        """Real tokens of the blocks that later passes may go over again."""
        if self.folds is None:
            return self.token_mask
        return self.token_mask & own_tokens(self.folds, self.token_mask.size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IterationOutcome:
    """One forward pass, as known when the decoder has acted on it.

    token_ids: after the decoder acted. masked: the position held the mask token when the pass began.
    written: the decoder wrote a token there. confidence: c of this iteration, with the conventions of
    `PassInfo`.
    """

    kind: PassKind
    token_ids: Int[np.ndarray, " N"]
    written: Bool[np.ndarray, " N"]
    masked: Bool[np.ndarray, " N"]
    confidence: Float[np.ndarray, " N"]


@dataclasses.dataclass(slots=True, kw_only=True)  # not frozen: one is made for every layer, and freezing costs 2 us
class LayerRouting:
    """The router's result for one MoE layer in one pass, and the layer's residency before misses are handled.

    expert_ids: in [0, E) also where token_mask is False; such rows count nothing. loads: tokens per expert, 0
    where not activated. last_use: number of the last pass that activated the expert, this pass included; -1
    if never. hits, misses: activated experts that are resident and that are not, ascending. capacity: C_l.
    Nobody changes it. The arrays but hits and misses are lent: they may change after the call.
    """

    layer: int
    info: PassInfo
    expert_ids: Int[np.ndarray, "N K"]
    gates: Float[np.ndarray, "N K"]
    loads: Int[np.ndarray, " E"]
    resident: Bool[np.ndarray, " E"]
    last_use: Int[np.ndarray, " E"]
    hits: Int[np.ndarray, " H"]
    misses: Int[np.ndarray, " M"]
    capacity: int

    @property
    def activated(self) -> Bool[np.ndarray, " E"]:
        return self.loads > 0

    @property
    def num_activated(self) -> int:
        return self.hits.size + self.misses.size


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageRequest:
    """A page wanted in device memory ahead of its use. Greater priority first."""

    layer: int
    expert: int
    priority: float


@dataclasses.dataclass(slots=True, kw_only=True)  # not frozen: as `LayerRouting`
class Decision:
    """A policy's answer for one layer of one pass. Nobody changes it.

    to_gpu: misses to transfer, in this order. to_cpu: the other misses. keep: the resident set afterwards,
    a subset of resident and to_gpu with at most C_l + |evict| members. prefetch: pages for later layers of
    this pass; those that are resident or find no room are dropped.
    evict: pages of other layers, as (layer, expert), that leave so that this layer may grow (global lists
    only). Each lends its slot to this layer; from then on `Policy.capacities` says so.
    """

    to_gpu: Int[np.ndarray, " G"]
    to_cpu: Int[np.ndarray, " H"]
    keep: Bool[np.ndarray, " E"]
    prefetch: Sequence[PageRequest] = ()
    evict: Sequence[tuple[int, int]] = ()


class PlanningClock:
    """Host time spent planning, in microseconds, by part. One per policy; the manager reads and clears it."""

    PARTS = ("priority", "allocation", "dispatch")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """A pass is over and was read, or broke."""
        self.micros = dict.fromkeys(self.PARTS, 0.0)

    def part(self, name: str) -> "_TimedPart":
        """A context whose duration is added to this part."""
        return _TimedPart(self, name)


class _TimedPart:  # not a generator: that takes 2 us more
    def __init__(self, clock: PlanningClock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._clock.micros[self._name] += (time.perf_counter() - self._start) * 1e6


class Policy(abc.ABC):
    """One cache policy. A subclass's docstring says what it keeps, what it moves, and what it does in
    prefill.

    name: the specification it was built from (`oled:dispatch=gpu`). notes: sentences a user should read once.
    uses_cpu: it may leave misses to the CPU, so layer inputs must be sent to the host.
    """

    name: str
    uses_cpu: bool = False

    def __init__(self, context: PolicyContext) -> None:
        self.context = context
        self.clock = PlanningClock()
        self.notes: list[str] = []

    def begin_request(self, prompt_ids: Int[np.ndarray, " P"]) -> Sequence[PageRequest]:
        """A request starts. Returns pages to stage before its first pass."""
        return ()

    def begin_block(self) -> Sequence[PageRequest]:
        """A block starts. Returns pages to stage before its first pass."""
        return ()

    def begin_iteration(self, info: PassInfo) -> None:
        """A forward pass starts."""

    @abc.abstractmethod
    def on_route(self, routing: LayerRouting) -> Decision:
        """Decides for one layer. Called once per MoE layer and pass, in layer order."""

    def end_iteration(self, outcome: IterationOutcome) -> Sequence[PageRequest]:
        """A forward pass is over and the decoder has acted. Returns pages to stage before the next pass."""
        return ()

    @abc.abstractmethod
    def capacities(self) -> Int[np.ndarray, " L"]:
        """C_l; the sum is at most `context.total_slots`.

        Changes between passes only, except where a decision evicts pages of other layers: so it is read
        before each layer. The array belongs to the policy.
        """

    @abc.abstractmethod
    def scores(self, layer: int) -> Float[np.ndarray, " E"]:
        """How much each expert of a layer deserves to stay, greater is better; last use breaks ties."""

    def free_residents(self) -> Bool[np.ndarray, "L E"] | None:
        """The resident set of the next pass, put in place at no cost. None from every policy that can exist.

        Only the content oracle answers; a replay that honours it asks after the constructor and after each
        `end_iteration`.
        """
        return None

    def forget_residents(self) -> None:
        """Residency was emptied after a failed pass; whoever remembers what is resident forgets it here."""

    def close(self) -> None:
        """The engine is closed: what was learned may be kept for the next one. Replays never call it."""


def top_scored(
    candidates: Bool[np.ndarray, " E"],
    scores: Float[np.ndarray, " E"],
    last_use: Int[np.ndarray, " E"],
    count: int,
) -> Bool[np.ndarray, " E"]:
    """The `count` candidates of greatest (score, last use); lower expert numbers win what is still tied."""
    return best_residents(candidates, _NOBODY, scores, last_use, count)


_NOBODY = np.empty(0, np.int64)


@native.compiled
def best_residents(
    resident: Bool[np.ndarray, " E"],
    entering: Int[np.ndarray, " G"],
    scores: Float[np.ndarray, " E"],
    last_use: Int[np.ndarray, " E"],
    count: int,
) -> Bool[np.ndarray, " E"]:
    """`top_scored` of the residents and those that enter."""
    chosen = resident.copy()
    chosen[entering] = True
    experts = chosen.nonzero()[0]
    if experts.size > count:
        order = np.lexsort((-last_use[experts], -scores[experts]))
        chosen[experts[order[count:]]] = False
    return chosen
