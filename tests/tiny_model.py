"""A tiny random model as a user would have it: a Hugging Face directory with a tokenizer and decoding settings.

For tests of the commands and of what they load, where the text does not matter. The `tiny_model` fixture writes it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from oled_jax.config import ModelConfig
from oled_jax.convert.random_hf import write_random_hf
from oled_jax.models.registry import config_from_hf

BYTES, EOS_ID, MASK_ID, VOCABULARY = 256, 510, 511, 512
EOS, MASK = "<eos>", "<mask>"

RAW_CONFIG: dict[str, Any] = {
    "model_type": "llada2_moe", "dtype": "float32", "vocab_size": VOCABULARY, "hidden_size": 64,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "intermediate_size": 128, "moe_intermediate_size": 32,
    "num_experts": 32, "num_experts_per_tok": 4, "num_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "rope_theta": 600000.0, "max_position_embeddings": 4096, "use_bias": False,
    "mask_token_id": MASK_ID, "eos_token_id": EOS_ID,
}  # fmt: skip
GENERATION_CONFIG: dict[str, Any] = {"gen_length": 64, "block_length": 16, "steps": 16, "threshold": 0.5}
CHAT_TEMPLATE = "{% for m in messages %}({{ m['role'] }}){{ m['content'] }}{% endfor %}:"


def model_config(dtype: str = "float32") -> ModelConfig:
    """The model's shape, with weights of `dtype`."""
    return config_from_hf({**RAW_CONFIG, "dtype": dtype})


def write_tiny_model(directory: Path, **changes: Any) -> Path:
    """Writes weights, configurations and a tokenizer without a chat template; returns the directory.

    changes: of `RAW_CONFIG`.
    """
    write_random_hf(RAW_CONFIG | changes, directory, seed=20260101)
    (directory / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG), encoding="utf-8")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "mask_token": MASK,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    return directory


def write_talking_model(tiny: Path, directory: Path) -> Path:
    """A copy of a tiny model with a chat template; returns the directory."""
    shutil.copytree(tiny, directory)
    file = directory / "tokenizer_config.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**described, "chat_template": CHAT_TEMPLATE}), encoding="utf-8")
    return directory


def byte_tokenizer() -> Tokenizer:
    """An id for each byte, so that any text has ids; the others spell something, so that any ids are text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{number:03d}" for number in range(BYTES, EOS_ID)]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *words, EOS, MASK])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, MASK])
    return tokenizer
