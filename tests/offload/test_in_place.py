"""The pool is updated in place, and nothing compiles once a run is warm."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import GREEDY, build, open_tiny, run

from oled_jax.models.kv_cache import init_kv_cache
from oled_jax.offload.pool import empty_pool
from oled_jax.program import PassInputs, PassSpec, forward_pass

compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
)


@pytest.fixture(scope="module")
def engine(golden):
    return build(*open_tiny(golden), "oled", 6)


def test_the_pool_stays_where_it_is(engine):
    run(engine, [[1, 2, 3]])
    before = [array.unsafe_buffer_pointer() for array in engine.pool]
    run(engine, [list(range(40))])
    assert [array.unsafe_buffer_pointer() for array in engine.pool] == before


def test_nothing_compiles_after_warm_up(engine):
    prompts = [list(range(30)), list(range(3))]
    for prompt in prompts:
        run(engine, [prompt])
    compiled.clear()
    jax.block_until_ready(jax.jit(lambda x: x * 3)(jnp.ones(3)))
    assert compiled, "the listener must see compilations, or this test says nothing"
    compiled.clear()
    other = dataclasses.replace(GREEDY, gen_length=20, threshold=0.9)
    for prompt in prompts:
        run(engine, [[token + 7 for token in prompt]], other)
    assert compiled == []


def _temporary_bytes(engine, num_slots: int) -> tuple[int, int]:
    config, spare = engine.config, engine.manager.spare
    pool = empty_pool(num_slots, config.hidden_size, config.moe_intermediate_size, jnp.dtype(config.dtype))
    inputs = PassInputs(
        tokens=jnp.zeros((1, 8), jnp.int32),
        starts=jnp.zeros(1, jnp.int32),
        token_mask=jnp.ones((1, 8), bool),
        sequence_length=jnp.int32(8),
        manager=jnp.int32(0),
    )
    spec = PassSpec(config=config, block_length=8, spare=spare, uses_cpu=False)
    lowered = forward_pass.lower(spec, engine.trunk, engine.store.layers, pool, init_kv_cache(config, 1, 64), inputs)
    return lowered.compile().memory_analysis().temp_size_in_bytes, sum(array.nbytes for array in pool)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_compiled_pass_never_copies_the_pool(golden, dtype):
    engine = build(*open_tiny(golden, dtype), "oled", 6)
    small, _ = _temporary_bytes(engine, 20)
    large, pool_bytes = _temporary_bytes(engine, 400)
    assert pool_bytes > 4.5e6
    assert large < 1e6
    assert abs(large - small) < 1e4


def test_the_store_is_one_copy(engine):
    gate_up, _ = engine.store.views(0)
    assert gate_up.ctypes.data == engine.store.layers[0].gate_up.unsafe_buffer_pointer()
    np.testing.assert_array_equal(gate_up, np.asarray(engine.store.layers[0].gate_up))
