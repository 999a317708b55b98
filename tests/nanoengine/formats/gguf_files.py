"""GGUF files of tiny models, written with llama.cpp's own writer as its converter does."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from tiny_models import _BASE, _CLASSES, make_reference
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    SmolLM3Config,
)

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
GEMMA_TENSORS = {
    **TENSORS,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
INTERLEAVED = ("llama", "smollm3")

_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA31 = {**_LLAMA3, "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
SHAPES: dict[str, tuple[type, dict[str, Any]]] = {
    "mistral": (MistralConfig, {"sliding_window": None, "rope_parameters": {"rope_theta": 1e6}}),
    "mistral-nemo": (MistralConfig, {"sliding_window": None, "head_dim": 12}),
    "llama-3.1": (LlamaConfig, {"rope_parameters": _LLAMA31, "head_dim": 32}),
    "llama-3.2": (
        LlamaConfig,
        {
            "rope_parameters": {**_LLAMA31, "factor": 32.0},
            "head_dim": 64,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
        },
    ),
    "llama-3-rope-of-others": (
        LlamaConfig,
        {
            "rope_parameters": {
                **_LLAMA31,
                "factor": 5.0,
                "low_freq_factor": 1.25,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 48,
            },
            "head_dim": 32,
        },
    ),
    "smollm3": (
        SmolLM3Config,
        {"num_hidden_layers": 5, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    ),
    "phi3": (Phi3Config, {"sliding_window": 9}),
    "phi3-longrope": (
        Phi3Config,
        {
            "hidden_size": 96,
            "sliding_window": None,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3, 1.4, 1.7, 2.0],
                "long_factor": [1.0, 3.0, 5.0, 7.0, 9.0, 11.0],
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "num_hidden_layers": 7,
            "sliding_window": 9,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            "head_dim": 12,
            "query_pre_attn_scalar": 12,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen2-yarn": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            "head_dim": 16,
        },
    ),
    "llama-linear": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    ),
    "wide": (LlamaConfig, {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}),
}
"""Models whose files differ from those of `tiny_models`; "wide" has rows of whole blocks."""


def make_model(shape: str) -> PreTrainedModel:
    if shape not in SHAPES:
        return make_reference(shape)
    config_class, options = SHAPES[shape]
    torch.manual_seed(0)
    model = _CLASSES[config_class](config_class(**{**_BASE, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.15
            has_one = "norm" in name and config_class is not Gemma3TextConfig
            parameter.copy_(1 + noise if has_one else noise)
    return model


@dataclass
class Vocabulary:
    """What a file says about its tokenizer; `ids` are its `*_token_id`."""

    model: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None
    pre: str | None = None
    ids: dict[str, int] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        for name, index in self.ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
        for name, is_on in self.flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", is_on)

    def fields(self) -> dict[str, Any]:
        """As a reader gives them."""
        values: dict[str, Any] = {"model": self.model, "tokens": self.tokens}
        values |= {"token_type": np.array(self.types), "merges": self.merges, "pre": self.pre}
        if self.scores is not None:
            values["scores"] = np.array(self.scores, dtype=np.float32)
        values |= {f"{name}_token_id": index for name, index in self.ids.items()} | self.flags
        return {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None}


def byte_vocabulary(size: int = 211, pre: str = "smollm") -> Vocabulary:
    """Three control tokens, a user-defined one, all printable ASCII, three merges, and filler."""
    tokens = ["<|unk|>", "<|im_start|>", "<|im_end|>", "<think>"]
    types = [CONTROL] * 3 + [USER_DEFINED]
    tokens += [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ", "12", "ab", "Ġab"]
    tokens += [f"<filler{i}>" for i in range(size - len(tokens))]
    types += [NORMAL] * (size - len(types))
    merges = ["1 2", "a b", "Ġ ab"]
    return Vocabulary("gpt2", tokens, types, merges, pre=pre, ids={"bos": 1, "eos": 2})


_WORDS = "\u2581the \u2581hello \u2581world \u2581ab \u2581abc \u2581t \u2581a \u2581s \u2581="
_PARTS = "th he in er on re at ll llo hello wor orl world or ld ab abc bc bcd cd aa aaa == ==== 12"


def sentencepiece_vocabulary(size: int = 0, **flags: bool) -> Vocabulary:
    """As Mistral's: three control tokens, the bytes, two turns, pieces by score, characters."""
    pieces = [
        "\u2581\u2581",
        *_PARTS.split(),
        *_WORDS.split(),
        *"\u2581eaoinrtlhdswbc=[]!<>/",
        "é",
        "\u65e5",
    ]
    head = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    tokens = head + [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces)
    scores = [0.0] * 261 + [-float(rank) for rank in range(len(pieces))]
    rest = max(0, size - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(rest)]
    ids = {"bos": 1, "eos": 2, "unknown": 0}
    return Vocabulary(
        "llama", tokens, types + [UNUSED] * rest, scores=scores + [-10000.0] * rest, pre="default",
        ids=ids, flags=flags,
    )  # fmt: skip


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py does (LlamaModel.permute)."""
    split = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weights.shape))


def gguf_name(name: str, architecture: str = "llama") -> str:
    if name.startswith("model.layers."):
        index, part = name.removeprefix("model.layers.").split(".", 1)
        part, kind = part.rsplit(".", 1)
        tensors = GEMMA_TENSORS if architecture == "gemma3" else TENSORS
        return f"blk.{index}.{tensors[part]}.{kind}"
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    return names[name.removesuffix(".weight")] + ".weight"


def llama3_factors(rope: Mapping[str, Any], width: int) -> np.ndarray:
    """As convert_hf_to_gguf.py does (LlamaModel.generate_extra_tensors)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    length, factors = rope["original_max_position_embeddings"], []
    for pair in range(width // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / width)
        if wavelength < length / high:
            factors.append(1.0)
        elif wavelength > length / low:
            factors.append(rope["factor"])
        else:
            smooth = (length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def _add_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope, head_dim = config.rope_parameters, getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    if "full_attention" in rope:
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))
    if kind == "longrope":
        scale = config.max_position_embeddings / rope["original_max_position_embeddings"]
        length = math.log(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / length))
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    vocabulary: Vocabulary | None = None,
    *,
    architecture: str | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    overridden: tuple[str, Any] | None = None,
) -> None:
    """The file of a model; matrices are stored as `kind`. One field may have another value."""
    config = model.config
    stored = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(file), architecture or stored)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type not in ("qwen2", "phi3"):  # whose heads share the width
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if stored in ("phi3", "gemma3"):
        writer.add_sliding_window(config.sliding_window or 0)
    _add_rope(writer, config)
    (vocabulary or byte_vocabulary(config.vocab_size)).add_to(writer)
    writer.add_chat_template(TEMPLATE)
    if overridden is not None:
        name, value = overridden
        writer.kv_data[0].pop(name, None)
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    heads = {}
    if stored in INTERLEAVED:
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        weights, called = parameter.detach().numpy(), gguf_name(name, stored)
        for part, num_heads in heads.items():
            if f"{part}." in called:
                weights = permute(weights, num_heads)
        if stored == "gemma3" and "norm" in called:
            weights = weights + 1
        if weights.ndim > 1 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(called, quantize(weights, kind), raw_dtype=kind)
        else:
            writer.add_tensor(called, weights)
    for name, weights in (extra_tensors or {}).items():
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
