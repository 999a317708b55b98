"""The smallest shapes that every layout can split: a dense model and a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from nanoengine.model.config import ModelConfig

VOCAB = 61
DENSE = ModelConfig(
    model_type="qwen3",
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
    attention_bias=False,
    qk_norm=True,
    max_position_embeddings=64,
)
MOE = replace(
    DENSE,
    model_type="qwen3_moe",
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=16,
    norm_topk_prob=True,
    dense_layers=(),
)
