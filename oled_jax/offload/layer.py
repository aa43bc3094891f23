"""The expert layers that a model calls: pages paged in under a plan, or every page resident.

Both run `ops.grouped_ffn` over a pool; they differ in who says which slot holds which page.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oled_jax.models.moe import combine
from oled_jax.offload.carriers.base import Carrier
from oled_jax.offload.plan import PlanLayout
from oled_jax.offload.pool import Pool
from oled_jax.ops.grouped_ffn import grouped_ffn, item_rows, pair_rows
from oled_jax.ops.grouping import ItemShape, group_pairs


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
      num_layers: MoE layers of the model.
    """

    def __init__(self, carrier: Carrier, layout: PlanLayout, *, num_layers: int) -> None:
        self.carrier = carrier
        self.layout = layout
        self.num_layers = num_layers

    def __call__(
        self,
        layer: int,
        x: Float[Array, "N D"],
        ids: Int[Array, "N K"],
        gates: Float[Array, "N K"],
        carry: ExpertCarry,
    ) -> tuple[Float[Array, "N D"], ExpertCarry]:
        """The combined rows of the routed experts, and the carry after this layer's transfers."""
        plan = self.carrier.route(layer, x, ids, gates, self.layout)
        items = self.layout.items
        rows = item_rows(x, plan["pair_row"], items)

        def one_round(index: Int[Array, ""], state: tuple[Pool, Array]) -> tuple[Pool, Array]:
            pool, out = state
            previous = jnp.maximum(index - 1, 0)
            first_transfer = jnp.where(index > 0, plan["transfer_end"][previous], 0)
            first_item = jnp.where(index > 0, plan["item_end"][previous], 0)
            moves = (
                plan["transfer_expert"],
                plan["transfer_slot"],
                first_transfer,
                plan["transfer_end"][index],
            )
            pool = self.carrier.fetch(layer, pool, *moves)
            bounds = first_item, plan["item_end"][index]
            return pool, grouped_ffn(rows, plan["item_slot"], bounds, *pool, out)

        pool, out = jax.lax.fori_loop(0, plan["num_rounds"][0], one_round, (carry.pool, carry.out))
        if layer + 1 < self.num_layers:
            count = plan["prefetch_count"][0]
            moves = plan["prefetch_expert"], plan["prefetch_slot"], jnp.zeros_like(count), count
            pool = self.carrier.fetch(layer + 1, pool, *moves)
        total = combine(pair_rows(out, plan["pair_row"], items), gates)
        total = self.carrier.add_cpu_share(layer, plan["cpu_pairs"][0], total)
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
        pair_row, counts = group_pairs(keys, E, self.items, jnp)
        slots = layer * E + jnp.repeat(jnp.arange(E), counts, total_repeat_length=self.items.max_items)
        bounds = jnp.zeros_like(counts[0]), counts.sum()
        rows = item_rows(x, pair_row, self.items)
        out = grouped_ffn(rows, slots, bounds, *carry.pool, carry.out)
        total = combine(pair_rows(out, pair_row, self.items), gates)
        return total.astype(x.dtype), carry._replace(out=out, routes=(*carry.routes, ids))
