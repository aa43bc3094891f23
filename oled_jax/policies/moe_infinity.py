"""MoE-Infinity: request-level activation matrices predict what later layers need."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from oled_jax.passes import PassKind
from oled_jax.policies.allocation import UniformAllocation, uniform_capacities
from oled_jax.policies.base import Decision, LayerRouting, PageRequest, PolicyContext
from oled_jax.policies.composed import ComposedPolicy, Retention
from oled_jax.policies.dispatch import TransferAll
from oled_jax.policies.options import NoOptions, PolicyEntry, require_range
from oled_jax.policies.prefetch import KnownResidents
from oled_jax.policies.retention import Frequency


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeInfinityOptions:
    """store_size: activation matrices of earlier requests to keep. max_prefetch: pages asked for a layer."""

    store_size: int = 1000
    max_prefetch: int = 8

    def __post_init__(self) -> None:
        require_range(self, "store_size", 0)
        require_range(self, "max_prefetch", 0)


class MatrixStore:
    """Activation matrices of earlier requests; rows are scaled to length 1, rows without routes are 0."""

    def __init__(self, context: PolicyContext, size: int) -> None:
        self.size = size
        self.count = 0
        # Layer first: one layer's rows of all matrices are one contiguous matrix-vector product.
        self.rows = np.zeros((context.num_layers, size, context.num_experts), np.float32)

    def add(self, matrix: Float[np.ndarray, "L E"]) -> None:
        """Appends; a full store gives up the matrix nearest to the new one, which says almost the same."""
        if self.size == 0:
            return
        rows = unit_rows(matrix)
        if self.count < self.size:
            place = self.count
            self.count += 1
        else:
            place = int(np.einsum("lne,le->n", self.rows, rows).argmax())
        self.rows[:, place] = rows


def unit_rows(matrix: Float[np.ndarray, "*R E"]) -> Float[np.ndarray, "*R E"]:
    length = np.sqrt((matrix * matrix).sum(axis=-1, keepdims=True))
    return matrix / np.where(length > 0, length, 1.0)


class MatrixRetention(Retention):
    """Scores are a row of the predicted activation matrix, as shares of the row's tokens.

    The prediction is the stored matrix at the least distance 1 - mean over layers <= l of the cosine of rows;
    without a stored matrix it is this request's own.

    worth_fetching: the predicted shares of each layer's best C_l experts, 0 elsewhere.
    """

    def __init__(self, context: PolicyContext, store_size: int) -> None:
        super().__init__(context)
        self.store = MatrixStore(context, store_size)
        self.own = np.zeros((context.num_layers, context.num_experts), np.float32)
        self.predicted = np.zeros_like(self.own)
        self.worth_fetching = np.zeros_like(self.own)
        self._capacity = int(uniform_capacities(context).min())
        self._similarity = np.zeros(0, np.float32)
        self._nearest = -1

    def begin_request(self) -> None:
        if self.own.any():
            self.store.add(self.own)
        self.own[:] = 0.0
        self._nearest = -1

    def observe(self, routing: LayerRouting) -> None:
        layer = routing.layer
        self.own[layer] += routing.loads
        if self.store.count == 0:
            self._predict(slice(layer, layer + 1), self.own[layer : layer + 1])
            return
        if layer == 0:
            self._similarity = np.zeros(self.store.count, np.float32)
        # The mean over layers <= l has the same divisor for all matrices: their sums are in the same order.
        self._similarity += self.store.rows[layer, : self.store.count] @ unit_rows(self.own[layer])
        nearest = int(self._similarity.argmax())
        if nearest != self._nearest:
            self._nearest = nearest
            self._predict(slice(None), self.store.rows[:, nearest])

    def _predict(self, layers: slice, rows: Float[np.ndarray, "R E"]) -> None:
        shares = rows / np.maximum(rows.sum(axis=1, keepdims=True), 1e-9)
        self.predicted[layers] = shares
        if self._capacity > 0:
            least = np.partition(shares, -self._capacity, axis=1)[:, -self._capacity, None]
            self.worth_fetching[layers] = np.where(shares >= least, shares, 0.0)

    def scores(self, layer: int) -> Float[np.ndarray, " E"]:
        return self.predicted[layer]


class MoeInfinityPolicy(ComposedPolicy):
    """Keeps the experts with the greatest predicted share of their layer's tokens. Moves every miss, and
    after each layer fetches the best-predicted missing experts of later layers: share * (1 - layer distance
    / (L + 1)).

    In prefill every miss is transferred and nothing is fetched ahead: nearly every expert is needed anyway.

    Source: MoE-Infinity (Xue et al.). Differences: capacities are per layer, so the layer factor orders
    prefetches but not evictions; a routed token counts once per pass, as in the original once per decoded
    token; only a layer's best C_l are fetched, as a fetched page replaces another at once, and their number
    per layer is bounded, where the original re-sorts a queue that its copy thread drains at will.
    """

    def __init__(self, options: MoeInfinityOptions, context: PolicyContext) -> None:
        self._matrices = MatrixRetention(context, options.store_size)
        super().__init__(
            context,
            name="moe-infinity",
            retention=self._matrices,
            allocation=UniformAllocation(context),
            dispatch=TransferAll(context),
        )
        self.options = options
        self._known = KnownResidents(context)
        L = context.num_layers
        self._nearness = 1.0 - np.arange(1, L + 1)[:, None] / (L + 1)

    def on_route(self, routing: LayerRouting) -> Decision:
        decision = super().on_route(routing)
        with self.clock.part("priority"):
            self._known.update(routing.layer, decision.keep)
            prefetch = self._later_layers(routing)
        return dataclasses.replace(decision, prefetch=prefetch) if prefetch else decision

    def _later_layers(self, routing: LayerRouting) -> Sequence[PageRequest]:
        first = routing.layer + 1
        later = self.context.num_layers - first
        if later == 0 or self.options.max_prefetch == 0 or routing.info.kind is PassKind.PREFILL:
            return ()
        priority = self._matrices.worth_fetching[first:] * self._nearness[:later]
        return self._known.request_best(first, priority, self.options.max_prefetch)

    def forget_residents(self) -> None:
        self._known.forget()


class MoeInfinityLfuPolicy(ComposedPolicy):
    """Keeps the experts that most passes since this request's prefill activated. Moves every miss, also in
    prefill.

    Source: what the released code of MoE-Infinity runs: evict the smallest visit count, which its timing
    scripts clear when decoding starts. Differences: it evicts across layers, here per layer; its prefetch is
    off.
    """

    def __init__(self, options: NoOptions, context: PolicyContext) -> None:
        super().__init__(
            context,
            name="moe-infinity-lfu",
            retention=Frequency(context, since="decoding"),
            allocation=UniformAllocation(context),
            dispatch=TransferAll(context),
        )


ENTRIES = (
    PolicyEntry(
        name="moe-infinity",
        summary="MoE-Infinity: activation matrices of earlier requests predict and prefetch later layers",
        build=MoeInfinityPolicy,
        options=MoeInfinityOptions,
    ),
    PolicyEntry(
        name="moe-infinity-lfu",
        summary="the eviction of MoE-Infinity's released code: visit counts since decoding began",
        build=MoeInfinityLfuPolicy,
    ),
)
