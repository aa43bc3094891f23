"""SwapMoE: experts of lasting importance to the router stay, and are fetched a layer ahead."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from oled_jax.passes import PassKind
from oled_jax.policies.allocation import UniformAllocation
from oled_jax.policies.base import Decision, LayerRouting, PageRequest, PolicyContext
from oled_jax.policies.composed import ComposedPolicy, Retention
from oled_jax.policies.dispatch import TransferAll
from oled_jax.policies.options import PolicyEntry, require_range
from oled_jax.policies.prefetch import KnownResidents


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwapMoeOptions:
    """decay: weight of the past in the running importance. max_prefetch: pages asked for after a layer."""

    decay: float = 0.9
    max_prefetch: int = 4

    def __post_init__(self) -> None:
        require_range(self, "decay", 0.0, 1.0)
        require_range(self, "max_prefetch", 0)


class Importance(Retention):
    """Scores are running means of each expert's share of the gates, over all passes and requests."""

    def __init__(self, context: PolicyContext, decay: float) -> None:
        super().__init__(context)
        self.decay = decay
        self.importance = np.zeros((context.num_layers, context.num_experts))

    def observe(self, routing: LayerRouting) -> None:
        gates = routing.gates * routing.info.token_mask[:, None]
        shares = np.bincount(routing.expert_ids.ravel(), gates.ravel(), self.context.num_experts)
        total = float(shares.sum())
        row = self.importance[routing.layer]
        row *= self.decay
        if total > 0:
            row += shares * ((1.0 - self.decay) / total)

    def scores(self, layer: int) -> Float[np.ndarray, " E"]:
        return self.importance[layer]


class SwapMoePolicy(ComposedPolicy):
    """Keeps the experts of greatest running gate importance. Moves every miss, and after each layer the
    missing ones among the next layer's C_l most important. In prefill every miss is transferred and nothing
    is fetched ahead.

    Source: SwapMoE. Differences: the original computes only with its resident experts and masks the gates of
    the others; here importance decides residency alone, and routing is never changed.
    """

    def __init__(self, options: SwapMoeOptions, context: PolicyContext) -> None:
        self._importance = Importance(context, options.decay)
        super().__init__(
            context,
            name="swapmoe",
            retention=self._importance,
            allocation=UniformAllocation(context),
            dispatch=TransferAll(context),
        )
        self.options = options
        self._known = KnownResidents(context)

    def on_route(self, routing: LayerRouting) -> Decision:
        decision = super().on_route(routing)
        with self.clock.part("priority"):
            self._known.update(routing.layer, decision.keep)
            prefetch = self._next_layer(routing)
        return dataclasses.replace(decision, prefetch=prefetch) if prefetch else decision

    def _next_layer(self, routing: LayerRouting) -> Sequence[PageRequest]:
        following = routing.layer + 1
        last = following == self.context.num_layers
        if last or self.options.max_prefetch == 0 or routing.info.kind is PassKind.PREFILL:
            return ()
        scores = self._importance.importance[following]
        capacity = int(self.capacities()[following])
        if capacity == 0:
            return ()
        least = np.partition(scores, -capacity)[-capacity]
        important = np.where(scores >= least, scores, 0.0)
        return self._known.request_best(following, important[None], self.options.max_prefetch)

    def forget_residents(self) -> None:
        self._known.forget()


ENTRIES = (
    PolicyEntry(
        name="swapmoe",
        summary="SwapMoE: experts of greatest running gate importance stay and are fetched a layer ahead",
        build=SwapMoePolicy,
        options=SwapMoeOptions,
    ),
)
