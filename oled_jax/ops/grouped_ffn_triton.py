"""The expert feed-forward as two Pallas-Triton kernels that find each page by its slot: nothing is gathered or copied.

Tiles have fixed shapes, so a row's arithmetic depends on its page, its token and the shape of the pass only.
The Pallas-Triton backend is marked deprecated in JAX: it stays behind `ops.grouped_ffn`, whose XLA loop always works.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

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
    slots: Int[Array, " I"],
    bounds: tuple[Int[Array, ""], Int[Array, ""]],
    gate_up: Float[Array, "C G D"],
    down: Float[Array, "C D F"],
    out: Float[Array, "I R D"],
    *,
    interpret: bool = False,
) -> Float[Array, "I R D"]:
    """See `ops.grouped_ffn.grouped_ffn`. interpret: run the kernels without a GPU, for tests."""
    num_rows = rows.shape[1]
    padded = max(LEAST_TILE, pl.next_power_of_2(num_rows))
    if padded != num_rows:
        widths = ((0, 0), (0, padded - num_rows), (0, 0))
        result = grouped_ffn(
            jnp.pad(rows, widths), slots, bounds, gate_up, down, jnp.pad(out, widths), interpret=interpret
        )
        return result[:, :num_rows]
    span = jnp.stack(bounds).astype(jnp.int32)
    hidden = _gate_up(rows, slots, span, gate_up, interpret=interpret)
    return _down(hidden, slots, span, down, out, interpret=interpret)


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
    slots: Int[Array, " I"],
    span: Int[Array, " 2"],
    gate_up: Float[Array, "C G D"],
    *,
    interpret: bool,
) -> Float[Array, "I R F"]:
    """silu(gate(x)) * up(x) of each item."""
    J, R, D = rows.shape
    F = gate_up.shape[1] // 2
    tile_out, tile_in = math.gcd(F, TILE_OUT), math.gcd(D, TILE_IN)
    shape = jax.ShapeDtypeStruct((slots.shape[0], R, F), rows.dtype)

    def kernel(span_ref: Any, slots_ref: Any, rows_ref: Any, pages_ref: Any, out_ref: Any) -> None:
        item, tile = pl.program_id(0), pl.program_id(1)

        @pl.when((span_ref[0] <= item) & (item < span_ref[1]))
        def compute() -> None:
            slot, source = slots_ref[item], jnp.where(J == 1, 0, item)
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

    grid = slots.shape[0], F // tile_out
    return _launch(kernel, grid, span, slots, rows, gate_up, out_shape=shape, interpret=interpret)


def _down(
    hidden: Float[Array, "I R F"],
    slots: Int[Array, " I"],
    span: Int[Array, " 2"],
    down: Float[Array, "C D F"],
    out: Float[Array, "I R D"],
    *,
    interpret: bool,
) -> Float[Array, "I R D"]:
    """The down projection of each item, written over its rows of `out`."""
    I, R, F = hidden.shape  # noqa: E741 (items)
    D = down.shape[1]
    tile_out, tile_in = math.gcd(D, TILE_OUT), math.gcd(F, TILE_IN)

    def kernel(span_ref: Any, slots_ref: Any, hidden_ref: Any, pages_ref: Any, old_ref: Any, out_ref: Any) -> None:
        del old_ref  # the same memory as out_ref
        item, tile = pl.program_id(0), pl.program_id(1)

        @pl.when((span_ref[0] <= item) & (item < span_ref[1]))
        def compute() -> None:
            slot, page_rows = slots_ref[item], pl.ds(tile * tile_out, tile_out)

            def step(index: Array, total: Array) -> Array:
                columns = pl.ds(index * tile_in, tile_in)
                x = plt.load(hidden_ref.at[item, :, columns])
                return total + _times_transposed(x, plt.load(pages_ref.at[slot, page_rows, columns]))

            total = jax.lax.fori_loop(0, F // tile_in, step, jnp.zeros((R, tile_out), jnp.float32))
            plt.store(out_ref.at[item, :, page_rows], total.astype(out.dtype))

    shape = jax.ShapeDtypeStruct(out.shape, out.dtype)
    grid, in_place = (I, D // tile_out), {4: 0}  # `out` is the fifth operand
    return _launch(
        kernel, grid, span, slots, hidden, down, out,
        out_shape=shape, input_output_aliases=in_place, interpret=interpret,
    )  # fmt: skip


def _times_transposed(x: Float[Array, "R I"], weight: Float[Array, "O I"]) -> Float[Array, "R O"]:
    """x Wᵀ, accumulated in float32."""
    return plt.dot(x, weight, trans_b=True)
