"""A GGUF file (llama.cpp) of a Llama, Qwen2 or Qwen3 turned into a Hugging Face folder, once.

Weights are dequantised to fp32. Of a Llama llama.cpp stores the rows of the query and key
projections interleaved (its rope rotates neighbours, ours rotates halves); that is undone. The
tokenizer is rebuilt from the vocabulary, merges and pre-tokenizer inside the file.
Left out: other architectures, mixtures of experts, rope scaling, SentencePiece vocabularies, and
writing GGUF. Each is refused by name. Needs the package `gguf`, imported only when a file is
converted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from torch import Tensor

from nanoengine.extras import missing
from nanoengine.model.config import ModelConfig
from nanoengine.model.hf import check_state, hf_views, write_folder
from nanoengine.model.transformer import Transformer

GgufFields = dict[str, Any]

_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_BIASES = {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
_HEAD_NORMS = {f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}
_GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types


@dataclass(frozen=True)
class _Architecture:
    """How llama.cpp keeps a family; its `general.architecture` is our `model_type`."""

    is_interleaved: bool = False
    """The rows of a query or key head come in pairs."""
    more_tensors: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer beside those that every family has."""


_ARCHITECTURES = {
    "llama": _Architecture(is_interleaved=True),
    "qwen2": _Architecture(more_tensors=_BIASES),
    "qwen3": _Architecture(more_tensors=_HEAD_NORMS),
}

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _QWEN_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _words_then_bytes(pattern: str) -> Any:
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _digits_then_bytes() -> Any:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _byte_level()])


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_then_bytes,
    "starcoder": _digits_then_bytes,
    "refact": _digits_then_bytes,
    "qwen2": partial(_words_then_bytes, _QWEN_WORDS),
    "llama-bpe": partial(_words_then_bytes, _LLAMA3_WORDS),
}
_NORMALISED = ("qwen2",)  # texts, to NFC, before they are cut
_WHOLE_WORDS = ("llama-bpe",)  # a word that is a token is one, whatever the merges say


def convert_gguf(file: str | Path, folder: str | Path) -> None:
    """Write `folder` (it must not exist) from a GGUF file: config, fp32 safetensors, tokenizer.

    The folder appears whole or not at all. `ValueError` names what cannot be converted.
    """
    source, target = Path(file), Path(folder)
    if target.exists():
        raise ValueError(f"{target} exists already: remove it or give another folder")
    fields, tensors = _read_gguf(source)
    try:
        config = _config(fields, has_head=any(name == "output.weight" for name, _ in tensors))
        tokenizer = _tokenizer(fields)
        state = dict(_to_hf(config, tensors))
        check_state(hf_views(Transformer(config, device="meta")), state)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / f"{target.name}.tmp-{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        write_folder(scratch, config, state)
        tokenizer.save(str(scratch / "tokenizer.json"))
        _write_json(scratch / "tokenizer_config.json", _tokenizer_config(fields))
        _write_json(scratch / "generation_config.json", _generation_config(fields))
        os.rename(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read_gguf(file: Path) -> tuple[GgufFields, list[tuple[str, Any]]]:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise missing("a GGUF file", "gguf", extra="gguf") from error
    if not file.is_file():
        raise ValueError(f"{file} does not exist: give a .gguf file")
    try:
        reader = GGUFReader(str(file))
    except (ValueError, IndexError, OSError, KeyError) as error:
        raise ValueError(
            f"{file} is truncated or no GGUF file ({error}); fetch it again"
        ) from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, [(tensor.name, tensor) for tensor in reader.tensors]


def _get(fields: GgufFields, name: str) -> Any:
    if name not in fields:
        raise ValueError(f"the field {name} is missing; the file is not a complete model")
    return fields[name]


def _config(fields: GgufFields, *, has_head: bool) -> ModelConfig:
    name = _get(fields, "general.architecture")
    if name not in _ARCHITECTURES:
        supported = ", ".join(repr(known) for known in _ARCHITECTURES)
        raise ValueError(f"general.architecture={name!r}: not supported; supported are {supported}")
    scaling = fields.get(f"{name}.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"{name}.rope.scaling.type={scaling!r}: not supported; use 'none'")
    if fields.get(f"{name}.expert_count", 0):
        raise ValueError(f"{name}.expert_count: mixtures of experts are not supported")
    heads = _get(fields, f"{name}.attention.head_count")
    hidden = _get(fields, f"{name}.embedding_length")
    return ModelConfig.from_hf_dict(
        {
            "model_type": name,
            "vocab_size": len(_get(fields, "tokenizer.ggml.tokens")),
            "hidden_size": hidden,
            "intermediate_size": _get(fields, f"{name}.feed_forward_length"),
            "num_hidden_layers": _get(fields, f"{name}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": fields.get(f"{name}.attention.head_count_kv", heads),
            "head_dim": fields.get(f"{name}.attention.key_length", hidden // max(heads, 1)),
            # stored as fp32; six digits give back the 1e-05 of the original config
            "rms_norm_eps": float(
                f"{_get(fields, f'{name}.attention.layer_norm_rms_epsilon'):.6g}"
            ),
            "rope_theta": float(fields.get(f"{name}.rope.freq_base", 10000.0)),
            "tie_word_embeddings": not has_head,
            "max_position_embeddings": _get(fields, f"{name}.context_length"),
            "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        }
    )


def _to_hf(config: ModelConfig, tensors: list[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    from gguf.quants import dequantize

    num_heads = {}
    if _ARCHITECTURES[config.model_type].is_interleaved:
        num_heads = {"attn_q.weight": config.num_heads, "attn_k.weight": config.num_kv_heads}
    for name, tensor in tensors:
        hf_name, part = _translate(name, config.model_type)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if part in num_heads:
            values = uninterleave(values, num_heads[part])
        yield hf_name, torch.from_numpy(np.array(values, order="C", copy=True))


def _translate(name: str, architecture: str) -> tuple[str, str]:
    """The name in Hugging Face's model, and what it is in a layer, or ""."""
    if name in _GLOBAL_TENSORS:
        return _GLOBAL_TENSORS[name], ""
    block, _, rest = name.partition(".")
    index, _, part = rest.partition(".")
    known = {**_LAYER_TENSORS, **_ARCHITECTURES[architecture].more_tensors}
    if block == "blk" and part in known:
        return f"model.layers.{index}.{known[part]}", part
    raise ValueError(f"tensor {name!r}: not supported in a {architecture} model")


def uninterleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from pairs (x0 y0 x1 y1 ...) back to halves (x0 x1 ... y0 y1 ...)."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(fields: GgufFields) -> Tokenizer:
    kind = _get(fields, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(f"tokenizer.ggml.model={kind!r}: not supported; use 'gpt2' (byte BPE)")
    pre = fields.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre={pre!r}: not supported; supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    tokens = _get(fields, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _get(fields, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS)
    tokenizer = Tokenizer(model)
    if pre in _NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    for token_type, add in (
        (_CONTROL, tokenizer.add_special_tokens),
        (_USER_DEFINED, tokenizer.add_tokens),
    ):
        add(
            [
                AddedToken(token, special=token_type == _CONTROL, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind == token_type
            ]
        )
    return tokenizer


def _tokenizer_config(fields: GgufFields) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields[f"{fields['general.architecture']}.context_length"],
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None:
            config[f"{ours}_token"] = tokens[index]
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config


def _generation_config(fields: GgufFields) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {ours: fields.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}
    return {f"{name}_token_id": index for name, index in ids.items() if index is not None}


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
