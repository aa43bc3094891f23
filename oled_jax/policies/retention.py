"""Which residents stay: the ranking rules that several policies share."""

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int, Int32

from oled_jax import native
from oled_jax.passes import PassKind
from oled_jax.policies.base import IterationOutcome, LayerRouting, PassInfo, PolicyContext
from oled_jax.policies.composed import Retention

Psi = Literal["confidence", "ones", "square"]
Confidence = Literal["previous+rerank", "previous", "none"]


class RankedRoutes(NamedTuple):
    """How a retention rule scores experts, as the extension needs it (`offload/compiled_planner.py`).

    weights, expert_ids, gates: what `score_layer` makes a layer's scores of, and where it keeps the routes;
    None: the scores stay as they are. All arrays may be replaced between passes.
    """

    scores: Float[np.ndarray, "L E"]
    weights: Float[np.ndarray, " N"] | None = None
    expert_ids: Int[np.ndarray, "L N K"] | None = None
    gates: Float[np.ndarray, "L N K"] | None = None


class Recency(Retention):
    """Least recently used leaves: every score is 0, and ties are broken by last use."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._scores = np.zeros((context.num_layers, context.num_experts))

    def scores(self, layer: int) -> Float[np.ndarray, " E"]:
        return self._scores[layer]

    def ranked_routes(self) -> RankedRoutes:
        """All that `observe` does and `scores` says."""
        return RankedRoutes(self._scores)


class Frequency(Retention):
    """Least frequently used leaves. A use is one pass that activates the expert, however many tokens it
    serves.

    Args:
      since: when counts return to 0: at each request, or when a request's first pass after its prefill
      starts.
      halve_every: passes between two halvings of all counts; None: counts never age.
    """

    def __init__(
        self,
        context: PolicyContext,
        *,
        since: Literal["request", "decoding"] = "request",
        halve_every: int | None = None,
    ) -> None:
        super().__init__(context)
        self.since = since
        self.halve_every = halve_every
        self._counts = np.zeros((context.num_layers, context.num_experts))
        self._passes = 0
        self._decoding = False

    def begin_request(self) -> None:
        self._decoding = False
        if self.since == "request":
            self._clear()

    def begin_iteration(self, info: PassInfo) -> None:
        if info.kind is not PassKind.PREFILL and not self._decoding:
            self._decoding = True
            if self.since == "decoding":
                self._clear()

    def _clear(self) -> None:
        self._counts[:] = 0.0
        self._passes = 0

    def observe(self, routing: LayerRouting) -> None:
        self._counts[routing.layer] += routing.activated

    def end_iteration(self, outcome: IterationOutcome) -> None:
        self._passes += 1
        if self.halve_every is not None and self._passes % self.halve_every == 0:
            self._counts *= 0.5

    def scores(self, layer: int) -> Float[np.ndarray, " E"]:
        return self._counts[layer]


class Priority(Retention):
    """Confidence-weighted router importance (OLED-MoE, inter-iteration retention).

        p_e = sum over tokens t routed to e of g_te * psi(c_t), divided by the same sum over all experts

    t runs over the blocks that are decoded: a finished block that a pass takes in beside them does not come again.
    Experts that no such token activates have p = 0. While a layer runs, only the confidence of the
    previous iteration exists; with `previous+rerank` the residents are ranked again with this iteration's
    when it ends.

    Args:
      psi: confidence: psi(c) = c; ones: 1; square: c * c.
      confidence: which iteration's confidence ranks; none: gates only, whatever psi says.
    """

    def __init__(
        self, context: PolicyContext, *, psi: Psi = "confidence", confidence: Confidence = "previous+rerank"
    ) -> None:
        super().__init__(context)
        self.psi: Psi = "ones" if confidence == "none" else psi
        self.rerank = confidence == "previous+rerank" and self.psi != "ones"
        L, E = context.num_layers, context.num_experts
        self._scores = np.zeros((L, E))
        self._rows = list(self._scores)
        self._weights = np.zeros(0)
        self._mask = np.zeros(0, bool)
        self._ids = np.zeros((L, 0, context.top_k), np.int32)
        self._gates = np.zeros((L, 0, context.top_k), np.float32)

    def begin_iteration(self, info: PassInfo) -> None:
        self._mask = info.own_mask
        self._weights = self._psi(info.confidence)
        N = info.token_mask.shape[0]
        L, previous_N, K = self._ids.shape
        if previous_N != N:
            self._ids = np.zeros((L, N, K), np.int32)
            self._gates = np.zeros((L, N, K), np.float32)

    def _psi(self, confidence: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """psi(c) per token, 0 where there is no token."""
        weights = self._mask.astype(np.float64)
        if self.psi == "confidence":
            weights *= confidence
        elif self.psi == "square":
            weights *= confidence * confidence
        return weights

    def observe(self, routing: LayerRouting) -> None:
        score_layer(
            routing.layer, routing.expert_ids, routing.gates, self._weights, self._ids, self._gates, self._scores
        )

    def end_iteration(self, outcome: IterationOutcome) -> None:
        if self.rerank:
            weights = self._psi(outcome.confidence)
            score_layers(self._ids, self._gates, weights, self._scores)

    def scores(self, layer: int) -> Float[np.ndarray, " E"]:
        return self._rows[layer]

    def ranked_routes(self) -> RankedRoutes:
        """All that `observe` does and `scores` says."""
        return RankedRoutes(self._scores, self._weights, self._ids, self._gates)


@native.compiled
def score_layer(
    layer: int,
    expert_ids: Int32[np.ndarray, "N K"],
    gates: Float32[np.ndarray, "N K"],
    weights: Float[np.ndarray, " N"],
    kept_ids: Int32[np.ndarray, "L N K"],
    kept_gates: Float32[np.ndarray, "L N K"],
    scores: Float[np.ndarray, "L E"],
) -> None:
    """Writes a layer's priorities, and copies of its routes: those of a routing are only lent."""
    kept_ids[layer] = expert_ids
    kept_gates[layer] = gates
    _score(expert_ids, gates, weights, scores[layer])


@native.compiled
def score_layers(
    expert_ids: Int32[np.ndarray, "L N K"],
    gates: Float32[np.ndarray, "L N K"],
    weights: Float[np.ndarray, " N"],
    scores: Float[np.ndarray, "L E"],
) -> None:
    """Writes the priorities of all layers."""
    L, E = scores.shape
    _score(expert_ids + (np.arange(L) * E)[:, None, None], gates, weights, scores)


def _score(
    cells: Int[np.ndarray, "*L N K"],
    gates: Float32[np.ndarray, "*L N K"],
    weights: Float[np.ndarray, " N"],
    scores: Float[np.ndarray, "*L E"],
) -> None:
    """Sums over tokens of gate times the token's weight, divided by their total where that is positive.

    Sums run in the order of tokens, totals in that of experts.

    Args:
      cells: where in `scores`, raveled, each pair is added.
    """
    weighted = gates * weights[:, None]
    sums = np.bincount(cells.ravel(), weighted.ravel(), scores.size).reshape(scores.shape)
    totals = sums.cumsum(axis=-1)[..., -1:]
    np.divide(sums, np.where(totals > 0, totals, 1.0), out=scores)
