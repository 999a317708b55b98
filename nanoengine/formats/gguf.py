"""A GGUF file (llama.cpp) of a dense model turned into a Hugging Face folder, once.

Weights are dequantised to fp32. What llama.cpp keeps otherwise than Hugging Face is undone: rows of
queries and keys that lie interleaved (its rope rotates neighbours, ours rotates halves), norms that
have the one of `1 + weight` in them. A Llama of Mistral's is a `llama` here as it is there.
Left out: other architectures, mixtures of experts, files in parts, and writing GGUF. Each is
refused by name. Needs the package `gguf`, imported only when a file is converted.
Next: gguf_file.py (the container), gguf_rope.py (the rope), gguf_tokenizer.py (the tokenizer).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoengine.formats.gguf_file import GgufFields, GgufTensor, read_gguf
from nanoengine.formats.gguf_rope import FACTORS, read_rope
from nanoengine.formats.gguf_tokenizer import GgufTokenizer
from nanoengine.formats.hf import check_state, hf_views, write_folder
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer

_GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {f"attn_{part}.weight": f"self_attn.{part}_proj.weight" for part in "qkv"}
_COMMON = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_LLAMA = {
    **_COMMON,
    **_ATTENTION,
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
}
_BIASES = {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
_HEAD_NORMS = {f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}
_GEMMA_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_PHI = {
    **_COMMON,
    "attn_qkv.weight": "self_attn.qkv_proj.weight",
    "ffn_up.weight": "mlp.gate_up_proj.weight",
}
_CHANGES = (
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "expert_count",
)
"""Fields that change what is computed, in models that are not these."""
_SIDES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_DEEPEST_GEMMA3 = 62  # layers of its 27B, whose scores have a scale of their own


def _phi3_fields(fields: GgufFields, shape: Mapping[str, Any]) -> dict[str, Any]:
    # zero stands for none in the files of Phi-4
    return {"sliding_window": fields.get("phi3.attention.sliding_window", int) or None}


def _gemma3_fields(fields: GgufFields, shape: Mapping[str, Any]) -> dict[str, Any]:
    is_deepest = shape["num_hidden_layers"] == _DEEPEST_GEMMA3
    return {
        "sliding_window": fields.need("gemma3.attention.sliding_window", int),
        "sliding_window_pattern": fields.get("gemma3.attention.sliding_window_pattern", int),
        "query_pre_attn_scalar": (
            shape["hidden_size"] // shape["num_attention_heads"]
            if is_deepest
            else shape["head_dim"]
        ),
    }


@dataclass(frozen=True, kw_only=True)
class _Architecture:
    """The form in which llama.cpp keeps a family of ours."""

    model_type: str
    tensors: Mapping[str, str]
    """Of a layer, with their names in Hugging Face's."""
    is_interleaved: bool = False
    """The rows of a query or key head come in pairs."""
    norm_offset: float = 0.0
    """What norms have more than Hugging Face's."""
    more_fields: Callable[[GgufFields, Mapping[str, Any]], dict[str, Any]] | None = None
    """Fields of config.json beside those of every family."""


_ARCHITECTURES = {
    "llama": _Architecture(model_type="llama", tensors=_LLAMA, is_interleaved=True),
    "qwen2": _Architecture(model_type="qwen2", tensors=_LLAMA | _BIASES),
    "qwen3": _Architecture(model_type="qwen3", tensors=_LLAMA | _HEAD_NORMS),
    "smollm3": _Architecture(model_type="smollm3", tensors=_LLAMA, is_interleaved=True),
    "phi3": _Architecture(model_type="phi3", tensors=_PHI, more_fields=_phi3_fields),
    "gemma3": _Architecture(
        model_type="gemma3_text",
        tensors=_LLAMA | _HEAD_NORMS | _GEMMA_NORMS,
        norm_offset=1.0,
        more_fields=_gemma3_fields,
    ),
}
"""By `general.architecture`."""


