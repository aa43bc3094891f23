"""The KV cache: exact against a full window, rows at their own starts, updated in place."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_checkpoints import Checkpoint, load_checkpoint
from safetensors.numpy import load_file

from oled_jax.models.kv_cache import KVCache, init_kv_cache, kv_bytes
from oled_jax.models.trunk import block_mask

BLOCK = 8


@pytest.fixture(scope="module")
def tiny(golden: Path) -> Checkpoint:
    return load_checkpoint(golden / "llada2-tiny")


@pytest.fixture(scope="module")
def case(golden: Path) -> dict[str, np.ndarray]:
    return load_file(golden / "llada2-tiny-kvcache.safetensors")


def run(tiny: Checkpoint, tokens: np.ndarray, starts: list[int], cache: KVCache) -> tuple[np.ndarray, KVCache]:
    """Logits of a chunk whose row b stands at starts[b], and the cache it leaves."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.asarray(starts)[:, None] + jnp.arange(tokens.shape[1])
    mask = block_mask(positions, cache.capacity, BLOCK)
    hidden, cache, _ = tiny.forward(tokens, positions, mask, cache, jnp.asarray(starts), tiny.experts)
    return np.asarray(tiny.model.logits(hidden)), cache


@pytest.mark.parametrize("chunk", [24, 8], ids=["one pass", "block by block"])
def test_cached_prefix_equals_the_reference(tiny: Checkpoint, case: dict[str, np.ndarray], chunk: int) -> None:
    tokens = case["input_ids"]
    cache = init_kv_cache(tiny.config, 1, 40)
    for start in range(0, 24, chunk):
        _, cache = run(tiny, tokens[:, start : start + chunk], [start], cache)
    for layer in range(tiny.config.num_hidden_layers):
        for stored, name in ((cache.keys, "prefix_keys"), (cache.values, "prefix_values")):
            expected = case[f"{name}.{layer}"]
            np.testing.assert_allclose(np.asarray(stored[layer][:, :, :24]), expected, rtol=0, atol=1e-4)
    logits, _ = run(tiny, tokens[:, 24:], [24], cache)
    np.testing.assert_allclose(logits, case["cached_block_logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits, case["full_window_logits"][:, 24:], rtol=0, atol=1e-4)


def test_commit_pass_overwrites_stale_keys(tiny: Checkpoint, case: dict[str, np.ndarray]) -> None:
    tokens = case["input_ids"]
    masked = np.full_like(tokens[:, 16:24], 511)
    cache = init_kv_cache(tiny.config, 1, 40)
    for start in (0, 8):
        _, cache = run(tiny, tokens[:, start : start + 8], [start], cache)
    _, stale = run(tiny, masked, [16], cache)
    _, committed = run(tiny, tokens[:, 16:24], [16], stale)
    wrong, _ = run(tiny, tokens[:, 24:], [24], stale)
    right, _ = run(tiny, tokens[:, 24:], [24], committed)
    np.testing.assert_allclose(right, case["cached_block_logits"], rtol=0, atol=1e-4)
    assert np.abs(wrong - right).max() > 1.0


def test_rows_start_at_their_own_positions(tiny: Checkpoint, case: dict[str, np.ndarray]) -> None:
    tokens = np.concatenate([case["input_ids"], case["input_ids"][:, ::-1]])
    cache = init_kv_cache(tiny.config, 2, 40)
    for start in (0, 8, 16):
        _, cache = run(tiny, tokens[:, start : start + 8], [start, start], cache)
    pair = np.stack([tokens[0, 24:32], tokens[1, 16:24]])
    together, _ = run(tiny, pair, [24, 16], cache)
    for row, start in enumerate((24, 16)):
        alone = KVCache(*(tuple(a[row : row + 1] for a in arrays) for arrays in cache))
        logits, _ = run(tiny, pair[row : row + 1], [start], alone)
        np.testing.assert_allclose(together[row], logits[0], rtol=0, atol=1e-4)


def test_bytes(tiny: Checkpoint) -> None:
    for dtype in (None, "bfloat16"):
        cache = init_kv_cache(tiny.config, 3, 40, dtype)
        held = sum(a.nbytes for arrays in cache for a in arrays)
        assert kv_bytes(tiny.config, 3, 40, dtype) == held
        assert cache.capacity == 40


@pytest.mark.parametrize("batch", [1, 2])
def test_donated_cache_is_updated_in_place(tiny: Checkpoint, batch: int) -> None:
    graphdef, state = nnx.split(tiny.model)
    T, capacity = 8, 8192

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(state: nnx.State, cache: KVCache, starts: jax.Array) -> tuple[jax.Array, KVCache]:
        positions = starts[:, None] + jnp.arange(T)
        mask = block_mask(positions, capacity, BLOCK)
        tokens = jnp.zeros((batch, T), jnp.int32)
        model = nnx.merge(graphdef, state)
        hidden, cache, _ = model(tokens, positions, mask, cache, starts, tiny.experts)
        return hidden, cache

    cache, starts = init_kv_cache(tiny.config, batch, capacity), jnp.full((batch,), 64)
    total = kv_bytes(tiny.config, batch, capacity)
    compiled = step.lower(state, cache, starts).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= total
    # Scores [B, H, T, S] are the largest temporary; a copy of the cache would be as large as the cache.
    assert memory.temp_size_in_bytes < total / 2
    before = [a.unsafe_buffer_pointer() for arrays in cache for a in arrays]
    _, cache = compiled(state, cache, starts)
    assert [a.unsafe_buffer_pointer() for arrays in cache for a in arrays] == before
