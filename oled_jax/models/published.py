"""Configurations of published checkpoints, as their `config.json` has them: real shapes without a download.

For benchmarks with random weights (REFERENCE section 2; LLaDA2.0-mini is 16 B parameters, flash 100 B).
"""

from typing import Any

_LLADA2 = {
    "model_type": "llada2_moe",
    "vocab_size": 157184,
    "head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 600000,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "use_qkv_bias": False,
    "use_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16384,
    "num_key_value_heads": 4,
    "dtype": "bfloat16",
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "llada2-mini": _LLADA2
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 20,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
    },
    "llada2-flash": _LLADA2
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_attention_heads": 32,
    },
}
