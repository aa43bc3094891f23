"""Grouping pairs by expert: NumPy and jax.numpy agree, and no pair is lost."""

import jax.numpy as jnp
import numpy as np
import pytest

from oled_jax.ops.grouping import ItemShape, group_pairs


def random_keys(seed: int, pairs: int, keys: int, missing: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.where(rng.random(pairs) < missing, keys, rng.integers(0, keys, pairs))


@pytest.mark.parametrize(("pairs", "keys", "rows"), [(1, 1, 1), (32, 8, 4), (64, 3, 16), (8192, 256, 64), (40, 256, 8)])
@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
def test_every_pair_gets_a_row_of_an_item_of_its_key(pairs, keys, rows, missing):
    wanted = random_keys(0, pairs, keys, missing)
    pair_row, items = group_pairs(wanted, keys, rows)
    present = pair_row >= 0
    np.testing.assert_array_equal(present, wanted < keys)
    assert np.unique(pair_row[present]).size == present.sum(), "two pairs share a row"
    key_of_item = np.repeat(np.arange(keys), items)
    np.testing.assert_array_equal(key_of_item[pair_row[present] // rows], wanted[present])
    np.testing.assert_array_equal(items, -(-np.bincount(wanted, minlength=keys + 1)[:keys] // rows))


def test_rows_follow_the_order_of_pairs():
    pair_row, _ = group_pairs(np.array([1, 0, 1, 1, 0]), 2, 2)
    assert pair_row.tolist() == [2, 0, 3, 4, 1]


def test_both_array_libraries_agree():
    keys = random_keys(1, 128, 32, 0.2)
    for mine, other in zip(group_pairs(keys, 32, 16), group_pairs(jnp.asarray(keys), 32, 16, jnp), strict=True):
        np.testing.assert_array_equal(mine, np.asarray(other))


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 8, 256), (16, 8, 256), (1024, 8, 256), (33, 2, 4)])
def test_max_items_bounds_the_worst_routing(tokens, top_k, experts):
    shape = ItemShape(num_tokens=tokens, top_k=top_k, num_experts=experts)
    used = min(experts, shape.pairs)
    # The worst routing wastes the most rows: every used expert one row more than whole items.
    loads = np.ones(used, int)
    for expert in range(used):
        room = min(tokens - 1, shape.pairs - loads.sum()) // shape.rows * shape.rows
        loads[expert] += max(room, 0)
    assert loads.sum() <= shape.pairs
    assert (-(-loads // shape.rows)).sum() <= shape.max_items
