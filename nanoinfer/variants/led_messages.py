"""What the leader of a tensor-parallel engine tells its followers, as JSON and nothing else.

    call = AddCall([1, 2], SamplingParams(temperature=0.7, seed=3))
    decode(encode(call)) == call

What arrives becomes one of the kinds below, each field checked, or a `ValueError`: no bytes of the
other end are ever run, as those of a pickle would be. Python writes a float so that reading it
gives the same bits, so a follower computes with the leader's very numbers.

Left out: tensors, which follow their message as they are (led_engine.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

import torch

from nanoengine.spans import ImageSpan
from nanoinfer.options.outputs import output_from_json
from nanoinfer.params import Grammar, Output, SamplingParams

PlainName = Literal["step", "pause", "resume", "sleep", "wake"]
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


class AddCall(NamedTuple):
    """`LLMEngine.add` on every rank."""

    ids: list[int]
    params: SamplingParams
    priority: int = 0
    sampled: Output | None = None


class AbortCall(NamedTuple):
    """`LLMEngine.abort` on every rank."""

    handle: int


class PlainCall(NamedTuple):
    """A method without arguments on every rank: `PlainCall("step")`."""

    method: PlainName


class WeightsCall(NamedTuple):
    """`LLMEngine.update_weights` on every rank; the tensors follow one by one."""

    version: int


class TensorHeader(NamedTuple):
    """A tensor of new weights, whose bytes follow: `TensorHeader("norm.weight", (48,), bf16)`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorsEnd(NamedTuple):
    """The end of new weights, with what went wrong if they are not all."""

    error: str = ""


class LeaderHeartbeat(NamedTuple):
    """The leader lives."""


class LeaderShutdown(NamedTuple):
    """The leader needs its followers no more."""


LedMessage = (
    AddCall
    | AbortCall
    | PlainCall
    | WeightsCall
    | TensorHeader
    | TensorsEnd
    | LeaderHeartbeat
    | LeaderShutdown
)


def encode(message: LedMessage) -> bytes:
    """`ValueError` for what JSON has no word for."""
    kind = type(message).__name__
    fields: list[Any] = list(message)
    if isinstance(message, AddCall):
        bias = list(message.params.logit_bias.items())
        params = _fields(message.params) | {"logit_bias": bias}
        sampled = None if message.sampled is None else _fields(message.sampled)
        fields = [message.ids, params, message.priority, sampled]
    elif isinstance(message, TensorHeader):
        fields[2] = str(message.dtype).removeprefix("torch.")
    try:
        return _JSON.encode([kind, *fields]).encode()
    except TypeError as error:
        raise ValueError(f"a request that cannot be told to the other ranks: {error}") from error


def decode(raw: bytes) -> LedMessage:
    """`ValueError` for everything that `encode` did not write."""
    try:
        kind, *fields = json.loads(raw)
        return _DECODERS[kind](*fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no message of a leader: {type(error).__name__}: {error}") from error


def _fields(record: Any) -> dict[str, Any]:
    """The fields of a dataclass, without a deep copy: they are only read."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _plain(value: Any) -> Any:
    """Turn a value that JSON does not know by itself, a grammar, a picture's place or a number of
    numpy's, into one that it does. TypeError for any other."""
    if isinstance(value, Grammar | ImageSpan):
        return _fields(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def _add(ids: Any, params: Any, priority: Any, sampled: Any) -> AddCall:
    output = None if sampled is None else output_from_json(_record(sampled))
    return AddCall(_integers(ids), _params(_record(params)), _integer(priority), output)


def _params(given: Mapping[str, Any]) -> SamplingParams:
    """Its own checks do the rest."""
    fields = dict(given)
    fields["logit_bias"] = {_integer(token): _number(bias) for token, bias in given["logit_bias"]}
    fields["stop"] = tuple(_text(text) for text in given["stop"])
    fields["images"] = tuple(ImageSpan.from_json(_record(one)) for one in given["images"])
    fields["stop_token_ids"] = tuple(_integers(given["stop_token_ids"]))
    if given["allowed_token_ids"] is not None:
        fields["allowed_token_ids"] = tuple(_integers(given["allowed_token_ids"]))
    if given["grammar"] is not None:
        grammar = dict(_record(given["grammar"]))
        choices = tuple(_text(text) for text in grammar.pop("choices"))
        fields["grammar"] = Grammar(**grammar, choices=choices)
    return SamplingParams(**fields)


def _plain_call(method: Any) -> PlainCall:
    if method not in get_args(PlainName):
        raise ValueError(f"method={method!r}: must be one of {', '.join(get_args(PlainName))}")
    return PlainCall(method)


def _tensor_header(name: Any, shape: Any, dtype: Any) -> TensorHeader:
    sizes = tuple(_integers(shape))
    if min(sizes, default=0) < 0:
        raise ValueError(f"shape={shape!r}: no size is negative")
    return TensorHeader(_text(name), sizes, _DTYPES[_text(dtype)])


def _record(value: Any) -> dict[str, Any]:
    return _checked(value, dict)


def _text(value: Any) -> str:
    return _checked(value, str)


def _number(value: Any) -> float:
    return _integer(value) if isinstance(value, int) else _checked(value, float)


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{value!r} where a number was expected")
    return _checked(value, int)


def _integers(values: Any) -> list[int]:
    """Fast, because a prompt has thousands."""
    if set(map(type, _checked(values, list))) - {int}:
        raise ValueError("a list of integers has something else in it")
    return list(values)


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} where {kind.__name__} was expected")
    return value


_JSON = json.JSONEncoder(default=_plain, separators=(",", ":"))
_DECODERS: dict[str, Callable[..., LedMessage]] = {
    "AddCall": _add,
    "AbortCall": lambda handle: AbortCall(_integer(handle)),
    "PlainCall": _plain_call,
    "WeightsCall": lambda version: WeightsCall(_integer(version)),
    "TensorHeader": _tensor_header,
    "TensorsEnd": lambda error: TensorsEnd(_text(error)),
    "LeaderHeartbeat": LeaderHeartbeat,
    "LeaderShutdown": LeaderShutdown,
}
