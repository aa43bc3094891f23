"""Assembling a trunk from arrays, and random ones that behave."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oled_jax.config import ModelConfig
from oled_jax.models.registry import assemble, config_from_hf, family_named, random_trunk
from oled_jax.models.trunk import block_mask

BIAS = ("layers", 1, "mlp", "gate", "expert_bias")


RAW = {
    "model_type": "llada2_moe", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3,
    "intermediate_size": 96, "moe_intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return config_from_hf(RAW)


def model_of(config: ModelConfig, trunk: dict[Any, np.ndarray]) -> nnx.Module:
    return nnx.merge(*assemble(config, {path: jnp.asarray(array) for path, array in trunk.items()}))


def test_assembled_state_holds_the_arrays(config: ModelConfig) -> None:
    trunk = random_trunk(config, 0)
    graphdef, state = assemble(config, trunk)
    held = dict(nnx.to_flat_state(state))
    assert held.keys() == trunk.keys()
    assert all(held[path].get_value() is trunk[path] for path in trunk)
    assert hash(graphdef) == hash(assemble(config, random_trunk(config, 1))[0])


def test_dtypes(config: ModelConfig) -> None:
    trunk = random_trunk(config, 0)
    assert trunk[BIAS].dtype == np.float32
    others = {array.dtype for path, array in trunk.items() if path[-1] != "expert_bias"}
    assert others == {jnp.dtype("bfloat16")}
    flagged = [t.path for t in family_named(config.family).trunk_tensors(config) if t.float32]
    assert flagged == [path for path in trunk if path[-1] == "expert_bias"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({BIAS: None}, "no array"),
        ({("extra",): np.zeros(1)}, "no such leaf"),
        ({BIAS: np.zeros(3, np.float32)}, r"\(3,\)"),
        ({BIAS: np.zeros(16, np.float16)}, "float16"),
    ],
)
def test_arrays_that_do_not_fit(config: ModelConfig, change: dict[Any, Any], said: str) -> None:
    trunk = {path: array for path, array in (random_trunk(config, 0) | change).items() if array is not None}
    with pytest.raises(RuntimeError, match=said):
        assemble(config, trunk)


def test_random_trunk_is_reproducible_and_not_degenerate(config: ModelConfig) -> None:
    trunk, same, other = random_trunk(config, 5), random_trunk(config, 5), random_trunk(config, 6)
    path = ("word_embeddings", "weight")
    np.testing.assert_array_equal(trunk[path], same[path])
    assert (trunk[path] != other[path]).any()
    assert len(np.unique(trunk[path].view(np.uint16), axis=0)) == config.vocab_size

    model = model_of(config, trunk)
    tokens = jnp.arange(32)[None] * 9 % config.vocab_size
    positions = jnp.arange(32)[None]

    def no_experts(layer: int, x: Any, ids: Any, gates: Any, carry: Any) -> tuple[Any, Any]:
        return jnp.zeros_like(x), (*carry, ids)

    @jax.jit
    def forward() -> tuple[Any, Any, Any]:
        hidden, _, chosen = model(tokens, positions, block_mask(positions, 32, 8), experts=no_experts, carry=())
        return hidden, model.logits(hidden), chosen

    hidden, logits, chosen = forward()
    logits = np.asarray(logits)
    assert 0.5 < np.asarray(hidden, np.float32).std() < 2
    assert 2 < logits.std() < 8
    assert len(np.unique(logits.argmax(-1))) > 16
    assert all(len(np.unique(ids)) > config.num_experts // 2 for ids in chosen)


def test_routed_layers_need_experts(config: ModelConfig) -> None:
    model = model_of(config, random_trunk(config, 0))
    positions = jnp.arange(32)[None]
    with pytest.raises(RuntimeError, match="routed experts"):
        jax.eval_shape(model, positions, positions, block_mask(positions, 32, 8))
