"""Grouping pairs by expert: NumPy and jax.numpy agree, and no pair is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oled_jax.ops.expert_items import expert_items
from oled_jax.ops.grouping import MAX_ROWS_PER_ITEM, ItemShape, group_pairs

# tokens, top_k, experts: an item holds every token; items of a fixed number of rows
SHAPES = [(1, 1, 1), (16, 2, 8), (64, 3, 5), (5, 8, 256), (65, 2, 3), (1024, 8, 256)]


def routing(seed: int, shape: ItemShape, missing: float) -> np.ndarray:
    """Different experts for each token, some pairs missing."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(shape.num_experts)[: shape.top_k] for _ in range(shape.num_tokens)]).ravel()
    return np.where(rng.random(shape.pairs) < missing, shape.num_experts, ids)


@pytest.mark.parametrize(("tokens", "top_k", "experts"), SHAPES)
@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
def test_every_pair_gets_a_row_of_an_item_of_its_key(tokens, top_k, experts, missing):
    shape = ItemShape(num_tokens=tokens, top_k=top_k, num_experts=experts)
    keys = routing(0, shape, missing)
    pair_row, items = group_pairs(keys, experts, shape)
    present = pair_row >= 0
    np.testing.assert_array_equal(present, keys < experts)
    assert np.unique(pair_row[present]).size == present.sum(), "two pairs share a row"
    key_of_item = np.repeat(np.arange(experts), items)
    np.testing.assert_array_equal(key_of_item[pair_row[present] // shape.rows], keys[present])
    assert items.sum() <= shape.max_items


def test_in_a_small_pass_the_row_is_the_token():
    shape = ItemShape(num_tokens=3, top_k=2, num_experts=4)
    pair_row, items = group_pairs(np.array([1, 0, 3, 1, 4, 0]), 4, shape)
    assert items.tolist() == [1, 1, 0, 1]
    assert pair_row.tolist() == [3, 0, 7, 4, -1, 2]


def test_in_a_large_pass_rows_follow_the_order_of_pairs():
    shape = ItemShape(num_tokens=MAX_ROWS_PER_ITEM + 2, top_k=1, num_experts=2)
    keys = np.ones(shape.pairs, int)
    keys[1] = 0
    pair_row, items = group_pairs(keys, 2, shape)
    assert items.tolist() == [1, 2]
    assert pair_row[1] == 0
    assert np.delete(pair_row, 1).tolist() == list(range(MAX_ROWS_PER_ITEM, 2 * MAX_ROWS_PER_ITEM + 1))


@pytest.mark.parametrize(("tokens", "top_k", "experts"), SHAPES)
def test_both_array_libraries_agree(tokens, top_k, experts):
    shape = ItemShape(num_tokens=tokens, top_k=top_k, num_experts=experts)
    keys = routing(1, shape, 0.2)
    traced = jax.jit(functools.partial(group_pairs, num_keys=experts, shape=shape, xp=jnp))
    for mine, other in zip(group_pairs(keys, experts, shape), traced(keys), strict=True):
        np.testing.assert_array_equal(mine, np.asarray(other))


@pytest.mark.parametrize(("tokens", "top_k", "experts"), SHAPES)
def test_a_program_finds_the_same_items(tokens, top_k, experts):
    shape = ItemShape(num_tokens=tokens, top_k=top_k, num_experts=experts)
    keys = routing(2, shape, 0.2)
    pair_row, items = group_pairs(keys, experts, shape)
    found_row, found_experts, count = jax.jit(expert_items, static_argnums=1)(jnp.asarray(keys), shape)
    np.testing.assert_array_equal(pair_row, np.asarray(found_row))
    np.testing.assert_array_equal(np.repeat(np.arange(experts), items), np.asarray(found_experts)[: int(count)])
    assert len(found_experts) == shape.max_items


def test_max_items_holds_for_the_worst_routing():
    """Every expert one token more than whole items, as long as there are pairs for it."""
    shape = ItemShape(num_tokens=1024, top_k=8, num_experts=256)
    loads = np.ones(256, int)
    for expert in range(256):
        loads[expert] += min(1023, shape.pairs - loads.sum()) // shape.rows * shape.rows
    assert loads.sum() > 0.9 * shape.pairs
    assert (-(-loads // shape.rows)).sum() <= shape.max_items
