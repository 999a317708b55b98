"""Rotary frequencies: the scalings that config.json can ask for, each a record of its fields.

A rope turns pair i of a head by position · frequency[i]; a scaling changes the frequencies so that
more positions fit than the model was first trained on. `read_scaling` and `write_scaling` translate
the fields of `rope_parameters`, whose names the records keep.

Two of them change with the length of the sequence, so the keys that a cache holds would be wrong
once it grows, and the tokens of a rollout would be trained under another rope than they were
sampled under; both are exact here up to the length from which they change, and that is the longest
context of such a model, which `limit_of` says: `dynamic` (`max_position_embeddings`) and `longrope`
(`original_max_position_embeddings`), unless its two lists of factors are one. `yarn` and `linear`
lengthen the context (`lengthened`).
Source: the rope utilities of transformers, whose arithmetic in fp32 this follows; how far a rope
reaches is vLLM's `_get_and_verify_max_len`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from nanoengine.model.config import RopeScaling
from nanoengine.model.rope_tables import plain_frequencies


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).float() / dim


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's frequency scaling: low frequencies divided by `factor`, a ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @property
    def magnitude(self) -> float:
        return 1.0

    def frequencies(self, theta: float, dim: int) -> Tensor:
        """Meta's llama-models `apply_scaling`, in wavelengths."""
        frequencies = plain_frequencies(theta, dim)
        wavelengths = 2 * math.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        ramp = (self.original_max_position_embeddings / wavelengths - low) / (high - low)
        ramp = ramp.clamp(0.0, 1.0)
        scaled = (1 - ramp) * frequencies / self.factor + ramp * frequencies
        scaled = torch.where(ramp <= 0, frequencies / self.factor, scaled)
        return torch.where(ramp >= 1, frequencies, scaled)


@dataclass(frozen=True, kw_only=True)
class LinearRope:
    """All frequencies divided by `factor`. `max_position_embeddings` is the length before it."""

    factor: float
    max_position_embeddings: int

    @property
    def magnitude(self) -> float:
        return 1.0

    def frequencies(self, theta: float, dim: int) -> Tensor:
        return plain_frequencies(theta, dim) / self.factor


@dataclass(frozen=True, kw_only=True)
class DynamicRope:
    """The base grows with sequences longer than `max_position_embeddings`; here there are none, so
    the frequencies are the plain ones and `factor` is only kept."""

    factor: float

    @property
    def magnitude(self) -> float:
        return 1.0

    def frequencies(self, theta: float, dim: int) -> Tensor:
        return plain_frequencies(theta, dim)


@dataclass(frozen=True, kw_only=True)
class YarnRope:
    """YaRN (arXiv 2309.00071): low frequencies divided by `factor`, high ones kept, a ramp over the
    pairs in between, and longer queries and keys."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._length(self.mscale) / self._length(self.mscale_all_dim)
        return self._length(1.0)

    def _length(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    def frequencies(self, theta: float, dim: int) -> Tensor:
        low = self._pair_that_turns(self.beta_fast or 32, theta, dim)
        high = self._pair_that_turns(self.beta_slow or 1, theta, dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high += 0.001 if low == high else 0.0  # prevents a division by zero
        kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        wavelengths = theta ** _exponents(dim)
        stretched = 1.0 / (self.factor * wavelengths)
        mixed: Tensor = stretched * (1 - kept) + (1.0 / wavelengths) * kept
        return mixed

    def _pair_that_turns(self, times: float, theta: float, dim: int) -> float:
        """The pair that turns so often in the original length, a fraction of one included."""
        length = self.original_max_position_embeddings
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """LongRoPE (arXiv 2402.13753): each frequency divided by a factor of its own, one list for
    sequences of up to `original_max_position_embeddings` tokens, another for longer ones, up to
    `max_position_embeddings`. Where the lists differ there are none of those here, and
    `long_factor` is only kept."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings
        factor = self.max_position_embeddings / original if self.factor is None else self.factor
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))

    def frequencies(self, theta: float, dim: int) -> Tensor:
        if len(self.short_factor) != dim // 2:
            raise ValueError(
                f"rope_parameters: short_factor has {len(self.short_factor)} numbers, must have "
                f"one for each of the {dim // 2} pairs that rotate"
            )
        frequencies: Tensor = 1.0 / (torch.tensor(self.short_factor) * theta ** _exponents(dim))
        return frequencies


