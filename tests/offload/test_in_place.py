"""The pool is updated in place, and nothing compiles once a run is warm."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import GREEDY, build, open_golden, open_tiny, run

from oled_jax import native
from oled_jax.models.kv_cache import init_kv_cache
from oled_jax.offload.pool import Pool
from oled_jax.program import Packed, PassInputs, PassSpec, forward_pass

PROMPTS = [list(range(30)), list(range(3))]

compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
)


@pytest.fixture(scope="module")
def engine(golden):
    return build(*open_tiny(golden), "oled", 6)


def test_the_pool_stays_where_it_is(engine):
    before = [array.unsafe_buffer_pointer() for array in engine.pool]
    for prompt in PROMPTS:
        run(engine, [prompt])
    assert [array.unsafe_buffer_pointer() for array in engine.pool] == before


@pytest.mark.parametrize("wrong", [{"manager": np.int64(1)}, {"starts": np.zeros(1, np.float32)}])
def test_inputs_whose_numbers_might_not_fit_are_refused(wrong):
    given = {"tokens": np.zeros((1, 2), np.int32), "starts": np.zeros(1, np.int32), "token_mask": np.ones((1, 2), bool)}
    given |= {"sequence_length": np.int32(2), "manager": np.int32(0)}
    Packed.of(PassInputs.of(**given))
    with pytest.raises(TypeError, match=rf"PassInputs\.{next(iter(wrong))} is "):
        Packed.of(PassInputs.of(**given | wrong))


@pytest.mark.parametrize("policy", ["all", "oled"])
def test_hidden_states_of_passes_of_one_size_lie_in_one_place(golden, policy):
    """What moved would have to be patched in CUDA graphs."""
    engine = build(*open_tiny(golden), policy, 6)
    run(engine, PROMPTS[:1])
    before = {shape: hidden.unsafe_buffer_pointer() for shape, hidden in engine._hidden.items()}
    assert before.keys() == {(1, 8), (1, 32)}  # a block, and a chunk of the prompt
    run(engine, PROMPTS[:1])
    assert {shape: hidden.unsafe_buffer_pointer() for shape, hidden in engine._hidden.items()} == before


def test_inputs_are_the_same_unpacked_in_a_program():
    rng = np.random.default_rng(0)
    given = PassInputs.of(
        tokens=rng.integers(0, 9, (2, 3), np.int32),
        starts=np.array([5, -1], np.int32),
        token_mask=np.array([[True, False, True], [False, True, False]]),
        sequence_length=np.array([7, 8], np.int32),
        manager=np.int32(2**31 - 1),
        folds=np.array([False, True]),
    )
    for one, other in zip(given, jax.jit(Packed.unpack)(Packed.of(given)), strict=True):
        if one is None:
            assert other is None
        else:
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other), strict=True)


def test_nothing_compiles_after_warm_up(engine):
    for prompt in PROMPTS:
        run(engine, [prompt])
    compiled.clear()
    jax.block_until_ready(jax.jit(lambda x: x * 3)(jnp.ones(3)))
    assert compiled, "the listener must see compilations, or this test says nothing"
    compiled.clear()
    other = dataclasses.replace(GREEDY, gen_length=20, threshold=0.9)
    for prompt in PROMPTS:
        run(engine, [[token + 7 for token in prompt]], other)
    assert compiled == []


@pytest.mark.parametrize(
    ("carrier", "dtype"),
    [
        ("portable", "bfloat16"),
        ("native", "float32"),
        pytest.param("portable", "float32", marks=pytest.mark.slow),
        pytest.param("native", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_compiled_pass_never_copies_the_pool(golden, dtype, carrier):
    """Compiled, but not run, for a pool so large that as little as 25 temporary bytes a slot would show."""
    if carrier == "native" and native.extension is None:
        pytest.skip(f"no compiled extension: {native.UNAVAILABLE}")
    engine = build(*open_golden(golden / "variants" / "base-float32", dtype), "oled", 6, carrier=carrier)
    config, num_slots = engine.config, 40_000
    pool = Pool(*(jax.ShapeDtypeStruct((num_slots, *array.shape[1:]), array.dtype) for array in engine.pool))
    inputs = PassInputs.of(
        tokens=np.zeros((1, 8), np.int32),
        starts=np.zeros(1, np.int32),
        token_mask=np.ones((1, 8), bool),
        sequence_length=np.int32(8),
        manager=np.int32(0),
    )
    hidden = jax.ShapeDtypeStruct((1, 8, config.hidden_size), jnp.dtype(dtype))
    spec = PassSpec(config=config, block_length=8, spare=engine.manager.spare, uses_cpu=False, carrier=carrier)
    lowered = forward_pass.lower(
        spec, engine.trunk, engine.mover.operands, pool, init_kv_cache(config, 1, 64), Packed.of(inputs), hidden
    )
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes > num_slots * config.page_parameters * jnp.dtype(dtype).itemsize
    assert memory.temp_size_in_bytes < 1e6


def test_the_store_is_one_copy(engine):
    gate_up, _ = engine.store.views(0)
    assert gate_up.ctypes.data == engine.store.layers[0].gate_up.unsafe_buffer_pointer()
    np.testing.assert_array_equal(gate_up, np.asarray(engine.store.layers[0].gate_up))
