"""The plan of memory, with invented amounts of free memory."""

import dataclasses

import numpy as np
import pytest
from tiny_model import model_config

from oled_jax.errors import UsageError
from oled_jax.memory import MARGIN, format_bytes, page_bytes, plan_memory, trunk_bytes
from oled_jax.models.registry import random_trunk

CONFIG = model_config("float32")
L, E = CONFIG.num_moe_layers, CONFIG.num_experts
PAGE = 3 * 32 * 64 * 4
PLENTY = 10**12


def plan(capacity=6, **changes):
    shape = {
        "total_slots": capacity * L, "spare": 8, "batch": 1, "kv_positions": 64, "chunk": 32,
        "block_length": 8, "device_free": PLENTY, "host_free": PLENTY,
    }  # fmt: skip
    return plan_memory(CONFIG, **{**shape, **changes})


def just_enough(needed):
    return int(needed / (1 - MARGIN)) + 2


def test_parts_are_what_the_engine_allocates():
    made = plan()
    assert made.page_bytes == page_bytes(CONFIG) == PAGE
    assert made.pool_bytes == (6 * L + 8) * PAGE
    assert made.store_bytes == L * E * PAGE
    assert made.kv_bytes == 2 * CONFIG.num_hidden_layers * 2 * 64 * 16 * 4
    assert made.trunk_bytes == sum(array.nbytes for array in random_trunk(CONFIG, 0).values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trunk_keeps_the_routers_bias_in_float32(dtype):
    config = dataclasses.replace(CONFIG, dtype=dtype)
    assert trunk_bytes(config) == sum(array.nbytes for array in random_trunk(config, 0).values())


def test_activations_grow_with_the_prefill_chunk_and_the_cache():
    assert plan(chunk=512).activation_bytes > 4 * plan(chunk=32).activation_bytes
    assert plan(kv_positions=65536).activation_bytes > plan().activation_bytes
    assert plan(chunk=8, fold_commits=True).activation_bytes > plan(chunk=8).activation_bytes


@pytest.mark.parametrize("capacity", [1, 5, 31])
def test_largest_capacity_is_the_last_that_fits(capacity):
    made = plan(capacity, device_free=just_enough(plan(capacity).device_bytes))
    assert made.largest_capacity == capacity
    made.require_fit()
    with pytest.raises(UsageError, match=rf"capacity {capacity + 1} needs .*largest .* is {capacity} "):
        made.with_capacity(capacity + 1).require_fit()


def test_largest_capacity_never_exceeds_the_number_of_experts():
    assert plan().largest_capacity == E
    assert plan(device_free=None, host_free=None).largest_capacity == E


def test_a_batch_multiplies_cache_and_activations_and_is_named_where_it_does_not_fit():
    assert plan(batch=32).kv_bytes == 32 * plan().kv_bytes
    assert plan(batch=32).activation_bytes > 16 * plan().activation_bytes
    with pytest.raises(UsageError, match="or the batch"):
        plan(batch=32, device_free=plan(batch=32).trunk_bytes).require_fit()


def test_nothing_fits():
    made = plan(device_free=plan().trunk_bytes)
    assert made.largest_capacity == 0
    with pytest.raises(UsageError, match="not even one expert per layer fits"):
        made.require_fit()


def test_where_memory_is_one_store_pool_and_trunk_share_it():
    whole = plan(unified=True, device_free=None).host_bytes
    assert whole == plan().device_bytes + plan().store_bytes
    made = plan(unified=True, device_free=None, host_free=just_enough(whole))
    assert made.largest_capacity == 6
    made.require_fit()
    with pytest.raises(UsageError, match="host memory"):
        dataclasses.replace(made, host_free=whole).require_fit()


def test_a_store_that_exceeds_host_memory_is_refused_at_any_capacity():
    with pytest.raises(UsageError, match=r"host memory.*--policy all"):
        plan(1, host_free=L * E * PAGE // 2).require_fit()
    small = {"host_free": L * E * PAGE // 2, "device_free": just_enough(plan(1).device_bytes)}
    with pytest.raises(UsageError) as caught:
        plan(1, **small).require_fit()
    assert "--policy all" not in str(caught.value)


def test_all_resident_needs_no_store_and_names_a_capacity_that_fits():
    made = plan(E, spare=0, resident=True)
    assert made.store_bytes == 0
    assert made.pool_bytes == L * E * PAGE
    short = dataclasses.replace(made, device_free=just_enough(plan(9, spare=0).device_bytes))
    with pytest.raises(UsageError, match=r"policy all needs .* with another policy is 9"):
        short.require_fit()


def test_unknown_amounts_refuse_nothing():
    plan(E, device_free=None, host_free=None).require_fit()


def test_printed_plan_names_every_part():
    text = "\n".join(plan(device_free=50_000_000).lines())
    for part in ("trunk", "KV cache", "12 + 8 slots", "activations", "expert store", "50.0 MB free"):
        assert part in text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_500, "1.5 kB"),
        (6_291_456, "6.3 MB"),
        (30.6e9, "30.6 GB"),
        (2e11, "200 GB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text
    assert format_bytes(np.float64(count)) == text
