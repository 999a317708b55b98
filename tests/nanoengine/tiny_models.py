"""Tiny random models of every supported shape, made by transformers, for parity tests."""

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nanoengine.engine import Engine, optimizer_pieces

_BASE = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "sdpa",
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

SHAPES = {
    "llama-gqa-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-mha-untied": (
        LlamaConfig,
        {"num_key_value_heads": 6, "tie_word_embeddings": False},
    ),
    "llama-mqa-wide-head": (LlamaConfig, {"num_key_value_heads": 1, "head_dim": 16}),
    "llama-bias": (LlamaConfig, {"attention_bias": True}),
    "llama3-rope": (LlamaConfig, {"rope_parameters": _LLAMA3_ROPE, "head_dim": 32}),
    "qwen2-tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-untied-theta": (
        Qwen2Config,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3-tied-narrow-head": (Qwen3Config, {"tie_word_embeddings": True, "head_dim": 4}),
    "qwen3-untied-wide-head": (Qwen3Config, {"head_dim": 24, "rms_norm_eps": 1e-5}),
    "qwen3-bias": (Qwen3Config, {"head_dim": 16, "attention_bias": True}),
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
MOE_SHAPES = {
    "qwen3-moe": (Qwen3MoeConfig, {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        Qwen3MoeConfig,
        {
            **_EXPERTS,
            "head_dim": 8,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        },
    ),
}
_CLASSES = {
    LlamaConfig: LlamaForCausalLM,
    Qwen2Config: Qwen2ForCausalLM,
    Qwen3Config: Qwen3ForCausalLM,
    Qwen3MoeConfig: Qwen3MoeForCausalLM,
}


def make_reference(shape: str, seed: int = 0) -> PreTrainedModel:
    """A transformers model in fp32 whose every parameter, biases and norms too, is random, and
    large enough that logits differ clearly."""
    config_class, options = {**SHAPES, **MOE_SHAPES}[shape]
    torch.manual_seed(seed)
    model = _CLASSES[config_class](config_class(**{**_BASE, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.15
            parameter.copy_(1 + noise if "norm" in name else noise)
    return model


def save_reference(shape: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Make the model and write its folder with transformers."""
    model = make_reference(shape, seed)
    model.save_pretrained(folder)
    return model


def optimizer_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Views of a lone engine's masters and moments by name: `master.norm`, `exp_avg.norm`, ..."""
    return {piece.name: tensor for piece, tensor in optimizer_pieces(engine.optimizer)}
