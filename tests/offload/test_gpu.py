"""What only a CUDA device can show: pinned memory, and device memory that stays flat."""

import dataclasses

import jax
import numpy as np
import pytest
from engines import GREEDY, build, build_plain, open_tiny, run

from oled_jax.passes import PassKind

pytestmark = pytest.mark.gpu


def test_the_store_is_pinned_and_its_views_are_exact(golden):
    engine = build(*open_tiny(golden), "lru", 4)
    assert engine.store.pinned
    for layer, arrays in enumerate(engine.store.layers):
        for view, array in zip(engine.store.views(layer), arrays, strict=True):
            assert array.sharding.memory_kind == "pinned_host"
            np.testing.assert_array_equal(view, np.asarray(array))


def test_layers_are_counted_while_the_device_computes(golden):
    engine = build(*open_tiny(golden), "oled", 4)
    run(engine, [[1, 2, 3]])
    if engine.mover.name != "native":
        pytest.skip(f"the {engine.mover.name} carrier has no time for it")
    planning = engine.statistics.summary(*PassKind).planning_us
    assert 0 < planning["accounting"] < planning["total"]
    assert engine.mover.statistics["accounting_us"] > 0


def test_device_memory_stays_flat_over_a_thousand_iterations(golden):
    engine = build_plain(*open_tiny(golden), "oled", 4)
    decoding = dataclasses.replace(GREEDY, gen_length=128, eos_id=-1, threshold=2.0, steps=8)
    run(engine, [[1]], decoding)
    device, pointers = jax.local_devices()[0], [array.unsafe_buffer_pointer() for array in engine.pool]
    before = device.memory_stats()["bytes_in_use"]
    passes = 0
    while passes < 1000:
        passes += sum(run(engine, [[1]], decoding)[0].passes.values())
    assert device.memory_stats()["bytes_in_use"] <= before
    assert [array.unsafe_buffer_pointer() for array in engine.pool] == pointers
