"""The rope of a GGUF file as the fields of a config.json.

llama.cpp divides the frequency of each pair by a factor of a tensor, where the file has one. Llama
3.1 to 3.3 keep so what their config.json says in four numbers, which are found again; factors that
are not theirs are kept as they are, as a LongRoPE that never lengthens. Phi's two lists are its
LongRoPE. `linear` and `yarn` are fields.
Left out: other scalings, and any further field of one. They are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nanoengine.architectures.rope import Llama3Rope
from nanoengine.formats.gguf_file import GgufFields, GgufTensor
from nanoengine.model.rope_tables import plain_frequencies

_FREQS, _LONG, _SHORT = (
    f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
)
FACTORS = frozenset((_FREQS, _LONG, _SHORT))
"""Tensors that are no weights: they belong to the rope."""
_ORIGINALS = (8192, 1024, 2048, 4096, 16384, 32768, 65536, 131072)
"""The lengths that a model with Llama 3's rope may have been trained on; 8192 is Llama's."""
_CLOSE = 1e-5  # of fp32 arithmetic in another order
_KNOWN = {
    "type",
    "factor",
    "finetuned",
    "original_context_length",
    "attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
}
_THETA = 10000.0  # where a file does not say; of Gemma 3's layers with a window too


def read_rope(
    fields: GgufFields, shape: Mapping[str, Any], factors: Mapping[str, GgufTensor]
) -> dict[str, Any]:
    """The fields of config.json about the rope, from those about the shape of the model."""
    name = fields.need("general.architecture", str)
    width = fields.get(f"{name}.rope.dimension_count", int) or shape["head_dim"]
    if not 1 <= width <= shape["head_dim"]:
        raise ValueError(
            f"{name}.rope.dimension_count={width}: must be from 1 to {shape['head_dim']}, the head"
        )
    theta = fields.positive(f"{name}.rope.freq_base") or _THETA
    rope = _scaling(fields, name, theta, width, shape, factors) | {"rope_theta": theta}
    if name == "gemma3":
        local = fields.positive("gemma3.rope.freq_base_swa") or _THETA
        near = {"rope_type": "default", "rope_theta": local}
        rope = {"full_attention": rope, "sliding_attention": near}
    found: dict[str, Any] = {"rope_parameters": rope}
    if name == "phi3":
        rope["partial_rotary_factor"] = width / shape["head_dim"]
        if rope["rope_type"] == "longrope":
            length = rope["original_max_position_embeddings"]
            found["original_max_position_embeddings"] = length
    elif width != shape["head_dim"]:
        raise ValueError(
            f"{name}.rope.dimension_count={width}: must be {shape['head_dim']}, the whole head"
        )
    return found


def _scaling(
    fields: GgufFields,
    name: str,
    theta: float,
    width: int,
    shape: Mapping[str, Any],
    factors: Mapping[str, GgufTensor],
) -> dict[str, Any]:
    prefix = f"{name}.rope.scaling."
    for field in fields.names():
        if field.startswith(prefix) and field.removeprefix(prefix) not in _KNOWN:
            raise ValueError(f"{field}: not supported; supported is a file without")
    kind = fields.get(f"{prefix}type", str)
    if factors and kind not in (None, "none", "longrope"):
        raise ValueError(f"{prefix}type={kind!r}: not supported beside {', '.join(factors)}")
    lists = {one: _factors(tensor, width) for one, tensor in factors.items()}
    if lists.keys() == {_LONG, _SHORT} and name == "phi3":
        return _longrope(fields, prefix, lists)
    if lists.keys() == {_FREQS}:
        return _divided(lists[_FREQS], theta, width, shape["max_position_embeddings"])
    if lists:
        raise ValueError(f"tensors {', '.join(lists)}: not supported in a {name} model")
    factor = fields.positive(f"{prefix}factor") or fields.positive(f"{name}.rope.scale_linear")
    if kind == "yarn":
        return _yarn(fields, prefix, factor, shape["max_position_embeddings"])
    if kind not in (None, "none", "linear"):
        raise ValueError(
            f"{prefix}type={kind!r}: not supported; supported are 'none', 'linear', 'yarn'"
        )
    if kind == "none" or factor in (None, 1.0):
        return {"rope_type": "default"}
    return {"rope_type": "linear", "factor": factor}


def _factors(tensor: GgufTensor, width: int) -> Tensor:
    values = torch.tensor(tensor.values())
    if values.shape != (width // 2,) or not (values.isfinite() & (values > 0)).all():
        raise ValueError(
            f"tensor {tensor.name!r}: must be {width // 2} positive numbers, one for each pair "
            "that rotates"
        )
    return values


def _divided(factors: Tensor, theta: float, width: int, longest: int) -> dict[str, Any]:
    plain = plain_frequencies(theta, width)
    for original in _ORIGINALS:
        rope = Llama3Rope(
            factor=float(f"{factors.max():.6g}"),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=original,
        )
        if torch.allclose(plain / rope.frequencies(theta, width), factors, rtol=_CLOSE, atol=0):
            return {"rope_type": "llama3", **vars(rope)}
    return {
        "rope_type": "longrope",
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
        "attention_factor": 1.0,
        "original_max_position_embeddings": longest,
    }


def _longrope(fields: GgufFields, prefix: str, lists: Mapping[str, Tensor]) -> dict[str, Any]:
    rope = {
        "rope_type": "longrope",
        "short_factor": lists[_SHORT].tolist(),
        "long_factor": lists[_LONG].tolist(),
        "original_max_position_embeddings": fields.need(f"{prefix}original_context_length", int),
    }
    length = fields.positive(f"{prefix}attn_factor")
    return rope if length is None else rope | {"attention_factor": length}


def _yarn(fields: GgufFields, prefix: str, factor: float | None, longest: int) -> dict[str, Any]:
    if factor is None:
        raise ValueError(f"the field {prefix}factor is missing; the file is not a complete model")
    if fields.get(f"{prefix}attn_factor", float) not in (None, 1.0):
        raise ValueError(f"{prefix}attn_factor: not supported with yarn; supported is 1")
    original = fields.positive(f"{prefix}original_context_length")
    rope: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": longest if original is None else int(original),
    }
    for name in ("beta_fast", "beta_slow"):
        value = fields.positive(f"{prefix}yarn_{name}")
        if value is not None:
            rope[name] = value
    return rope
