"""SiDA: which experts a block needs is predicted when it starts."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from oled_jax.policies.allocation import UniformAllocation
from oled_jax.policies.base import Decision, LayerRouting, PageRequest, PolicyContext, top_scored
from oled_jax.policies.composed import ComposedPolicy, Retention
from oled_jax.policies.dispatch import TransferAll
from oled_jax.policies.options import PolicyEntry, require_range
from oled_jax.policies.prefetch import KnownResidents


@dataclasses.dataclass(frozen=True, kw_only=True)
class SidaOptions:
    """decay: weight of earlier blocks against the last one."""

    decay: float = 0.5

    def __post_init__(self) -> None:
        require_range(self, "decay", 0.0, 1.0)


class BlockPrediction(Retention):
    """Scores are decayed token counts of the blocks before this one; the prompt counts as a block."""

    def __init__(self, context: PolicyContext, decay: float) -> None:
        super().__init__(context)
        self.decay = decay
        self.predicted = np.zeros((context.num_layers, context.num_experts))
        self._block = np.zeros((context.num_layers, context.num_experts))

    def begin_request(self) -> None:
        self.predicted[:] = 0.0
        self._block[:] = 0.0

    def begin_block(self) -> None:
        self.predicted = self.decay * self.predicted + self._block
        self._block[:] = 0.0

    def observe(self, routing: LayerRouting) -> None:
        self._block[routing.layer] += routing.loads

    def scores(self, layer: int) -> Float[np.ndarray, " E"]:
        return self.predicted[layer]


class SidaPolicy(ComposedPolicy):
    """Keeps the experts that earlier blocks of this request used most; the ranking is fixed within a block.
    Moves every miss, and when a block starts the missing ones among the best C_l. In prefill every miss is
    transferred.

    Source: SiDA-MoE. Differences: the predictor is a decayed count of earlier blocks' routes instead of a
    trained network, and it decides residency only: the router stays authoritative.
    """

    def __init__(self, options: SidaOptions, context: PolicyContext) -> None:
        self._prediction = BlockPrediction(context, options.decay)
        super().__init__(
            context,
            name="sida",
            retention=self._prediction,
            allocation=UniformAllocation(context),
            dispatch=TransferAll(context),
        )
        self._known = KnownResidents(context)

    def begin_block(self) -> Sequence[PageRequest]:
        self._prediction.begin_block()
        predicted = self._prediction.predicted
        wanted = np.stack([self._best(layer) for layer in range(self.context.num_layers)])
        totals = predicted.sum(axis=1, keepdims=True)
        return self._known.request_all(wanted, predicted / np.where(totals > 0, totals, 1.0))

    def _best(self, layer: int) -> Bool[np.ndarray, " E"]:
        scores = self._prediction.predicted[layer]
        last_use = np.zeros(scores.size, np.int64)
        return top_scored(scores > 0, scores, last_use, int(self.capacities()[layer]))

    def on_route(self, routing: LayerRouting) -> Decision:
        decision = super().on_route(routing)
        self._known.update(routing.layer, decision.keep)
        return decision

    def forget_residents(self) -> None:
        self._known.forget()


ENTRIES = (
    PolicyEntry(
        name="sida",
        summary="SiDA: experts predicted from earlier blocks are fetched when a block starts",
        build=SidaPolicy,
        options=SidaOptions,
    ),
)
