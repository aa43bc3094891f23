"""Parity with the reference's intermediate values, from one norm up to the logits.

The lowest rung that fails names the cause. Tolerances are those of the golden data's README, or tighter.
"""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from golden_checkpoints import Checkpoint, compiled, load_checkpoint, model_inputs
from golden_forward import GATE_TOLERANCE, GoldenForward, check_model

from oled_jax.models.layers import attend, rms_norm
from oled_jax.models.moe import route
from oled_jax.models.rope import rotary_tables
from oled_jax.models.trunk import block_mask

CASES = (
    "len32_block8", "len27_block8", "len1_block32", "len40_block32", "len24_block1", "len20_nomask",
    "len96_block32", "batch2_len24_block4", "train_noisy_clean_block4",
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(golden: Path) -> Checkpoint:
    return load_checkpoint(golden / "llada2-tiny")


@pytest.fixture(scope="module")
def forward(golden: Path) -> GoldenForward:
    return GoldenForward(golden, "llada2-tiny")


def before_mlp(forward: GoldenForward, layer: int) -> jnp.ndarray:
    """The hidden state that enters the feed-forward half of a layer."""
    entering = forward.tensors[f"layers.{layer - 1}.out" if layer else "embed"]
    return jnp.asarray(entering + forward.tensors[f"layers.{layer}.attn_out"])


def rotary(forward: GoldenForward) -> tuple[jnp.ndarray, jnp.ndarray]:
    return jnp.asarray(forward.tensors["cos"]), jnp.asarray(forward.tensors["sin"])


def test_every_case_is_here(forward: GoldenForward) -> None:
    assert set(forward.cases) == set(CASES)


def test_embedding_and_norm(tiny: Checkpoint, forward: GoldenForward) -> None:
    embedded = tiny.model.word_embeddings(jnp.asarray(forward.tensors["input_ids"]))
    forward.same(embedded, "embed", 0)
    forward.same(tiny.model.layers[0].input_layernorm(embedded), "layers.0.input_norm", 1e-5)


def test_rotary_tables(tiny: Checkpoint, forward: GoldenForward) -> None:
    positions = jnp.asarray(forward.tensors["position_ids"], jnp.int32)
    cos, sin = compiled(functools.partial(rotary_tables, tiny.config), positions)
    # An angle near 1500 has a float32 spacing of 1.2e-4: that is what two exact computations may differ by.
    forward.same(cos, "cos", 2e-4)
    forward.same(sin, "sin", 2e-4)


def test_attention_inputs(tiny: Checkpoint, forward: GoldenForward) -> None:
    attention = tiny.model.layers[0].attention
    x = jnp.asarray(forward.tensors["layers.0.input_norm"])
    forward.same(compiled(attention.query_key_value, x), "layers.0.qkv")
    projected = compiled(attention.project, x, rotary(forward))
    for actual, name in zip(projected, ("q_rope", "k_rope", "v"), strict=True):
        forward.same(actual, f"layers.0.{name}")


def test_attention(tiny: Checkpoint, forward: GoldenForward) -> None:
    queries, keys, values = (jnp.asarray(forward.tensors[f"layers.0.{name}"]) for name in ("q_rope", "k_rope", "v"))
    context = compiled(attend, queries, keys.swapaxes(1, 2), values.swapaxes(1, 2), jnp.asarray(forward.mask))
    forward.same(context, "layers.0.attn_context")
    B, T = context.shape[:2]
    forward.same(tiny.model.layers[0].attention.dense(context.reshape(B, T, -1)), "layers.0.attn_out")


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_router(tiny: Checkpoint, forward: GoldenForward, layer: int) -> None:
    block = tiny.model.layers[layer]
    D = tiny.config.hidden_size
    x = before_mlp(forward, layer)
    ids, gates = compiled(lambda x: block.mlp.gate(block.post_attention_layernorm(x).reshape(-1, D)), x)
    forward.same(ids, f"layers.{layer}.topk_idx", 0)
    forward.same(gates, f"layers.{layer}.topk_weight", GATE_TOLERANCE)


def test_one_expert_in_double_precision(tiny: Checkpoint) -> None:
    assert tiny.experts is not None
    x = np.random.default_rng(3).standard_normal((5, tiny.config.hidden_size)).astype(np.float32)
    layer, expert = 1, 7
    name = tiny.family.expert_name.format(layer=layer + 1, expert=expert, projection="{}")
    gate, up, down = (tiny.tensors[name.format(p)].astype(np.float64) for p in ("gate_proj", "up_proj", "down_proj"))
    gated = x @ gate.T
    expected = 0.5 * ((gated / (1 + np.exp(-gated))) * (x @ up.T)) @ down.T
    ids, gates = jnp.full((5, 1), expert), jnp.full((5, 1), 0.5)
    actual, carry = compiled(functools.partial(tiny.experts, layer), jnp.asarray(x), ids, gates, {"kept": ids})
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(carry["kept"], ids)


@pytest.mark.parametrize("layer", [1, 3])
def test_moe_block(tiny: Checkpoint, forward: GoldenForward, layer: int) -> None:
    block = tiny.model.layers[layer]

    def both(x: jnp.ndarray) -> tuple[jnp.ndarray, jnp.ndarray]:
        x = block.post_attention_layernorm(x)
        return block.mlp.shared_experts(x), block.mlp(x, layer - 1, tiny.experts, None)[0]

    shared, mixture = compiled(both, before_mlp(forward, layer))
    forward.same(shared, f"layers.{layer}.shared_out")
    forward.same(mixture, f"layers.{layer}.mlp_out")


@pytest.mark.parametrize("layer", [0, 2])
def test_layer(tiny: Checkpoint, forward: GoldenForward, layer: int) -> None:
    block = tiny.model.layers[layer]
    h = jnp.asarray(forward.tensors[f"layers.{layer - 1}.out" if layer else "embed"])
    attended, _ = compiled(block.attend, h, rotary(forward), jnp.asarray(forward.mask))
    forward.same(attended - h, f"layers.{layer}.attn_out")
    h = compiled(lambda h: block.feed_forward(h, layer - 1, tiny.experts, None)[0], attended)
    forward.same(h, f"layers.{layer}.out")


def test_model(tiny: Checkpoint, forward: GoldenForward) -> None:
    check_model(tiny, forward)


@pytest.mark.parametrize(("name", "length"), [("len32_block8", 8), ("len27_block8", 8), ("len24_block1", 1)])
def test_block_mask(forward: GoldenForward, name: str, length: int) -> None:
    _, positions, expected = model_inputs(forward.cases[name])
    mask = block_mask(positions, expected.shape[-1], length)
    np.testing.assert_array_equal(np.asarray(mask), np.asarray(expected))


def test_norm_casts_before_the_weight() -> None:
    x = jnp.asarray([[1.0, 3.0, 1.0, 1.0]], jnp.bfloat16)
    weight = jnp.full((4,), 1.0078125, jnp.bfloat16)
    unit = (x.astype(jnp.float32) / jnp.sqrt(3.0)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(rms_norm(x, weight, 0.0)), np.asarray(unit * weight))


def test_router_is_float32_on_bfloat16_input(tiny: Checkpoint, forward: GoldenForward) -> None:
    x = jnp.asarray(forward.cases["len32_block8"]["layers.1.out"][0]).astype(jnp.bfloat16)
    gate = tiny.model.layers[2].mlp.gate
    weight, bias = gate.weight[...], gate.expert_bias[...]
    routed = functools.partial(compiled, functools.partial(route, config=tiny.config))
    narrow = routed(x, weight.astype(jnp.bfloat16), bias)
    wide = routed(x.astype(jnp.float32), weight, bias)
    for a, b in zip(narrow, wide, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
