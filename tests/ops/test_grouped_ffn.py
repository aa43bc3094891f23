"""One shared test for every implementation of the expert feed-forward, and the sum over k."""

import jax.numpy as jnp
import numpy as np
import pytest

from oled_jax.errors import UsageError
from oled_jax.ops.grouped_ffn import IMPLEMENTATIONS, combine, grouped_ffn, item_pairs
from oled_jax.ops.grouping import ItemShape, group_pairs

# tokens, top_k, experts, hidden, width: decode, prefill, one token, sizes that divide nothing
SHAPES = [(16, 4, 32, 64, 32), (80, 2, 8, 48, 16), (1, 2, 4, 32, 16), (7, 3, 5, 40, 24)]


def float64_rows(x, ids, gate_up, down):
    """[P, D] by definition, in float64 (REFERENCE section 4, step 6)."""
    rows = []
    for token, experts in zip(np.asarray(x, np.float64), ids, strict=True):
        for expert in experts:
            gate, up = np.split(np.asarray(gate_up[expert], np.float64) @ token, 2)
            rows.append(np.asarray(down[expert], np.float64) @ (gate / (1 + np.exp(-gate)) * up))
    return np.array(rows)


def case(shape, seed=0, dtype=jnp.float32):
    N, K, E, D, F = shape
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((N, D)), dtype)
    gate_up = jnp.asarray(rng.standard_normal((E, 2 * F, D)) / D**0.5, dtype)
    down = jnp.asarray(rng.standard_normal((E, D, F)) / F**0.5, dtype)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(N)])
    return x, ids, gate_up, down


def run(shape, x, ids, gate_up, down, implementation, slot_of=None):
    N, K, E, D, _ = shape
    items = ItemShape(num_tokens=N, top_k=K, num_experts=E)
    pair_row, counts = group_pairs(ids.ravel(), E, items.rows)
    slots = np.zeros(items.max_items, np.int32)
    active = np.repeat(np.arange(E) if slot_of is None else slot_of, counts)
    slots[: active.size] = active
    out = jnp.zeros((N * K, D), x.dtype)
    bounds = jnp.int32(0), jnp.int32(active.size)
    pairs = item_pairs(jnp.asarray(pair_row), items)
    return grouped_ffn(x, pairs, jnp.asarray(slots), bounds, gate_up, down, out, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestImplementations:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_rows_match_the_definition(self, implementation, shape):
        x, ids, gate_up, down = case(shape)
        rows = run(shape, x, ids, gate_up, down, implementation)
        np.testing.assert_allclose(rows, float64_rows(x, ids, gate_up, down), atol=2e-5)

    def test_bfloat16_rows_are_close(self, implementation):
        shape = SHAPES[0]
        x, ids, gate_up, down = case(shape, dtype=jnp.bfloat16)
        rows = np.asarray(run(shape, x, ids, gate_up, down, implementation), np.float32)
        # three roundings to 8 bits of mantissa (gate, up and their product, the row) on values near 1
        np.testing.assert_allclose(rows, float64_rows(x, ids, gate_up, down), atol=3e-2)

    def test_the_slot_of_a_page_does_not_change_its_rows(self, implementation):
        shape = SHAPES[0]
        x, ids, gate_up, down = case(shape)
        slots = np.random.default_rng(5).permutation(shape[2])
        inverse = np.argsort(slots)
        moved = run(shape, x, ids, gate_up[inverse], down[inverse], implementation, slots)
        np.testing.assert_array_equal(moved, run(shape, x, ids, gate_up, down, implementation))

    def test_items_outside_the_bounds_are_left_alone(self, implementation):
        x, ids, gate_up, down = case(SHAPES[0])
        out = jnp.full((ids.size, x.shape[1]), 7.0)
        pairs = jnp.zeros((3, 4), jnp.int32)
        bounds = jnp.int32(2), jnp.int32(2)
        rows = grouped_ffn(x, pairs, jnp.zeros(3, jnp.int32), bounds, gate_up, down, out, implementation=implementation)
        np.testing.assert_array_equal(rows, out)


def test_unknown_implementation_is_named():
    x, ids, gate_up, down = case(SHAPES[2])
    with pytest.raises(UsageError, match="'tpu'.*xla"):
        run(SHAPES[2], x, ids, gate_up, down, "tpu")


def test_combine_sums_over_k_in_order_and_in_float32():
    rows = jnp.asarray([[1.0], [2.0**-9], [2.0**-9]], jnp.bfloat16)
    gates = jnp.asarray([[1.0, 0.5, 0.5]], jnp.float32)
    assert combine(rows, gates).item() == 1.0 + 2.0**-9