def lengthened(scaling: RopeScaling | None, longest: int, *, is_plain: bool) -> int:
    """The longest context of a model whose config.json says `longest`. `is_plain` where that is
    said before the rope is scaled, as it is but in Gemma 3."""
    if isinstance(scaling, YarnRope):
        return max(longest, int(scaling.original_max_position_embeddings * scaling.factor))
    if isinstance(scaling, LinearRope) and is_plain:
        return max(longest, int(longest * scaling.factor))
    if isinstance(scaling, LongRope) and scaling.short_factor != scaling.long_factor:
        return min(longest, scaling.original_max_position_embeddings)
    return longest


def limit_of(scaling: RopeScaling | None, longest: int) -> str | None:
    """One line about a context that the rope does not let grow to where others serve it."""
    if isinstance(scaling, DynamicRope) and scaling.factor > 1:
        return (
            f"max_position_embeddings={longest} is the longest context: from there on a dynamic "
            "rope changes with the length of a sequence, which no cache of keys can follow; yarn "
            "reaches further"
        )
    if not isinstance(scaling, LongRope) or longest >= scaling.max_position_embeddings:
        return None
    return (
        f"original_max_position_embeddings={longest} is the longest context, not "
        f"max_position_embeddings={scaling.max_position_embeddings}: from there on longrope takes "
        "long_factor for all of a sequence, which no cache of keys can follow; for longer ones "
        "write the numbers of long_factor into short_factor, too"
    )


_WITH_ORIGINAL = ("yarn", "longrope", "llama3")
_SCALINGS: dict[str, type] = {
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "yarn": YarnRope,
    "longrope": LongRope,
    "llama3": Llama3Rope,
}


def read_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    """The record of what `rope_parameters` (or `rope_scaling`) says; None for plain frequencies.
    `max_position_embeddings` stands for an original length that is not given, and says a factor of
    YaRN that is not. `ValueError` names a type that is not supported, or a field that is missing.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    kind = "longrope" if kind == "su" else kind  # its name before it was published
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ValueError(
            f"rope_type={kind!r}: not supported; supported are 'default', "
            f"{', '.join(map(repr, _SCALINGS))}"
        )
    longest, original = rope.get("max_position_embeddings"), "original_max_position_embeddings"
    if kind in _WITH_ORIGINAL and rope.get(original) is not None:
        _check_number(original, rope[original])
    elif kind in _WITH_ORIGINAL and longest is not None:
        rope = {**rope, original: longest}
    if kind == "yarn" and rope.get("factor") is None and rope.get(original, longest) != longest:
        rope = {**rope, "factor": longest / rope[original]}
    values = {}
    for each in fields(_SCALINGS[kind]):
        value = rope.get(each.name)
        if value is not None:
            _check_number(each.name, value)
            values[each.name] = tuple(value) if isinstance(value, list) else value
        elif each.default is MISSING:
            raise ValueError(
                f"rope_parameters: rope_type {kind!r} needs {each.name}; add it to config.json"
            )
    scaling: RopeScaling = _SCALINGS[kind](**values)
    return scaling


def _check_number(name: str, value: Any) -> None:
    """`ValueError` for a field, or an entry of a list, that nothing can be multiplied by."""
    for one in value if isinstance(value, list) else [value]:
        is_number = isinstance(one, int | float) and math.isfinite(one) and one >= 0
        if not is_number or (name in ("factor", "original_max_position_embeddings") and one <= 0):
            raise ValueError(
                f"rope_parameters: {name}={one!r}: must be a positive number; mend config.json"
            )


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    """The fields that `read_scaling` reads the same record from."""
    if scaling is None:
        return {"rope_type": "default"}
    kind = next(name for name, record in _SCALINGS.items() if isinstance(scaling, record))
    values = {name: value for name, value in vars(scaling).items() if value is not None}
    values.pop("max_position_embeddings", None)  # config.json has it elsewhere
    return {"rope_type": kind} | {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }
