"""Shapes of the models that `scripts/train_demo.py` trains, as their `config.json`, and how they decode."""

from typing import Any

from oled_jax.demo.training.vocabulary import EOS_ID, MASK_ID

BLOCK_LENGTH = 16
GENERATION: dict[str, Any] = {"gen_length": 128, "block_length": BLOCK_LENGTH, "steps": BLOCK_LENGTH, "threshold": 0.9}

DEMO: dict[str, Any] = {
    "model_type": "llada2_moe", "vocab_size": 2048, "hidden_size": 192, "num_hidden_layers": 6,
    "first_k_dense_replace": 1, "intermediate_size": 512, "moe_intermediate_size": 32, "num_experts": 128,
    "num_experts_per_tok": 4, "num_shared_experts": 1, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5, "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    "rope_scaling": None, "use_qk_norm": True, "use_qkv_bias": False, "use_bias": False,
    "tie_word_embeddings": True, "max_position_embeddings": 2048, "mask_token_id": MASK_ID,
    "eos_token_id": EOS_ID, "pad_token_id": EOS_ID,
}  # fmt: skip

# For --smoke and tests: everything is there, nothing is learnt.
SMOKE: dict[str, Any] = {
    **DEMO, "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64,
    "moe_intermediate_size": 16, "num_experts": 16, "n_group": 4, "topk_group": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
