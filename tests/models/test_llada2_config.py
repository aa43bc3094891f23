"""Reading `config.json`: defaults, null and old keys, and every problem in one message."""

import json
from pathlib import Path
from typing import Any

import pytest

from oled_jax.errors import UsageError
from oled_jax.models.registry import FAMILIES, config_from_hf, family_of

SMALL = {"model_type": "llada2_moe", "moe_intermediate_size": 16}


def config(**keys: Any) -> Any:
    return config_from_hf({**SMALL, **keys})


def test_defaults_of_missing_keys() -> None:
    read = config()
    expected = {
        "vocab_size": 30592, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 2, "n_group": 8,
        "topk_group": 4, "routed_scaling_factor": 2.5, "num_shared_experts": 0, "first_k_dense_replace": 0,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_scaling": None,
        "use_qk_norm": True, "use_qkv_bias": False, "use_bias": True, "tie_word_embeddings": False,
        "max_position_embeddings": 16384, "dtype": "float32", "mask_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    assert {name: getattr(read, name) for name in expected} == expected


def test_published_keys(golden: Path) -> None:
    raw = json.loads((golden / "llada2-tiny" / "config.json").read_text())
    read = config_from_hf(raw)
    assert (read.dtype, read.use_bias, read.eos_token_id, read.pad_token_id) == ("bfloat16", False, 508, 508)
    assert (read.rms_norm_eps, read.rope_theta, read.rotary_dim) == (1e-6, 600000.0, 8)
    assert hash(read) == hash(config_from_hf(raw))


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        ({"head_dim": None}, "head_dim", 64),
        ({"head_dim": 0}, "head_dim", 64),
        ({"num_key_value_heads": None}, "num_key_value_heads", 16),
        ({"num_key_value_heads": 0}, "num_key_value_heads", 16),
        ({"num_shared_experts": None}, "num_shared_experts", None),
        ({"rope_scaling": False}, "rope_scaling", None),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "dtype", "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "dtype", "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "dtype", "bfloat16"),
        ({"eos_token_id": [7, 8]}, "eos_token_id", 7),
        ({"mask_token_id": 9}, "mask_token_id", 9),
        ({"norm_topk_prob": False, "rotary_dim": 4}, "rotary_dim", 32),
    ],
)
def test_special_values(keys: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(config(**keys), field) == value


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model_type": "llama"}, ["'llama'", "llada2_moe", "llada21_moe", "llada2_moe_veomni"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        ({"hidden_size": "64"}, ["hidden_size is '64'"]),
        ({"num_experts": True}, ["num_experts is True"]),
        ({"rope_theta": float("nan")}, ["rope_theta is nan"]),
        ({"use_bias": 1}, ["use_bias is 1"]),
        ({"moe_intermediate_size": None}, ["moe_intermediate_size"]),
        ({"first_k_dense_replace": 1}, ["intermediate_size is missing"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 16", "num_key_value_heads 3"]),
        ({"num_experts": 15}, ["n_group 8"]),
        ({"topk_group": 9}, ["topk_group 9"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok 9"]),
        ({"partial_rotary_factor": 2.0}, ["partial_rotary_factor"]),
        ({"torch_dtype": "int8"}, ["int8", "bfloat16"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"rope_scaling": {"rope_type": "spiral"}}, ["'spiral'", "longrope"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear", "factor"]),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, ["rope_scaling factor is '4'"]),
        ({"rope_scaling": [1]}, ["rope_scaling is [1]"]),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}}, ["short_factor"]),
        ({"rope_scaling": {"type": "llama3", "factor": 2}}, ["low_freq_factor", "high_freq_factor"]),
    ],
)  # fmt: skip
def test_problems_name_the_culprit(keys: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        config(**keys)
    assert all(word in str(caught.value) for word in said), str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        config(hidden_act="relu", vocab_size="many", topk_group=9, rms_norm_eps=-1.0)
    message = str(caught.value)
    assert all(word in message for word in ("4 problems", "hidden_act", "vocab_size", "topk_group", "rms_norm_eps"))


def test_a_wrong_type_is_reported_once() -> None:
    with pytest.raises(UsageError) as caught:
        config(moe_intermediate_size="16")
    assert str(caught.value).count("moe_intermediate_size") == 1


@pytest.mark.parametrize(
    ("model_type", "editing"), [("llada2_moe", False), ("llada2_moe_veomni", False), ("llada21_moe", True)]
)
def test_family_by_model_type(model_type: str, editing: bool) -> None:
    raw = {**SMALL, "model_type": model_type}
    family = family_of(raw)
    assert bool(family.decoding.get("editing", False)) is editing
    assert config_from_hf(raw).family == family.name
    assert config_from_hf(raw).model_type == model_type


def test_family_names_and_types_are_unique() -> None:
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(set(types)) == len(types)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
