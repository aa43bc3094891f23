"""RND1: the Qwen3-MoE trunk, attention both ways over the whole text, and position i predicts token i + 1.

Specification: REFERENCE section 10. The published configuration class overwrites the sizes that a file names with
those of Qwen3-30B-A3B; here the file's count, and the others stand in for what it lacks.
"""

from collections.abc import Mapping
from typing import Any

from oled_jax.config import ModelConfig
from oled_jax.models import qwen3_moe

QWEN3_30B_A3B: Mapping[str, Any] = {
    **qwen3_moe.CLASS_DEFAULTS, "num_hidden_layers": 48, "head_dim": 128, "rope_theta": 1e6,
    "max_position_embeddings": 40960, "norm_topk_prob": True,
}  # fmt: skip

# The published demo asks a base model in these words, whatever template its tokenizer came with.
QUESTION_AND_ANSWER = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}Question: {{ message['content'] }}\nAnswer:"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}\n\n"
    "{% else %}{{ message['content'] }}\n\n{% endif %}"
    "{% endfor %}"
)


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads `config.json`. Raises CheckpointError with everything that is wrong."""
    facts = {"family": RND1.name, "bidirectional": True, "shifted_logits": True}
    return qwen3_moe.read_config(raw, QWEN3_30B_A3B, **facts)


RND1 = qwen3_moe.qwen3_moe_family(
    name="rnd1",
    model_types=("rnd1",),
    config_from_hf=config_from_hf,
    decoding={"rule": "entropy", "whole_text": True, "gen_length": 256, "steps": 256, "temperature": 0.0},
    decoding_keys={"num_diffusion_steps": "steps", "pad_token_id": "pad_id"},
    rules=("entropy", "entropy-bound"),
    chat_template=QUESTION_AND_ANSWER,
)
