"""Tiny random models of every supported shape, made by transformers, for parity tests."""

from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from nanoengine.state.engine_state import optimizer_pieces
from nanoengine.state.whole_engine import Engine

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
    "pad_token_id": None,
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
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 8.0,
}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.4, 1.7, 2.0],
    "long_factor": [1.0, 3.0, 5.0, 7.0, 9.0, 11.0],
    "original_max_position_embeddings": 256,
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
_TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_WINDOW = {"sliding_window": 9}
_GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 16,
    "attn_implementation": "eager",  # transformers has no other with sinks on a CPU
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
}

FAMILY_SHAPES = {
    "mistral-window": (MistralConfig, {**_WINDOW, "head_dim": 12}),
    "qwen2-window": (
        Qwen2Config,
        {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "llama-linear": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    ),
    "qwen3-yarn-window": (
        Qwen3Config,
        {
            **_WINDOW,
            **_TWO_KINDS,
            "use_sliding_window": True,
            "head_dim": 16,
            "rope_parameters": _YARN,
        },
    ),
    "qwen2-dynamic": (
        Qwen2Config,
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1000.0}},
    ),
    "smollm3": (SmolLM3Config, {"no_rope_layer_interval": 2}),
    "smollm3-window": (
        SmolLM3Config,
        {**_WINDOW, "use_sliding_window": True, "no_rope_layers": [0, 1, 0]},
    ),
    "granite": (GraniteConfig, {**_GRANITE, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo2": (Olmo2Config, {"attention_bias": True}),
    "olmo3": (Olmo3Config, {**_WINDOW, **_TWO_KINDS}),
    "olmo3-yarn": (
        Olmo3Config,
        {
            **_WINDOW,
            **_TWO_KINDS,
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "phi3": (Phi3Config, {**_WINDOW}),
    "phi3-longrope": (
        Phi3Config,
        {
            "hidden_size": 96,
            "rope_parameters": _LONG_ROPE,
            "original_max_position_embeddings": 256,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            **_WINDOW,
            **_TWO_KINDS,
            "head_dim": 12,
            "query_pre_attn_scalar": 17,
            "rope_parameters": _TWO_ROPES,
        },
    ),
    "glm4": (Glm4Config, {"head_dim": 12}),
    "gpt-oss": (GptOssConfig, {**_GPT_OSS, **_WINDOW}),
    "gpt-oss-full": (
        GptOssConfig,
        {
            **_GPT_OSS,
            "layer_types": ["full_attention"] * 3,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 6,
            "head_dim": 10,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "gpt-oss-windows": (
        GptOssConfig,
        {**_GPT_OSS, **_TWO_KINDS, "sliding_window": 33, "num_experts_per_tok": 5},
    ),
    "glm4-partial": (
        Glm4Config,
        {
            "head_dim": 16,
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
}
"""The families and scalings beside those; windows are shorter than most prompts of the tests."""
_CLASSES = {
    Gemma3TextConfig: Gemma3ForCausalLM,
    Glm4Config: Glm4ForCausalLM,
    GptOssConfig: GptOssForCausalLM,
    GraniteConfig: GraniteForCausalLM,
    MistralConfig: MistralForCausalLM,
    Olmo2Config: Olmo2ForCausalLM,
    Olmo3Config: Olmo3ForCausalLM,
    Phi3Config: Phi3ForCausalLM,
    SmolLM3Config: SmolLM3ForCausalLM,
    LlamaConfig: LlamaForCausalLM,
    Qwen2Config: Qwen2ForCausalLM,
    Qwen3Config: Qwen3ForCausalLM,
    Qwen3MoeConfig: Qwen3MoeForCausalLM,
}


def make_reference(shape: str, seed: int = 0) -> PreTrainedModel:
    """A transformers model in fp32 whose every parameter, biases and norms too, is random, and
    large enough that logits differ clearly."""
    config_class, options = {**SHAPES, **MOE_SHAPES, **FAMILY_SHAPES}[shape]
    torch.manual_seed(seed)
    model = _CLASSES[config_class](config_class(**{**_BASE, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.15
            has_one = "norm" in name and config_class is not Gemma3TextConfig  # which adds it
            if name.endswith("sinks"):  # from a tenth of the weight of one key to ten times it
                noise = noise * 15
            elif name.endswith("gate_up_proj"):  # so that the clamps move some
                noise = noise * 4
            parameter.copy_(1 + noise if has_one else noise)
    return model


def save_reference(shape: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Make the model and write its folder with transformers."""
    model = make_reference(shape, seed)
    model.save_pretrained(folder)
    return model


def optimizer_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Views of a lone engine's masters and moments by name: `master.norm`, `exp_avg.norm`, ..."""
    return {piece.name: tensor for piece, tensor in optimizer_pieces(engine.optimizer)}
