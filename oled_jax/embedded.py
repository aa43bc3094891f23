"""The model that runs when none is named: small, random, built in code. Shows that an installation works."""

from collections.abc import Sequence
from typing import Any

from oled_jax.config import ModelConfig
from oled_jax.models.registry import config_from_hf
from oled_jax.text import TextCodec

SEED = 20260101
PROMPT = "Hello"
NOTICE = "no --model was given: this is the embedded model with random weights, its text means nothing"
BYTES, FIRST_LETTER, EOS_ID, MASK_ID, VOCABULARY = 256, 0x100, 510, 511, 512

RAW_CONFIG: dict[str, Any] = {
    "model_type": "llada2_moe", "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 4,
    "first_k_dense_replace": 1, "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 32,
    "num_experts_per_tok": 4, "num_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 600000.0,
    "max_position_embeddings": 4096, "use_bias": False, "mask_token_id": MASK_ID, "eos_token_id": EOS_ID,
}  # fmt: skip
GENERATION_CONFIG: dict[str, Any] = {"gen_length": 64, "block_length": 16, "steps": 16, "threshold": 0.5}


def model_config(dtype: str) -> ModelConfig:
    """The model's shape, with weights of `dtype`."""
    return config_from_hf({**RAW_CONFIG, "dtype": dtype})


def byte_codec() -> TextCodec:
    """A codec over `ByteTokenizer`."""
    return TextCodec(ByteTokenizer(), "the embedded model")


class ByteTokenizer:
    """Ids below 256 are bytes of UTF-8, the others letters, so that random ids are text.

    The part of transformers' interface that `TextCodec` uses.
    """

    chat_template = None
    eos_token, eos_token_id = "<eos>", EOS_ID
    mask_token, mask_token_id = "<mask>", MASK_ID

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode("utf-8"))}

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """Bytes that are no UTF-8 become replacement characters."""
        del clean_up_tokenization_spaces  # there are no word pieces
        spelled = b"".join(self._spell(token, skip_special_tokens) for token in ids)
        return spelled.decode("utf-8", errors="replace")

    def _spell(self, token: int, skip_special_tokens: bool) -> bytes:
        if token < BYTES:
            return bytes([token])
        special = {EOS_ID: self.eos_token, MASK_ID: self.mask_token}.get(token)
        if special is not None:
            return b"" if skip_special_tokens else special.encode()
        return chr(FIRST_LETTER + token - BYTES).encode("utf-8")
