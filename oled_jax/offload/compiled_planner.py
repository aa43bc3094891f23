"""Planning a whole layer in one call of the extension, for policies made of parts that it knows.

A layer waits for its plan while the caches of the planning core hold something else, so every line of Python, every
array and every call costs microseconds. Decisions and plans are, bit for bit, those of the policy's own rules and of
the manager's steps (tests); what Python needs of them, to count and to learn, is asked for when nothing waits.
"""

import numpy as np
from jaxtyping import Float32, Int, Int32

from oled_jax import native
from oled_jax.offload.plan import PlanLayout
from oled_jax.offload.residency import Residency
from oled_jax.passes import PassKind
from oled_jax.policies.base import Decision, LayerRouting, PassInfo, Policy
from oled_jax.policies.composed import ComposedPolicy
from oled_jax.policies.dispatch import BalancedDispatch, TransferAll
from oled_jax.policies.retention import Priority, Recency


def compiled_planner(policy: Policy, residency: Residency, loads: Int[np.ndarray, " E"]) -> "CompiledPlanner | None":
    """The planner of a policy's layers, or None if Python must plan them.

    Args:
      residency: its tables are read and written.
      loads: scratch, gets the tokens per expert of the layer that is planned.
    """
    if native.extension is None or not isinstance(policy, ComposedPolicy):
        return None
    # What a subclass, or an attribute of this very policy, does in another way is not ours.
    if getattr(policy.on_route, "__func__", None) is not ComposedPolicy.on_route:
        return None
    retention, dispatch = policy.retention, policy.dispatch
    if type(retention) not in (Priority, Recency) or type(dispatch) not in (BalancedDispatch, TransferAll):
        return None
    # Without a CPU backend a share is an error that the manager words.
    if dispatch.uses_cpu and not policy.context.cpu_available:
        return None
    return CompiledPlanner(policy, residency, loads)


class CompiledPlanner:
    """Plans the layers of passes. Made by `compiled_planner`."""

    def __init__(self, policy: ComposedPolicy, residency: Residency, loads: Int[np.ndarray, " E"]) -> None:
        self._policy = policy
        self._residency = residency
        self._loads = loads
        self.pass_number = 0  # of the pass that was begun last
        dispatch, costs = policy.dispatch, policy.dispatch.context.costs
        balanced = dispatch if isinstance(dispatch, BalancedDispatch) else None
        self._transfers_all = balanced is None
        self._planner = native.extension.planning.LayerPlanner(  # type: ignore[union-attr]
            **residency.tables(),
            loads=loads,
            h2d_us=costs.h2d_us,
            cpu_fixed_us=costs.cpu_fixed_us,
            cpu_token_us=costs.cpu_token_us,
            reuse_weight=0.0 if balanced is None else balanced.reuse_weight,
            swaps=0 if balanced is None else balanced.swaps,
        )

    def begin_pass(
        self,
        info: PassInfo,
        pass_number: int,
        layout: PlanLayout,
        expert_ids: Int32[np.ndarray, "N K"],
        gates: Float32[np.ndarray, "N K"],
    ) -> None:
        """A pass starts, and the policy knows of it. expert_ids, gates: get those of the layer that is planned."""
        retention = self._policy.retention
        assert isinstance(retention, Priority | Recency)
        routes = retention.ranked_routes()
        self._info, self._expert_ids, self._gates = info, expert_ids, gates
        self._planner.begin_pass(
            pass_number=pass_number,
            transfers_all=self._transfers_all or info.kind is PassKind.PREFILL,
            capacities=self._policy.capacities(),
            token_mask=info.token_mask,
            expert_ids=expert_ids,
            gates=gates,
            scores=routes.scores,
            weights=routes.weights,
            kept_ids=routes.expert_ids,
            kept_gates=routes.gates,
            rows=layout.items.rows,
            bounds=layout.bounds,
        )
        self.pass_number = pass_number

    def plan(
        self, layer: int, packed: Int[np.ndarray, "N K2"], plan: Int32[np.ndarray, " size"]
    ) -> Int[np.ndarray, " H"] | None:
        """Decides one layer, makes it true in the tables and writes the plan. Returns what the CPU computes, if any."""
        residency = self._residency
        residency.free_slots, to_cpu = self._planner.plan(layer, residency.free_slots, packed, plan)
        return to_cpu

    def decided(self, layer: int) -> tuple[LayerRouting, Decision]:
        """What was decided for this layer, which was planned last; the policy learns from it."""
        hits, misses, to_gpu, to_cpu, keep, capacity = self._planner.decided()
        routing = LayerRouting(
            layer=layer,
            info=self._info,
            expert_ids=self._expert_ids,
            gates=self._gates,
            loads=self._loads,
            resident=self._residency.last_resident,
            last_use=self._residency.last_use_rows[layer],
            hits=hits,
            misses=misses,
            capacity=capacity,
        )
        self._policy.allocation.observe(routing)
        return routing, Decision(to_gpu=to_gpu, to_cpu=to_cpu, keep=keep)

    def end_pass(self) -> None:
        """A pass is over, or broke: its times go to the policy's clock."""
        micros = self._policy.clock.micros
        priority_us, dispatch_us = self._planner.take_times()
        micros["priority"] += priority_us
        micros["dispatch"] += dispatch_us
