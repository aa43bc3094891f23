"""Parity with the reference's intermediate values, from one norm up to the logits.

The lowest rung that fails names the cause. Tolerances are those of the golden data's README, or tighter.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from golden_checkpoints import Checkpoint, compiled, load_checkpoint, model_inputs
from safetensors.numpy import load_file

from oled_jax.models.layers import attend, rms_norm
from oled_jax.models.moe import DenseExperts, route
from oled_jax.models.rope import rotary_tables
from oled_jax.models.trunk import block_mask

CASES = (
    "len32_block8", "len27_block8", "len1_block32", "len40_block32", "len24_block1", "len20_nomask",
    "len96_block32", "batch2_len24_block4", "train_noisy_clean_block4",
)  # fmt: skip
RUNG_CASES = ("len27_block8", "batch2_len24_block4")  # for the lower rungs: an odd length, and a batch
HIDDEN_TOLERANCE = 1e-4
LOGIT_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def tiny(golden: Path) -> Checkpoint:
    return load_checkpoint(golden / "llada2-tiny")


@pytest.fixture(scope="module")
def forward(golden: Path) -> dict[str, dict[str, np.ndarray]]:
    described = json.loads((golden / "llada2-tiny-forward.json").read_text())["cases"]
    assert set(described) == set(CASES)
    cases: dict[str, dict[str, np.ndarray]] = {name: {} for name in CASES}
    for name, values in load_file(golden / "llada2-tiny-forward.safetensors").items():
        case, _, tensor = name.partition("/")
        cases[case][tensor] = values
    return cases


@pytest.fixture(scope="module", params=RUNG_CASES)
def case(request: pytest.FixtureRequest, forward: dict[str, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return forward[request.param]


def close(actual: object, expected: np.ndarray, tolerance: float = HIDDEN_TOLERANCE) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=tolerance)


def before_mlp(case: dict[str, np.ndarray], layer: int) -> jnp.ndarray:
    """The hidden state that enters the feed-forward half of a layer."""
    return jnp.asarray(case[f"layers.{layer - 1}.out" if layer else "embed"] + case[f"layers.{layer}.attn_out"])


def test_embedding_and_norm(tiny: Checkpoint, case: dict[str, np.ndarray]) -> None:
    embedded = tiny.model.word_embeddings(model_inputs(case)[0])
    np.testing.assert_array_equal(np.asarray(embedded), case["embed"])
    close(tiny.model.layers[0].input_layernorm(embedded), case["layers.0.input_norm"], 1e-5)


def test_rotary_tables(tiny: Checkpoint, case: dict[str, np.ndarray]) -> None:
    cos, sin = compiled(functools.partial(rotary_tables, tiny.config), model_inputs(case)[1])
    # An angle near 1500 has a float32 spacing of 1.2e-4: that is what two exact computations may differ by.
    close(cos, case["cos"], 2e-4)
    close(sin, case["sin"], 2e-4)


def test_attention_inputs(tiny: Checkpoint, case: dict[str, np.ndarray]) -> None:
    attention = tiny.model.layers[0].attention
    x = jnp.asarray(case["layers.0.input_norm"])
    close(compiled(attention.query_key_value, x), case["layers.0.qkv"])
    tables = (jnp.asarray(case["cos"]), jnp.asarray(case["sin"]))
    projected = compiled(attention.project, x, tables)
    for actual, name in zip(projected, ("q_rope", "k_rope", "v"), strict=True):
        close(actual.swapaxes(1, 2), case[f"layers.0.{name}"])


def test_attention(tiny: Checkpoint, case: dict[str, np.ndarray]) -> None:
    queries, keys, values = (jnp.asarray(case[f"layers.0.{name}"]) for name in ("q_rope", "k_rope", "v"))
    context = compiled(attend, queries.swapaxes(1, 2), keys, values, model_inputs(case)[2])
    close(context, case["layers.0.attn_context"])
    B, T = context.shape[:2]
    close(tiny.model.layers[0].attention.dense(context.reshape(B, T, -1)), case["layers.0.attn_out"])


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_router(tiny: Checkpoint, case: dict[str, np.ndarray], layer: int) -> None:
    block = tiny.model.layers[layer]
    D, K = tiny.config.hidden_size, tiny.config.num_experts_per_tok
    x = before_mlp(case, layer)
    ids, gates = compiled(lambda x: block.mlp.gate(block.post_attention_layernorm(x).reshape(-1, D)), x)
    np.testing.assert_array_equal(np.asarray(ids), case[f"layers.{layer}.topk_idx"].reshape(-1, K))
    close(gates, case[f"layers.{layer}.topk_weight"].reshape(-1, K), 1e-5)


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
    close(actual, expected, 1e-5)
    np.testing.assert_array_equal(carry["kept"], ids)


@pytest.mark.parametrize("layer", [1, 3])
def test_moe_block(tiny: Checkpoint, case: dict[str, np.ndarray], layer: int) -> None:
    block = tiny.model.layers[layer]

    def both(x: jnp.ndarray) -> tuple[jnp.ndarray, jnp.ndarray]:
        x = block.post_attention_layernorm(x)
        return block.mlp.shared_experts(x), block.mlp(x, layer - 1, tiny.experts, None)[0]

    shared, mixture = compiled(both, before_mlp(case, layer))
    close(shared, case[f"layers.{layer}.shared_out"])
    close(mixture, case[f"layers.{layer}.mlp_out"])


@pytest.mark.parametrize("layer", [0, 2])
def test_layer(tiny: Checkpoint, case: dict[str, np.ndarray], layer: int) -> None:
    block = tiny.model.layers[layer]
    h = jnp.asarray(case[f"layers.{layer - 1}.out" if layer else "embed"])
    tables = (jnp.asarray(case["cos"]), jnp.asarray(case["sin"]))
    h, _ = compiled(block.attend, h, tables, model_inputs(case)[2])
    close(h, before_mlp(case, layer))
    h = compiled(lambda h: block.feed_forward(h, layer - 1, tiny.experts, None)[0], h)
    close(h, case[f"layers.{layer}.out"])


class RecordingExperts(NamedTuple):
    """Resident experts whose carry collects what the router chose."""

    experts: DenseExperts

    def __call__(self, layer, x, ids, gates, carry):
        y, _ = self.experts(layer, x, ids, gates, None)
        return y, {**carry, layer: ids}


@pytest.mark.parametrize("name", CASES)
def test_model(tiny: Checkpoint, forward: dict[str, dict[str, np.ndarray]], name: str) -> None:
    case = forward[name]
    assert tiny.experts is not None
    hidden, cache, chosen = tiny.forward(*model_inputs(case), experts=RecordingExperts(tiny.experts), carry={})
    assert cache is None
    close(hidden, case["final_norm"])
    close(tiny.model.logits(hidden), case["logits"], LOGIT_TOLERANCE)
    assert sorted(chosen) == [0, 1, 2]
    for layer, ids in chosen.items():
        expected = case[f"layers.{layer + 1}.topk_idx"]
        np.testing.assert_array_equal(np.asarray(ids), expected.reshape(ids.shape))


@pytest.mark.parametrize(("name", "length"), [("len32_block8", 8), ("len27_block8", 8), ("len24_block1", 1)])
def test_block_mask(forward: dict[str, dict[str, np.ndarray]], name: str, length: int) -> None:
    _, positions, expected = model_inputs(forward[name])
    mask = block_mask(positions, expected.shape[-1], length)
    np.testing.assert_array_equal(np.asarray(mask), np.asarray(expected))


def test_norm_casts_before_the_weight() -> None:
    x = jnp.asarray([[1.0, 3.0, 1.0, 1.0]], jnp.bfloat16)
    weight = jnp.full((4,), 1.0078125, jnp.bfloat16)
    unit = (x.astype(jnp.float32) / jnp.sqrt(3.0)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(rms_norm(x, weight, 0.0)), np.asarray(unit * weight))


def test_router_is_float32_on_bfloat16_input(tiny: Checkpoint, forward: dict[str, dict[str, np.ndarray]]) -> None:
    x = jnp.asarray(forward["len32_block8"]["layers.1.out"][0]).astype(jnp.bfloat16)
    gate = tiny.model.layers[2].mlp.gate
    weight, bias = gate.weight[...], gate.expert_bias[...]
    routed = functools.partial(compiled, functools.partial(route, config=tiny.config))
    narrow = routed(x, weight.astype(jnp.bfloat16), bias)
    wide = routed(x.astype(jnp.float32), weight, bias)
    for a, b in zip(narrow, wide, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
