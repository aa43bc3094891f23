"""The expert layers that a model calls: pages paged in under a plan, or every page resident.

Both run `ops.grouped_ffn` over a pool; they differ in who says which slot holds which page.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from oled_jax.models.moe import Experts, combine
from oled_jax.offload.carriers.base import Carrier, InPlan, Span
from oled_jax.offload.plan import PlanLayout
from oled_jax.offload.pool import Pool
from oled_jax.ops.expert_items import expert_items
from oled_jax.ops.grouped_ffn import grouped_ffn, item_rows, pair_rows
from oled_jax.ops.grouping import ItemShape


class ExpertCarry(NamedTuple):
    """What goes from one MoE layer to the next.

    out: what work items write their rows into, one buffer for all layers; only rows that were computed are read.
    routes: expert ids per MoE layer so far, where nothing calls out to the host (else the manager has seen them).
    """

    pool: Pool
    out: Float[Array, "I R D"]
    routes: tuple[Int[Array, "N K"], ...] = ()

    @classmethod
    def start(cls, pool: Pool, items: ItemShape) -> "ExpertCarry":
        """The carry before the first layer."""
        shape = (items.max_items, items.rows, pool.down.shape[1])
        return cls(pool, jnp.zeros(shape, pool.down.dtype))


class OffloadedExperts:
    """Experts of which only some are resident.

    Args:
      carrier: asks the manager and moves pages.
      layout: of this pass's plans.
    """

    def __init__(self, carrier: Carrier, layout: PlanLayout) -> None:
        self.carrier = carrier
        self.layout = layout

    def __call__(
        self,
        layer: int,
        x: Float[Array, "N D"],
        ids: Int[Array, "N K"],
        gates: Float[Array, "N K"],
        carry: ExpertCarry,
    ) -> tuple[Float[Array, "N D"], ExpertCarry]:
        """The combined rows of the routed experts, and the carry after this layer's transfers."""
        layout, items = self.layout, self.layout.items
        pool, plan = self.carrier.route(layer, x, ids, gates, carry.pool, layout)
        rows = item_rows(x, plan["pair_row"], items)

        def compute(span: Span, pool: Pool, out: Array) -> Array:
            numbers = plan.flat
            if isinstance(span, InPlan):
                span_at = layout.slices[span.field].start + span.place
            else:
                span_at = layout.slices["late_items"].start
                numbers = numbers.at[span_at : span_at + 2].set(jnp.stack(span))
            slots_at = layout.slices["item_slot"].start
            return grouped_ffn(rows, numbers, *pool, out, span_at=span_at, slots_at=slots_at)

        pool, out = self.carrier.carry_out(layer, plan, pool, carry.out, compute)
        total = combine(pair_rows(out, plan["pair_row"], items), gates)
        total = self.carrier.add_cpu_share(layer, plan, pool, total)
        return total.astype(x.dtype), carry._replace(pool=pool, out=out)


class ResidentExperts:
    """Experts that are all resident: expert e of layer l lies in slot l * E + e. No callbacks.

    Args:
      items: shape of the pass.
      token_mask: [N], False for padding, which is not computed.
    """

    def __init__(self, items: ItemShape, token_mask: Bool[Array, " N"]) -> None:
        self.items = items
        self.token_mask = token_mask

    def __call__(
        self,
        layer: int,
        x: Float[Array, "N D"],
        ids: Int[Array, "N K"],
        gates: Float[Array, "N K"],
        carry: ExpertCarry,
    ) -> tuple[Float[Array, "N D"], ExpertCarry]:
        """The combined rows of the routed experts, and the carry with this layer's routes."""
        E = self.items.num_experts
        keys = jnp.where(self.token_mask[:, None], ids, E).ravel()
        pair_row, experts, count = expert_items(keys, self.items)
        numbers = jnp.concatenate([jnp.stack([jnp.zeros_like(count), count]), layer * E + experts])
        rows = item_rows(x, pair_row, self.items)
        out = grouped_ffn(rows, numbers, *carry.pool, carry.out, span_at=0, slots_at=2)
        total = combine(pair_rows(out, pair_row, self.items), gates)
        return total.astype(x.dtype), carry._replace(out=out, routes=(*carry.routes, ids))


class ReplayedExperts:
    """Experts that are called with recorded routes. The gates stay the router's: they cost what gates cost.

    Args:
      experts: compute the layers.
      routes: expert ids for every MoE layer of this pass.
    """

    def __init__(self, experts: Experts, routes: Int32[Array, "L N K"]) -> None:
        self.experts = experts
        self.routes = routes

    def __call__(
        self,
        layer: int,
        x: Float[Array, "N D"],
        ids: Int[Array, "N K"],
        gates: Float[Array, "N K"],
        carry: Any,
    ) -> tuple[Float[Array, "N D"], Any]:
        """What the wrapped experts give for the recorded routes."""
        return self.experts(layer, x, self.routes[layer], gates, carry)
