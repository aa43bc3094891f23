"""The expert feed-forward over work items, and the sum over k: the only expert arithmetic on the device.

`grouped_ffn` is one operation with several implementations; all modes (every page resident, some resident, rounds) go
through it, and one shared test runs them all.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from oled_jax.errors import UsageError
from oled_jax.ops.grouping import ItemShape

Rows = Float[Array, "P D"]


def item_pairs(pair_row: Int[Array, " P"], shape: ItemShape) -> Int[Array, "I R"]:
    """The inverse of `pair_row`: the pair that each row of each item holds; P where the row is padding."""
    slots = shape.max_items * shape.rows
    target = jnp.where(pair_row >= 0, pair_row, slots)
    table = jnp.full(slots, shape.pairs, jnp.int32).at[target].set(jnp.arange(shape.pairs, dtype=jnp.int32), mode="drop")
    return table.reshape(shape.max_items, shape.rows)


def expert_ffn(x: Float[Array, "R D"], gate_up: Float[Array, "G D"], down: Float[Array, "D F"]) -> Float[Array, "R D"]:
    """down(silu(gate(x)) * up(x)) in x's dtype, for one page [2F, D], [D, F] (REFERENCE section 4, step 6)."""
    precision = jax.lax.Precision.HIGHEST
    gate, up = jnp.split(jnp.einsum("rd,gd->rg", x, gate_up, precision=precision), 2, axis=-1)
    return jnp.einsum("rf,df->rd", jax.nn.silu(gate) * up, down, precision=precision)


def _xla(
    x: Float[Array, "N D"],
    pairs: Int[Array, "I R"],
    slots: Int[Array, " I"],
    bounds: tuple[Int[Array, ""], Int[Array, ""]],
    gate_up: Float[Array, "C G D"],
    down: Float[Array, "C D F"],
    out: Rows,
) -> Rows:
    """A loop over items: works on every backend, reads each active page once, and allocates nothing."""
    top_k = out.shape[0] // x.shape[0]

    def body(item: Int[Array, ""], out: Rows) -> Rows:
        page_up = jax.lax.dynamic_index_in_dim(gate_up, slots[item], keepdims=False)
        page_down = jax.lax.dynamic_index_in_dim(down, slots[item], keepdims=False)
        rows = x.at[pairs[item] // top_k].get(mode="clip")
        return out.at[pairs[item]].set(expert_ffn(rows, page_up, page_down), mode="drop")

    return jax.lax.fori_loop(*bounds, body, out)


IMPLEMENTATIONS: dict[str, Callable[..., Rows]] = {"xla": _xla}


def grouped_ffn(
    x: Float[Array, "N D"],
    pairs: Int[Array, "I R"],
    slots: Int[Array, " I"],
    bounds: tuple[Int[Array, ""], Int[Array, ""]],
    gate_up: Float[Array, "C G D"],
    down: Float[Array, "C D F"],
    out: Rows,
    *,
    implementation: str | None = None,
) -> Rows:
    """Computes the work items [bounds[0], bounds[1]) and writes their rows into `out`.

    Args:
      x: tokens, in the model dtype.
      pairs: for each row of each item the (token, k) pair it computes, token * K + k; P where padding.
      slots: the pool slot of each item's page.
      bounds: first item and end of the items to compute.
      gate_up, down: the pool.
      out: [P, D], one row per pair; rows of other items are left as they are.
      implementation: a key of `IMPLEMENTATIONS`; None takes the best for the backend.

    Returns:
      out, updated.
    """
    name = implementation or "xla"
    if name not in IMPLEMENTATIONS:
        raise UsageError(f"unknown implementation {name!r} of grouped_ffn, known: {', '.join(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name](x, pairs, slots, bounds, gate_up, down, out)


def combine(rows: Float[Array, "P D"], gates: Float[Array, "N K"]) -> Float32[Array, "N D"]:
    """Sum over k of gate * row, in float32 and in the order of k (REFERENCE section 4, step 6; cast it once)."""
    N, K = gates.shape
    rows = rows.reshape(N, K, -1).astype(jnp.float32)
    total = gates[:, 0, None] * rows[:, 0]
    for k in range(1, K):
        total = total + gates[:, k, None] * rows[:, k]
    return total
