"""FineMoE: expert maps of earlier iterations predict what a few layers ahead will need."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from oled_jax.passes import PassKind
from oled_jax.policies.allocation import UniformAllocation
from oled_jax.policies.base import (
    Decision,
    IterationOutcome,
    LayerRouting,
    PageRequest,
    PassInfo,
    PolicyContext,
)
from oled_jax.policies.composed import ComposedPolicy, Retention
from oled_jax.policies.dispatch import TransferAll
from oled_jax.policies.expert_maps import MapStore, TokenMeaning
from oled_jax.policies.options import PolicyEntry, require_range
from oled_jax.policies.prefetch import KnownResidents


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineMoeOptions:
    """distance: layers ahead that are predicted, d. store_size: expert maps to remember. max_prefetch: pages
    asked for a layer at most.
    """

    distance: int = 3
    store_size: int = 1000
    max_prefetch: int = 16

    def __post_init__(self) -> None:
        require_range(self, "distance", 1)
        require_range(self, "store_size", 1)
        require_range(self, "max_prefetch", 1)


class MapRetention(Retention):
    """Scores are p * visits: p from the most similar map, visits the passes that activated the expert so far.

    Layer l + d is predicted when layer l is routed, by the cosine of the trajectory over layers <= l; the
    first d layers are predicted between passes, by the meaning of the unmasked tokens. Before a map is
    stored, p = 1.
    """

    def __init__(self, context: PolicyContext, options: FineMoeOptions) -> None:
        super().__init__(context)
        L, E = context.num_layers, context.num_experts
        self.distance = min(options.distance, L)
        self.store = MapStore(context, options.store_size)
        self.meaning = TokenMeaning(options.store_size)
        self.predicted = np.ones((L, E))
        self.similarity = np.zeros(L)
        self._visits = np.zeros((L, E))
        self._map = np.zeros((L, E), np.float32)
        self._share = np.zeros(0)
        self._recording = False

    def begin_iteration(self, info: PassInfo) -> None:
        self._recording = info.kind is not PassKind.PREFILL
        self._share = info.token_mask / max(int(info.token_mask.sum()), 1)
        self.predict_first_layers(info.token_ids, info.token_mask & ~info.masked)

    def predict_first_layers(self, token_ids: Int[np.ndarray, " N"], known: Bool[np.ndarray, " N"]) -> None:
        """Predicts layers < d from the tokens that are written."""
        found = self.meaning.nearest(token_ids, known, self.store.count)
        if found is not None:
            place, similarity = found
            self.predicted[: self.distance] = self.store.maps[: self.distance, place]
            self.similarity[: self.distance] = similarity

    def observe(self, routing: LayerRouting) -> None:
        layer, E = routing.layer, self.context.num_experts
        self._visits[layer] += routing.activated
        if not self._recording:
            return
        totals = routing.gates.sum(axis=1)
        weights = routing.gates * (self._share / np.where(totals > 0, totals, 1.0))[:, None]
        self._map[layer] = np.bincount(routing.expert_ids.ravel(), weights.ravel(), E)
        found = self.store.nearest(layer, self._map[layer])
        target = layer + self.distance
        if found is not None and target < self.context.num_layers:
            place, self.similarity[target] = found
            self.predicted[target] = self.store.maps[target, place]

    def end_iteration(self, outcome: IterationOutcome) -> None:
        if self._recording:
            self.meaning.record(self.store.add(self._map))

    def scores(self, layer: int) -> Float[np.ndarray, " E"]:
        return self.predicted[layer] * self._visits[layer]

    def selected(self, layer: int) -> Float[np.ndarray, " E"]:
        """p of the experts to fetch, 0 elsewhere: in descending order until p adds up to clip(1 -
        similarity, 0, 1), at least the top K."""
        p = self.predicted[layer]
        order = np.argsort(-p, kind="stable")
        threshold = min(max(1.0 - float(self.similarity[layer]), 0.0), 1.0)
        count = int(np.searchsorted(np.cumsum(p[order]), threshold - 1e-9)) + 1
        chosen = order[: max(count, self.context.top_k)]
        result = np.zeros(p.size)
        result[chosen] = p[chosen]
        return result


class FineMoePolicy(ComposedPolicy):
    """Keeps the experts of greatest p * visits. Moves every miss; after layer l it fetches the experts that
    the most similar stored map predicts for layer l + d, and between passes those of the first d layers.

    In prefill every miss is transferred; prefill passes are neither stored as maps nor predicted.

    Source: FineMoE. Differences: a map holds the gates of the top K experts only, which is all that is known
    here, each token's scaled to sum to 1 (sigmoid gates do not); the tokens' maps are united by their mean,
    one map per pass, where the original searches per token; a full store gives up the map most similar to
    the new one by trajectory alone; a layer is sent at most `max_prefetch` pages ahead; tokens are compared
    by their ids, not by their embeddings, which a replay does not have.
    """

    def __init__(self, options: FineMoeOptions, context: PolicyContext) -> None:
        self._maps = MapRetention(context, options)
        super().__init__(
            context,
            name="finemoe",
            retention=self._maps,
            allocation=UniformAllocation(context),
            dispatch=TransferAll(context),
        )
        self.options = options
        self._known = KnownResidents(context)
        self._real = np.zeros(0, bool)

    def on_route(self, routing: LayerRouting) -> Decision:
        decision = super().on_route(routing)
        with self.clock.part("priority"):
            self._known.update(routing.layer, decision.keep)
            target = routing.layer + self._maps.distance
            ready = self._maps.store.count > 0 and routing.info.kind is not PassKind.PREFILL
            if not ready or target >= self.context.num_layers:
                return decision
            prefetch = self._fetch(target)
        return dataclasses.replace(decision, prefetch=prefetch) if prefetch else decision

    def end_iteration(self, outcome: IterationOutcome) -> Sequence[PageRequest]:
        super().end_iteration(outcome)
        with self.clock.part("priority"):
            known = (~outcome.masked | outcome.written) & self._real
            self._maps.predict_first_layers(outcome.token_ids, known)
            if self._maps.store.count == 0:
                return ()
            return [page for layer in range(self._maps.distance) for page in self._fetch(layer)]

    def begin_iteration(self, info: PassInfo) -> None:
        super().begin_iteration(info)
        self._real = info.own_mask

    def _fetch(self, layer: int) -> Sequence[PageRequest]:
        return self._known.request_best(layer, self._maps.selected(layer)[None], self.options.max_prefetch)

    def forget_residents(self) -> None:
        self._known.forget()


ENTRIES = (
    PolicyEntry(
        name="finemoe",
        summary="FineMoE: expert maps of earlier iterations predict and prefetch 3 layers ahead",
        build=FineMoePolicy,
        options=FineMoeOptions,
    ),
)
