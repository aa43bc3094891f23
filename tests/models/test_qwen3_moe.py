"""SDAR-MoE and RND1: parity with the reference's intermediate values, rung by rung, and their configuration keys."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from golden_checkpoints import Checkpoint, compiled, load_checkpoint
from golden_forward import GATE_TOLERANCE, HIDDEN_TOLERANCE, GoldenForward, check_model

from oled_jax.errors import UsageError
from oled_jax.models.registry import config_from_hf
from oled_jax.models.rope import rotary_tables

LAYERS = range(3)
RAW = {"model_type": "sdar_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module", params=["sdar", "rnd1"])
def family(request: pytest.FixtureRequest, golden: Path) -> tuple[Checkpoint, GoldenForward]:
    return load_checkpoint(golden / f"{request.param}-tiny"), GoldenForward(golden, f"{request.param}-tiny")


def test_every_part_of_every_layer(family: tuple[Checkpoint, GoldenForward]) -> None:
    """Each part is fed the reference's values, so the first that fails names the cause."""
    checkpoint, cases = family
    assert checkpoint.experts is not None
    golden = {name: jnp.asarray(value) for name, value in cases.tensors.items()}

    def parts(golden: dict[str, jax.Array]) -> dict[str, Any]:
        tables = rotary_tables(checkpoint.config, golden["position_ids"])
        found = {"embed": checkpoint.model.embedding(golden["input_ids"])}
        for number in LAYERS:
            layer, name = checkpoint.model.layers[number], f"layers.{number}"
            h = golden[f"layers.{number - 1}.out" if number else "embed"]
            found[f"{name}.attn_out"] = layer.attend(h, tables, jnp.asarray(cases.mask))[0] - h
            x = layer.post_attention_layernorm(h + golden[f"{name}.attn_out"])
            ids, gates = layer.mlp.gate(x.reshape(-1, x.shape[-1]))
            found |= {f"{name}.topk_idx": ids, f"{name}.topk_weight": gates}
            found[f"{name}.mlp_out"] = layer.mlp(x, number, checkpoint.experts, None)[0]
        return found

    for tensor, actual in compiled(parts, golden).items():
        exact = tensor.endswith("topk_idx")
        cases.same(actual, tensor, 0 if exact else GATE_TOLERANCE if "weight" in tensor else HIDDEN_TOLERANCE)


def test_model(family: tuple[Checkpoint, GoldenForward]) -> None:
    check_model(*family)


def test_keys_that_a_file_lacks() -> None:
    sdar, rnd1 = config_from_hf(RAW), config_from_hf({**RAW, "model_type": "rnd1"})
    assert (sdar.head_dim, sdar.norm_topk_prob, sdar.rope_theta, sdar.rotary_dim) == (16, False, 10000.0, 16)
    assert (rnd1.head_dim, rnd1.norm_topk_prob, rnd1.rope_theta, rnd1.num_experts) == (128, True, 1e6, 128)
    assert (sdar.bidirectional, sdar.shifted_logits) == (False, False)
    assert (rnd1.bidirectional, rnd1.shifted_logits) == (True, True)
    # The published class of RND1 would replace the file's own sizes.
    assert (rnd1.hidden_size, rnd1.num_hidden_layers, rnd1.intermediate_size) == (64, 2, 0)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"mlp_only_layers": [0]}, "dense layers, which are not supported"),
        ({"decoder_sparse_step": 2}, "dense layers, which are not supported"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_experts": "many"}, "num_experts is 'many', it must be a whole number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, it must be true or false"),
    ],
)
def test_what_cannot_be_run_is_named(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        config_from_hf({**RAW, **keys})