def convert_gguf(file: str | Path, folder: str | Path) -> None:
    """Write `folder` (it must not exist) from a GGUF file: config, fp32 safetensors, tokenizer.

    The folder appears whole or not at all. `ValueError` names what cannot be converted.
    """
    source, target = Path(file), Path(folder)
    if target.exists():
        raise ValueError(f"{target} exists already: remove it or give another folder")
    fields, tensors = read_gguf(source)
    try:
        architecture = _architecture(fields)
        tokenizer = GgufTokenizer(fields)
        built = tokenizer.build()
        config = _config(fields, tensors, tokenizer)
        names = _names(architecture, tensors)
        empty = {name: torch.empty(t.shape, device="meta") for name, t in names.items()}
        short = replace(config, max_position_embeddings=1)  # no table of positions is laid out
        check_state(hf_views(Transformer(short, device="meta")), empty)
        state = dict(_to_hf(architecture, config, names))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / f"{target.name}.tmp-{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        write_folder(scratch, config, state)
        built.save(str(scratch / "tokenizer.json"))
        settings = tokenizer.config(config.max_position_embeddings)
        _write_json(scratch / "tokenizer_config.json", settings)
        ids = {name: one for name, one in tokenizer.id_fields.items() if one is not None}
        _write_json(scratch / "generation_config.json", ids)
        os.rename(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _architecture(fields: GgufFields) -> _Architecture:
    name = fields.need("general.architecture", str)
    if name not in _ARCHITECTURES:
        supported = ", ".join(repr(known) for known in _ARCHITECTURES)
        raise ValueError(f"general.architecture={name!r}: not supported; supported are {supported}")
    parts = fields.get("split.count", int)
    if parts is not None and parts > 1:
        raise ValueError(
            f"split.count={parts}: the model is in {parts} files; merge them with llama.cpp's "
            "`llama-gguf-split --merge`"
        )
    for field in _CHANGES:
        value = fields.get(f"{name}.{field}", float)
        if value:
            raise ValueError(
                f"{name}.{field}={value:g}: not supported; supported is a file without"
            )
    if fields.get(f"{name}.attention.causal", bool) is False:  # a model of embeddings
        raise ValueError(f"{name}.attention.causal=false: not supported; supported is true")
    return _ARCHITECTURES[name]


def _config(fields: GgufFields, tensors: list[GgufTensor], tokenizer: GgufTokenizer) -> ModelConfig:
    name = fields.need("general.architecture", str)
    architecture = _ARCHITECTURES[name]
    heads = fields.need(f"{name}.attention.head_count", int)
    hidden = fields.need(f"{name}.embedding_length", int)
    head_dim = fields.get(f"{name}.attention.key_length", int) or hidden // max(heads, 1)
    value_dim = fields.get(f"{name}.attention.value_length", int)
    if value_dim not in (None, head_dim):
        raise ValueError(f"{name}.attention.value_length={value_dim}: must be {head_dim}, as keys")
    epsilon = fields.positive(f"{name}.attention.layer_norm_rms_epsilon")
    if epsilon is None:
        raise ValueError(f"the field {name}.attention.layer_norm_rms_epsilon is missing")
    shape: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": len(tokenizer.tokens),
        "hidden_size": hidden,
        "intermediate_size": fields.need(f"{name}.feed_forward_length", int),
        "num_hidden_layers": fields.need(f"{name}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get(f"{name}.attention.head_count_kv", int) or heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.need(f"{name}.context_length", int),
        # stored as fp32; six digits give back the 1e-05 of the original config
        "rms_norm_eps": float(f"{epsilon:.6g}"),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in tensors),
        **tokenizer.id_fields,
    }
    for field in ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings"):
        if shape[field] < 1:
            raise ValueError(f"{field}={shape[field]}: must be at least 1")
    largest = max((max(tensor.shape) for tensor in tensors), default=0)
    for field in _SIDES:  # before anything of that size is laid out
        if shape[field] > largest:
            raise ValueError(f"{field}={shape[field]}: must be at most {largest}, as its tensors")
    shape |= read_rope(fields, shape, {t.name: t for t in tensors if t.name in FACTORS})
    if architecture.more_fields is not None:
        shape |= architecture.more_fields(fields, shape)
    return ModelConfig.from_hf_dict(shape)


def _names(architecture: _Architecture, tensors: list[GgufTensor]) -> dict[str, GgufTensor]:
    """The model's tensors by their names in Hugging Face's."""
    return {
        _translate(tensor.name, architecture): tensor
        for tensor in tensors
        if tensor.name not in FACTORS
    }


def _translate(name: str, architecture: _Architecture) -> str:
    if name in _GLOBAL_TENSORS:
        return _GLOBAL_TENSORS[name]
    block, _, rest = name.partition(".")
    index, _, part = rest.partition(".")
    if block == "blk" and part in architecture.tensors:
        return f"model.layers.{index}.{architecture.tensors[part]}"
    raise ValueError(f"tensor {name!r}: not supported in a {architecture.model_type} model")


def _to_hf(
    architecture: _Architecture, config: ModelConfig, names: dict[str, GgufTensor]
) -> Iterator[tuple[str, Tensor]]:
    heads = {"q_proj.weight": config.num_heads, "k_proj.weight": config.num_kv_heads}
    for name, tensor in names.items():
        values = tensor.values()
        part = ".".join(name.split(".")[-2:])
        if architecture.is_interleaved and part in heads:
            values = uninterleave(values, heads[part])
        if architecture.norm_offset and "norm" in name:
            values = values - np.float32(architecture.norm_offset)
        yield name, torch.from_numpy(np.array(values, order="C", copy=True))


def uninterleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from pairs (x0 y0 x1 y1 ...) back to halves (x0 x1 ... y0 y1 ...)."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
