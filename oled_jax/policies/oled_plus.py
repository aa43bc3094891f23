"""oled+: residents ranked by expected reuse, slots moved to where they hit, pages staged while the link is idle."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from oled_jax.policies.allocation import ADAPTING_PASSES, UniformAllocation
from oled_jax.policies.base import Decision, IterationOutcome, LayerRouting, PageRequest, PolicyContext
from oled_jax.policies.certainty import MissingCertainty
from oled_jax.policies.composed import ComposedPolicy
from oled_jax.policies.learned import LearnedFile, open_learned
from oled_jax.policies.marginal import MarginalAllocation
from oled_jax.policies.oled import DispatchOptions, build_dispatch
from oled_jax.policies.options import PolicyEntry, require_range
from oled_jax.policies.prefetch import KnownResidents
from oled_jax.policies.reuse import ExpectedReuse
from oled_jax.policies.token_table import TokenTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class OledPlusOptions(DispatchOptions):
    """allocation: marginal or uniform.

    stage: most pages fetched between two passes; 0: none, and token ids are not learned. certainty: how much likelier a
    page must be to be used by the next pass than the one it replaces, to be fetched. tokens: most token ids remembered.
    table: off, cache (a file for this model in the user's cache directory) or a file: what was learned is read from
    there at the start and written there when the engine is closed.
    """

    allocation: Literal["marginal", "uniform"] = "marginal"
    stage: int = 0
    certainty: float = 0.8
    tokens: int = 4096
    table: str = "off"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range(self, "stage", 0)
        require_range(self, "certainty", 0.0, 1.0)
        require_range(self, "tokens", 1)


class OledPlusPolicy(ComposedPolicy):
    """Keeps each layer's experts that are likeliest to be used soon: by the states of the tokens that chose them, by
    what a block begins with, and by age and rate where neither says anything. Moves misses as `oled` does; between
    passes it stages pages that the tokens just written are all but certain to need. In prefill every miss is
    transferred.

    All of it is estimated online; nothing was trained before. Goes beyond the OLED-MoE paper.
    """

    def __init__(self, options: OledPlusOptions, context: PolicyContext) -> None:
        shape = {"num_layers": context.num_layers, "num_experts": context.num_experts, "top_k": context.top_k}
        dispatch = build_dispatch(context, options)
        table = TokenTable(**shape, tokens=options.tokens) if options.stage else None
        self._reuse = ExpectedReuse(context, table, as_shares=dispatch.uses_cpu)
        self._margins = MarginalAllocation(context) if options.allocation == "marginal" else None
        super().__init__(
            context,
            name="oled+",
            retention=self._reuse,
            allocation=self._margins or UniformAllocation(context),
            dispatch=dispatch,
        )
        self.options = options
        self._known = KnownResidents(context)
        self._certainty = MissingCertainty(context.num_layers, context.num_experts)
        self._parts = (*self._reuse.parts, self._certainty)
        self._learned: LearnedFile | None = open_learned(options.table, context)
        if self._learned is not None:
            self.notes.append(self._learned.load(self._parts))

    def on_route(self, routing: LayerRouting) -> Decision:
        decision = super().on_route(routing)
        self._known.update(routing.layer, decision.keep)
        if self._margins is not None:
            with self.clock.part("allocation"):
                self._margins.decided(routing, decision, self._reuse.scores(routing.layer))
        return decision

    def end_iteration(self, outcome: IterationOutcome) -> Sequence[PageRequest]:
        super().end_iteration(outcome)
        if self.options.stage == 0:
            return ()
        with self.clock.part("priority"):
            chances = self._certainty.measured(
                self._reuse.activated,
                self._reuse.likely,
                ~self._known.pages,
                opening=outcome.kind not in ADAPTING_PASSES,
            )
            return self._certain(chances)

    def _certain(self, chances: Float[np.ndarray, "L E"]) -> list[PageRequest]:
        """Pages to stage, at most `stage`: earlier layers first, the likelier first within one."""
        requests: list[PageRequest] = []
        for layer in np.flatnonzero(chances.max(axis=1) >= self.options.certainty).tolist():
            requests += self._exchanges(layer, chances[layer])
        return requests[: self.options.stage]

    def _exchanges(self, layer: int, chances: Float[np.ndarray, " E"]) -> list[PageRequest]:
        """The best of the missing pages against the residents that would leave for them, pair by pair."""
        likely, scores, known = self._reuse.likely[layer], self._reuse.scores(layer), self._known.pages[layer]
        entering = np.flatnonzero(chances >= self.options.certainty)
        entering = entering[np.argsort(-chances[entering], kind="stable")]
        residents = np.flatnonzero(known)
        leaving = residents[np.argsort(scores[residents], kind="stable")][: entering.size]
        free = max(int(self.capacities()[layer]) - residents.size, 0)
        price = np.concatenate([np.zeros(free), likely[leaving]])[: entering.size]
        entering = entering[: price.size]
        entering = entering[chances[entering] - price >= self.options.certainty]
        known[entering] = True
        layers_left = self.context.num_layers - layer
        return [
            PageRequest(layer=layer, expert=expert, priority=layers_left + chance)
            for expert, chance in zip(entering.tolist(), (0.5 * chances[entering]).tolist(), strict=True)
        ]

    def forget_residents(self) -> None:
        self._known.forget()

    def close(self) -> None:
        if self._learned is not None:
            self._learned.save(self._parts)


ENTRIES = (
    PolicyEntry(
        name="oled+",
        summary="beyond OLED-MoE: ranking by token state, identity and history, slots by marginal hits, staging",
        build=OledPlusPolicy,
        options=OledPlusOptions,
    ),
)
