"""The expert feed-forward as two Pallas-Triton kernels that find each page by its slot: nothing is gathered or copied.

Tiles have fixed shapes, so a row's arithmetic depends on its page, its token and the shape of the pass only.
The Pallas-Triton backend is marked deprecated in JAX: it stays behind `ops.grouped_ffn`, whose XLA loop always works.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

# Chosen on one H200 (docs/performance-notes.md): rows of a weight tile, and how many of their numbers are read at once.
# Sizes that these do not divide take the greatest powers of two that do.
TILE_OUT, TILE_IN = 64, 128
WARPS, STAGES = 4, 4
LEAST_TILE = 16  # of a tensor core, along every axis


def supports(shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
    """Whether tiles divide a pool of gate_up shape [C, 2F, D]. Float32 takes the XLA loop: it needs full precision."""
    _, twice_width, hidden = shape
    sizes_fit = (twice_width // 2) % LEAST_TILE == 0 and hidden % LEAST_TILE == 0
    return sizes_fit and dtype in (jnp.bfloat16, jnp.float16)


def grouped_ffn(
    rows: Float[Array, "J R D"],
    numbers: Int[Array, " n"],
    gate_up: Float[Array, "C G D"],
    down: Float[Array, "C D F"],
    out: Float[Array, "I R D"],
    *,
    span_at: int,
    slots_at: int,
    interpret: bool = False,
) -> Float[Array, "I R D"]:
    """See `ops.grouped_ffn.grouped_ffn`. interpret: run the kernels without a GPU, for tests."""
    num_rows = rows.shape[1]
    padded = max(LEAST_TILE, pl.next_power_of_2(num_rows))
    at = Places(span_at, slots_at)
    if padded != num_rows:
        widths = ((0, 0), (0, padded - num_rows), (0, 0))
        rows, out = jnp.pad(rows, widths), jnp.pad(out, widths)
    hidden = _gate_up(rows, numbers, at, gate_up, num_items=out.shape[0], interpret=interpret)
    return _down(hidden, numbers, at, down, out, interpret=interpret)[:, :num_rows]


class Places(NamedTuple):
    """Where in `numbers` first item and end stand, and where the items' slots begin."""

    span: int
    slots: int

    def computes(self, numbers_ref: Any, item: Array) -> Array:
        """Whether the item is one to compute."""
        return (numbers_ref[self.span] <= item) & (item < numbers_ref[self.span + 1])


def _launch(kernel: Callable[..., None], grid: tuple[int, int], *operands: Array, **options: Any) -> Array:
    """Runs a kernel over (item, tile) with every operand whole: it addresses them by slot and item."""
    whole = pl.BlockSpec(memory_space=pl.ANY)
    with warnings.catch_warnings():
        # JAX announces the end of this backend at every call; the module's docstring says what then.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[whole] * len(operands),
            out_specs=whole,
            compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=STAGES),
            **options,
        )(*operands)


def _gate_up(
    rows: Float[Array, "J R D"],
    numbers: Int[Array, " n"],
    at: Places,
    gate_up: Float[Array, "C G D"],
    *,
    num_items: int,
    interpret: bool,
) -> Float[Array, "I R F"]:
    """silu(gate(x)) * up(x) of each item."""
    J, R, D = rows.shape
    F = gate_up.shape[1] // 2
    tile_out, tile_in = math.gcd(F, TILE_OUT), math.gcd(D, TILE_IN)
    shape = jax.ShapeDtypeStruct((num_items, R, F), rows.dtype)

    def kernel(numbers_ref: Any, rows_ref: Any, pages_ref: Any, out_ref: Any) -> None:
        item, tile = pl.program_id(0), pl.program_id(1)

        @pl.when(at.computes(numbers_ref, item))
        def compute() -> None:
            slot, source = numbers_ref[at.slots + item], jnp.where(J == 1, 0, item)
            gate_rows = pl.ds(tile * tile_out, tile_out)
            up_rows = pl.ds(F + tile * tile_out, tile_out)

            def step(index: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
                columns = pl.ds(index * tile_in, tile_in)
                x = plt.load(rows_ref.at[source, :, columns])
                gate_weight = plt.load(pages_ref.at[slot, gate_rows, columns])
                up_weight = plt.load(pages_ref.at[slot, up_rows, columns])
                return sums[0] + _times_transposed(x, gate_weight), sums[1] + _times_transposed(x, up_weight)

            zeros = jnp.zeros((R, tile_out), jnp.float32)
            gate, up = (s.astype(rows.dtype) for s in jax.lax.fori_loop(0, D // tile_in, step, (zeros, zeros)))
            wide = gate.astype(jnp.float32)
            activated = (wide * jax.nn.sigmoid(wide)).astype(rows.dtype)
            plt.store(out_ref.at[item, :, gate_rows], activated * up)

    grid = num_items, F // tile_out
    return _launch(kernel, grid, numbers, rows, gate_up, out_shape=shape, interpret=interpret)


def _down(
    hidden: Float[Array, "I R F"],
    numbers: Int[Array, " n"],
    at: Places,
    down: Float[Array, "C D F"],
    out: Float[Array, "I R D"],
    *,
    interpret: bool,
) -> Float[Array, "I R D"]:
    """The down projection of each item, written over its rows of `out`."""
    I, R, F = hidden.shape  # noqa: E741 (items)
    D = down.shape[1]
    tile_out, tile_in = math.gcd(D, TILE_OUT), math.gcd(F, TILE_IN)

    def kernel(numbers_ref: Any, hidden_ref: Any, pages_ref: Any, old_ref: Any, out_ref: Any) -> None:
        del old_ref  # the same memory as out_ref
        item, tile = pl.program_id(0), pl.program_id(1)

        @pl.when(at.computes(numbers_ref, item))
        def compute() -> None:
            slot, page_rows = numbers_ref[at.slots + item], pl.ds(tile * tile_out, tile_out)

            def step(index: Array, total: Array) -> Array:
                columns = pl.ds(index * tile_in, tile_in)
                x = plt.load(hidden_ref.at[item, :, columns])
                return total + _times_transposed(x, plt.load(pages_ref.at[slot, page_rows, columns]))

            total = jax.lax.fori_loop(0, F // tile_in, step, jnp.zeros((R, tile_out), jnp.float32))
            plt.store(out_ref.at[item, :, page_rows], total.astype(out.dtype))

    shape = jax.ShapeDtypeStruct(out.shape, out.dtype)
    grid, in_place = (I, D // tile_out), {3: 0}  # `out` is the fourth operand
    return _launch(
        kernel, grid, numbers, hidden, down, out,
        out_shape=shape, input_output_aliases=in_place, interpret=interpret,
    )  # fmt: skip


def _times_transposed(x: Float[Array, "R I"], weight: Float[Array, "O I"]) -> Float[Array, "R O"]:
    """x Wᵀ, accumulated in float32."""
    return plt.dot(x, weight, trans_b=True)
