"""The expert feed-forward over work items: what goes in, the arithmetic, and where its rows come out.

`grouped_ffn` is one operation with several implementations; all modes (every page resident, some resident, rounds) go
through it, and one shared test runs them all.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from oled_jax.errors import UsageError
from oled_jax.models.layers import swiglu
from oled_jax.ops import grouped_ffn_triton
from oled_jax.ops.grouping import ItemShape
from oled_jax.ops.loops import keep_narrow

IMPLEMENTATIONS = ("xla", "triton")


@functools.partial(jax.jit, static_argnames="shape")
def item_rows(x: Float[Array, "N D"], pair_row: Int[Array, " P"], shape: ItemShape) -> Float[Array, "J R D"]:
    """The rows that each item computes: [I, R, D], or [1, R, D] where every item holds all tokens."""
    if shape.direct:
        return x[None]
    slots = shape.max_items * shape.rows
    target = jnp.where(pair_row >= 0, pair_row, slots)
    token = jnp.zeros(slots, jnp.int32).at[target].set(jnp.arange(shape.pairs) // shape.top_k, mode="drop")
    return x[token].reshape(shape.max_items, shape.rows, -1)


@functools.partial(jax.jit, static_argnames=("span_at", "slots_at", "implementation"))
def grouped_ffn(
    rows: Float[Array, "J R D"],
    numbers: Int[Array, " n"],
    gate_up: Float[Array, "C G D"],
    down: Float[Array, "C D F"],
    out: Float[Array, "I R D"],
    *,
    span_at: int,
    slots_at: int,
    implementation: str | None = None,
) -> Float[Array, "I R D"]:
    """down(silu(gate(x)) * up(x)) for the rows of some work items (REFERENCE section 4).

    Args:
      rows: of `item_rows`, in the model dtype.
      numbers: what a plan says of the items, as it comes from the host. Kernels read it as it is: to cut it into pieces
        would be kernels, too, and the device waits for a plan.
      gate_up, down: the pool.
      out: rows of other items are left as they are.
      span_at: where in `numbers` the first item to compute stands, and behind it the end of those to compute.
      slots_at: where in `numbers` the pool slots of the I items' pages begin.
      implementation: "xla" works on every backend; "triton" needs a GPU and sizes that its tiles divide; None takes
        the better one that can run.

    Returns:
      out, updated.
    """
    name = implementation or _best(gate_up)
    if name not in IMPLEMENTATIONS:
        raise UsageError(f"unknown implementation {name!r} of grouped_ffn, known: {', '.join(IMPLEMENTATIONS)}")
    compute = grouped_ffn_triton.grouped_ffn if name == "triton" else _xla
    return compute(rows, numbers, gate_up, down, out, span_at=span_at, slots_at=slots_at)


def _best(gate_up: Float[Array, "C G D"]) -> str:
    on_gpu = jax.default_backend() == "gpu"
    return "triton" if on_gpu and grouped_ffn_triton.supports(gate_up.shape, gate_up.dtype) else "xla"


def _xla(
    rows: Float[Array, "J R D"],
    numbers: Int[Array, " n"],
    gate_up: Float[Array, "C G D"],
    down: Float[Array, "C D F"],
    out: Float[Array, "I R D"],
    *,
    span_at: int,
    slots_at: int,
) -> Float[Array, "I R D"]:
    """A loop over items: reads each active page once and allocates nothing; on a GPU each step is several launches."""

    def body(item: Int[Array, ""], out: Float[Array, "I R D"]) -> Float[Array, "I R D"]:
        pool_up, pool_down, item = keep_narrow((gate_up, down, item))
        slot = numbers[slots_at + item]
        page_up = jax.lax.dynamic_index_in_dim(pool_up, slot, keepdims=False)
        page_down = jax.lax.dynamic_index_in_dim(pool_down, slot, keepdims=False)
        x = rows[0] if rows.shape[0] == 1 else jax.lax.dynamic_index_in_dim(rows, item, keepdims=False)
        gate, up = jnp.split(page_up, 2)
        return jax.lax.dynamic_update_index_in_dim(out, swiglu(x, gate, up, page_down), item, 0)

    return jax.lax.fori_loop(numbers[span_at], numbers[span_at + 1], body, out)


def pair_rows(out: Float[Array, "I R D"], pair_row: Int[Array, " P"], shape: ItemShape) -> Float[Array, "N K D"]:
    """The row of each (token, k) pair; zeros for a pair that no item computes (padding, or left to the CPU)."""
    rows = out.reshape(-1, out.shape[-1])[pair_row]
    rows = jnp.where((pair_row >= 0)[:, None], rows, jnp.zeros_like(rows))
    return rows.reshape(shape.num_tokens, shape.top_k, -1)
