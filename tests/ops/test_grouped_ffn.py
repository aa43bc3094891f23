"""One shared test for every implementation of the expert feed-forward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oled_jax.errors import UsageError
from oled_jax.ops import grouped_ffn_triton
from oled_jax.ops.grouped_ffn import grouped_ffn, item_rows, pair_rows
from oled_jax.ops.grouping import ItemShape, group_pairs

# tokens, top_k, experts, hidden, width: decode, prefill, one token, sizes that divide nothing
SHAPES = [(16, 4, 32, 64, 32), (80, 2, 8, 48, 16), (1, 2, 4, 32, 16), (7, 3, 5, 40, 24)]
# What the kernels' tiles divide: the whole ones, those of the model in the package, and the least.
TILED = [(16, 4, 12, 256, 128), (80, 2, 8, 128, 256), (3, 2, 4, 128, 128), (16, 4, 12, 192, 32), (7, 3, 5, 48, 16)]

SPAN_AT, SLOTS_AT = 1, 5  # anywhere, apart, with other numbers around them

XLA = functools.partial(grouped_ffn, implementation="xla")
TRITON = functools.partial(grouped_ffn_triton.grouped_ffn, interpret=jax.default_backend() != "gpu")
CASES = [
    *(pytest.param(XLA, shape, "float32", id=f"xla-{shape}-float32") for shape in SHAPES),
    *(pytest.param(XLA, shape, "bfloat16", id=f"xla-{shape}-bfloat16") for shape in SHAPES),
    *(pytest.param(XLA, shape, "bfloat16", id=f"xla-{shape}-bfloat16") for shape in TILED),
    *(pytest.param(TRITON, shape, "bfloat16", id=f"triton-{shape}-bfloat16") for shape in TILED),
]  # fmt: skip


def float64_rows(x, ids, gate_up, down):
    """[N, K, D] by definition, in float64 (REFERENCE section 4, step 6)."""
    rows = []
    for token, experts in zip(np.asarray(x, np.float64), ids, strict=True):
        for expert in experts:
            gate, up = np.split(np.asarray(gate_up[expert], np.float64) @ token, 2)
            rows.append(np.asarray(down[expert], np.float64) @ (gate / (1 + np.exp(-gate)) * up))
    return np.array(rows).reshape(*ids.shape, -1)


def draw(shape, dtype, seed=0):
    N, K, E, D, F = shape
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((N, D)).astype(jnp.dtype(dtype))
    gate_up = (rng.standard_normal((E, 2 * F, D)) / D**0.5).astype(x.dtype)
    down = (rng.standard_normal((E, D, F)) / F**0.5).astype(x.dtype)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(N)])
    return x, ids, gate_up, down


@functools.partial(jax.jit, static_argnums=(0, 1))
def items_and_pairs(ffn, items, x, pair_row, numbers, gate_up, down):
    """Rows of items and of pairs [N, K, D], in one program: one by one, the operations would be compiled one by one."""
    # Poisoned, so that a row that was not written is seen.
    out = jnp.full((items.max_items, items.rows, x.shape[1]), jnp.nan, x.dtype)
    rows = item_rows(x, pair_row, items)
    out = ffn(rows, numbers, gate_up, down, out, span_at=SPAN_AT, slots_at=SLOTS_AT)
    return out, pair_rows(out, pair_row, items).astype(jnp.float32)


def compute(ffn, shape, x, ids, gate_up, down, slot_of=None, bounds=None):
    """What `items_and_pairs` returns; bounds: of the items to compute, if not all."""
    N, K, E, _, _ = shape
    items = ItemShape(num_tokens=N, top_k=K, num_experts=E)
    pair_row, counts = group_pairs(ids.ravel(), E, items)
    active = np.repeat(np.arange(E) if slot_of is None else slot_of, counts)
    numbers = np.full(SLOTS_AT + items.max_items + 3, -7, np.int32)
    numbers[SLOTS_AT:-3] = 0
    numbers[SLOTS_AT : SLOTS_AT + active.size] = active
    numbers[SPAN_AT : SPAN_AT + 2] = bounds or (0, active.size)
    return [np.asarray(a) for a in items_and_pairs(ffn, items, x, pair_row, numbers, gate_up, down)]


def pairs(*arguments):
    return compute(*arguments)[1]


@pytest.mark.parametrize(("ffn", "shape", "dtype"), CASES)
class TestImplementations:
    def test_rows_match_the_definition(self, ffn, shape, dtype):
        x, ids, gate_up, down = draw(shape, dtype)
        # bfloat16: gate, up, their product and the row are rounded to 8 bits of mantissa, on values near 1
        tolerance = 2e-5 if dtype == "float32" else 5e-2
        expected = float64_rows(x, ids, gate_up, down)
        np.testing.assert_allclose(pairs(ffn, shape, x, ids, gate_up, down), expected, atol=tolerance)

    def test_the_slot_of_a_page_does_not_change_its_rows(self, ffn, shape, dtype):
        x, ids, gate_up, down = draw(shape, dtype)
        slots = np.random.default_rng(5).permutation(shape[2])
        inverse = np.argsort(slots)
        moved = pairs(ffn, shape, x, ids, gate_up[inverse], down[inverse], slots)
        np.testing.assert_array_equal(moved, pairs(ffn, shape, x, ids, gate_up, down))

    def test_items_outside_the_bounds_are_left_alone(self, ffn, shape, dtype):
        every, _ = compute(ffn, shape, *draw(shape, dtype))
        some, _ = compute(ffn, shape, *draw(shape, dtype), bounds=(1, 2))
        np.testing.assert_array_equal(some[1], every[1])
        assert not np.isnan(some[1]).any()
        assert np.isnan(np.delete(some, 1, axis=0)).all()


def test_the_kernels_support_what_the_least_tile_divides_in_half_precision():
    for _, _, E, D, F in TILED:
        assert grouped_ffn_triton.supports((E, 2 * F, D), jnp.dtype("bfloat16"))
        assert not grouped_ffn_triton.supports((E, 2 * F, D), jnp.dtype("float32"))
    _, _, E, D, F = SHAPES[3]
    assert not grouped_ffn_triton.supports((E, 2 * F, D), jnp.dtype("bfloat16"))


def test_a_pair_without_a_row_is_zero():
    items = ItemShape(num_tokens=2, top_k=1, num_experts=2)
    rows = pair_rows(jnp.full((2, 2, 3), jnp.nan), jnp.array([-1, -1]), items)
    assert (rows == 0).all()


def test_unknown_implementation_is_named():
    x, ids, gate_up, down = draw(SHAPES[2], "float32")
    with pytest.raises(UsageError, match=r"'tpu'.*xla"):
        compute(functools.partial(grouped_ffn, implementation="tpu"), SHAPES[2], x, ids, gate_up, down)
