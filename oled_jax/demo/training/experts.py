"""Routed experts for training: every expert resident, pairs grouped by expert, exact (nothing is dropped).

The grouping is that of inference (`ops/grouping.py`: items of one expert and a fixed number of rows), but all
items are computed at once in two batched products, and every gather has a gather as its gradient: scatters of
millions of rows are slow on a GPU, and bfloat16 ones lose small addends. `ops.grouped_ffn` cannot be used: it
loops over items and has no gradient.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from oled_jax.models.layers import matmul_precision
from oled_jax.models.moe import combine


class Grouping(NamedTuple):
    """Where each (token, k) pair is computed. I items of R rows, each of one expert.

    pair_of_row: pair at each row of each item; N * K for padding. row_of_pair: its inverse. owner: expert of
    each item.
    """

    pair_of_row: Int[Array, " IR"]
    row_of_pair: Int[Array, "N K"]
    owner: Int[Array, " I"]


def item_rows(pairs: int, num_experts: int, most: int = 256) -> int:
    """Rows of an item: about an eighth of an expert's mean share, so that padding wastes little."""
    share = max(1, pairs // (8 * num_experts))
    return max(1, min(most, 1 << (share - 1).bit_length()))


def group(ids: Int[Array, "N K"], num_experts: int, rows: int) -> Grouping:
    """Sorts pairs by expert into items. Any routing fits: an expert wastes less than one item."""
    N, K = ids.shape
    P = N * K
    num_items = P // rows + min(num_experts, P)
    if num_experts * P >= 2**31:
        raise RuntimeError(f"{P} pairs of {num_experts} experts do not fit sort keys of 32 bits")
    # Expert and pair in one integer: a sort of plain keys, which GPUs do fastest, that is stable by itself.
    keys = jnp.sort(ids.reshape(P) * P + jnp.arange(P, dtype=jnp.int32))
    order, expert = keys % P, keys // P
    counts = jnp.sum(ids[:, :, None] == jnp.arange(num_experts), axis=(0, 1), dtype=jnp.int32)
    first_pair = jnp.cumsum(counts) - counts
    items = -(-counts // rows)
    last_item = jnp.cumsum(items)
    row = (last_item - items)[expert] * rows + jnp.arange(P, dtype=jnp.int32) - first_pair[expert]
    unique: dict[str, Any] = {"unique_indices": True, "mode": "promise_in_bounds"}
    pair_of_row = jnp.full(num_items * rows, P, jnp.int32).at[row].set(order, **unique)
    row_of_pair = jnp.zeros(P, jnp.int32).at[order].set(row, **unique).reshape(N, K)
    owner = jnp.sum(jnp.arange(num_items)[:, None] >= last_item, axis=1, dtype=jnp.int32)
    return Grouping(pair_of_row, row_of_pair, jnp.minimum(owner, num_experts - 1))


@jax.custom_vjp
def spread(x: Float[Array, "N D"], grouping: Grouping) -> Float[Array, "IR D"]:
    """The token of every row of every item; zeros where padding."""
    K = grouping.row_of_pair.shape[1]
    return x.at[grouping.pair_of_row // K].get(mode="fill", fill_value=0)


def _spread_forward(x: Array, grouping: Grouping) -> tuple[Array, Grouping]:
    return spread(x, grouping), grouping


def _spread_backward(grouping: Grouping, gradient: Array) -> tuple[Array, None]:
    rows = gradient.at[grouping.row_of_pair].get(mode="promise_in_bounds")
    return jnp.sum(rows.astype(jnp.float32), axis=1).astype(gradient.dtype), None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def gather(rows: Float[Array, "IR D"], grouping: Grouping) -> Float[Array, "N K D"]:
    """The row that was computed for every pair: the inverse of `spread`."""
    return rows.at[grouping.row_of_pair].get(mode="promise_in_bounds")


def _gather_forward(rows: Array, grouping: Grouping) -> tuple[Array, Grouping]:
    return gather(rows, grouping), grouping


def _gather_backward(grouping: Grouping, gradient: Array) -> tuple[Array, None]:
    flat = gradient.reshape(-1, gradient.shape[-1])
    return flat.at[grouping.pair_of_row].get(mode="fill", fill_value=0), None


gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def take_rows(table: Float[Array, "E *rest"], index: Int[Array, "*n"], size: int) -> Float[Array, "..."]:
    """table[index], [*n, *rest], with a product as its gradient: sums in float32 however often an index occurs.

    Args:
      size: E.
    """
    return table.at[index].get(mode="clip")


def _take_forward(table: Array, index: Array, size: int) -> tuple[Array, Array]:
    return take_rows(table, index, size), index


def _take_backward(size: int, index: Array, gradient: Array) -> tuple[Array, None]:
    chosen = jax.nn.one_hot(index.reshape(-1), size, dtype=gradient.dtype)
    rest = gradient.shape[index.ndim :]
    total = jnp.einsum(
        "ie,ig->eg",
        chosen,
        gradient.reshape(chosen.shape[0], -1),
        preferred_element_type=jnp.float32,
        precision=matmul_precision(gradient.dtype),
    )
    return total.astype(gradient.dtype).reshape(size, *rest), None


take_rows.defvjp(_take_forward, _take_backward)


class GroupedExperts(NamedTuple):
    """An `Experts` whose pages are arguments of the loss. One array per layer, as in `DenseExperts`."""

    gate_up: tuple[Float[Array, "E F2 D"], ...]
    down: tuple[Float[Array, "E D F"], ...]

    def __call__(
        self,
        layer: int,
        x: Float[Array, "N D"],
        ids: Int[Array, "N K"],
        gates: Float[Array, "N K"],
        carry: Any,
    ) -> tuple[Float[Array, "N D"], Any]:
        E, rows = self.gate_up[layer].shape[0], item_rows(ids.size, self.gate_up[layer].shape[0])
        grouping = group(ids, E, rows)
        items = spread(x, grouping).reshape(-1, rows, x.shape[1])
        gate_up = take_rows(self.gate_up[layer], grouping.owner, E)
        down = take_rows(self.down[layer], grouping.owner, E)
        precision = matmul_precision(x.dtype)
        gate, up = jnp.split(jnp.einsum("ird,igd->irg", items, gate_up, precision=precision), 2, axis=-1)
        # As `layers.swiglu`: silu in float32, rounded once.
        activated = jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype)
        outputs = jnp.einsum("irf,idf->ird", activated * up, down, precision=precision)
        combined = combine(gather(outputs.reshape(-1, x.shape[1]), grouping), gates)
        return combined.astype(x.dtype), carry
