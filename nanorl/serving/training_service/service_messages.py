"""The client's messages in protobuf: what it asks forward_backward for, and what it is answered.

Field numbers are those of the client's `tinker_public.proto`. Tensors are little-endian bytes;
answers are fp32 and int32, log-probs in nats.
Left out: images, audio, and where tokens come from (`ProvenanceSpan`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nanoinfer.params import Output
from nanorl.serving.training_service.protobuf import (
    Fields,
    write_bytes,
    write_double,
    write_entry,
    write_integer,
)

_FLOAT32, _INT64 = 1, 2
_DTYPES: dict[int, np.dtype] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}
_STOP, _LENGTH = 0, 1
_NO_LOGP = -99999.0

TopLogps = list[list[tuple[int, float]]]


@dataclass(frozen=True, kw_only=True)
class Datum:
    """A sequence and what a loss reads of each of its positions, one number a position.

    Datum(tokens=[5, 6], inputs={"target_tokens": array([6, 8]), "weights": array([0., 1.])})
    """

    tokens: list[int]
    inputs: dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """One request: the data, the loss and its options. `forward_only` leaves the gradient alone."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


def read_forward_backward(raw: bytes) -> ForwardBackward:
    """`ValueError` says what is wrong with the message."""
    try:
        message = Fields(raw)
        numbers = {key: one.double(2) for key, one in message.entries(5).items()}
        config: dict[str, float | str] = dict(numbers)
        for key, entry in message.entries(7).items():
            value = entry.message(2)
            config[key] = value.text(2) if value.has(2) else value.double(1)
        return ForwardBackward(
            model_id=message.text(1),
            seq_id=message.integer(2),
            data=[_read_datum(i, one) for i, one in enumerate(message.messages(3))],
            loss_fn=message.text(4),
            loss_fn_config=config,
            forward_only=bool(message.integer(6)),
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"protobuf: a text is not UTF-8 ({error})") from None


def read_address(raw: bytes) -> tuple[str, int]:
    """(model, number) of a request whose rest may be wrong. `ValueError` if they cannot be read."""
    message = Fields(raw)
    return message.text(1), message.integer(2)


def _read_datum(i: int, message: Fields) -> Datum:
    tokens: list[int] = []
    for chunk in message.messages(1):
        if not chunk.has(1):
            raise ValueError(
                f"data[{i}].model_input: images and audio are not supported; send text"
            )
        tokens += _array(chunk.message(1).data(1), np.dtype("<i4"), "model_input").tolist()
    inputs = {
        name: _read_tensor(f"data[{i}].loss_fn_inputs[{name!r}]", entry.message(2))
        for name, entry in message.entries(2).items()
    }
    return Datum(tokens=tokens, inputs=inputs)


def _read_tensor(name: str, message: Fields) -> np.ndarray:
    """A tensor of one number a position, whatever shape it was sent in."""
    dtype: np.dtype | None = _DTYPES.get(message.integer(3))
    if dtype is None:
        raise ValueError(f"{name}: dtype {message.integer(3)}; must be float32 or int64")
    shape = message.integers(4)
    if message.has(2):
        raise ValueError(f"{name}: is sparse, with several targets a position; send one a position")
    values = _array(message.data(1), dtype, name)
    if shape and (shape[0] != len(values) or any(size != 1 for size in shape[1:])):
        raise ValueError(
            f"{name}: shape {tuple(shape)} of {len(values)} values; must be [N], one a position "
            "(several targets a position are not supported)"
        )
    return values


def _array(raw: bytes, dtype: np.dtype, name: str) -> np.ndarray:
    if len(raw) % dtype.itemsize:
        raise ValueError(f"{name}: {len(raw)} bytes are no whole number of {dtype.name} values")
    return np.frombuffer(raw, dtype)


def write_forward_backward(logps: Sequence[Sequence[float]], metrics: Mapping[str, float]) -> bytes:
    """The answer: a log-prob for each target of each datum, and the metrics."""
    arrays = [np.asarray(values, "<f4") for values in logps]
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
    tensor = (
        write_bytes(1, b"".join(array.tobytes() for array in arrays))
        + write_bytes(2, offsets.tobytes())
        + write_integer(3, _FLOAT32)
    )
    record = (
        write_bytes(1, "ArrayRecord")
        + write_entry(2, "logprobs", write_bytes(2, tensor))
        + write_integer(3, len(arrays))
    )
    named = [write_entry(3, name, write_double(2, value)) for name, value in metrics.items()]
    return write_bytes(1, "ArrayRecord") + write_bytes(2, record) + b"".join(named)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The options of a sample request beside tokens and their log-probs."""

    prompt_logps: bool = False
    last_n: int | None = None
    """Log-probs of so many of the prompt's last tokens; None: of all but the first."""
    top_prompt: int = 0
    top_sample: int = 0


def write_samples(num_prompt: int, outputs: Sequence[Output], options: SampleOptions) -> bytes:
    """The answer to a sample request. NaN stands where a prompt token was not scored."""
    parts = [write_bytes(1, _write_sequence(output, options.top_sample)) for output in outputs]
    first = outputs[0]
    skipped = 1 if options.last_n is None else num_prompt - options.last_n
    if options.prompt_logps:
        logps = np.array([np.nan, *first.prompt_logps], "<f4")
        logps[:skipped] = np.nan
        parts.append(write_bytes(2, logps.tobytes()))
    if options.top_prompt:
        rows: TopLogps = [[], *first.prompt_top_logps]
        rows[:skipped] = [[]] * skipped
        parts.append(write_bytes(3, _write_top(rows, options.top_prompt)))
    parts.append(write_integer(4, first.num_cached_tokens))
    return b"".join(parts)


def _write_sequence(output: Output, num_top: int) -> bytes:
    stop = _LENGTH if output.finish_reason == "length" else _STOP
    written = (
        write_integer(1, stop)
        + write_bytes(2, np.array(output.ids, "<i4").tobytes())
        + write_bytes(3, np.array(output.logps, "<f4").tobytes())
    )
    if num_top:
        written += write_bytes(4, _write_top(output.top_logps, num_top))
    return written


def _write_top(rows: TopLogps, k: int) -> bytes:
    """Two dense [rows, k] matrices; the client knows a place without a token by its log-prob."""
    ids, logps = np.zeros((len(rows), k), "<i4"), np.full((len(rows), k), _NO_LOGP, "<f4")
    for i, row in enumerate(rows):
        for j, (token, logp) in enumerate(row[:k]):
            ids[i, j], logps[i, j] = token, logp
    return (
        write_bytes(1, ids.tobytes())
        + write_bytes(2, logps.tobytes())
        + write_integer(3, k)
        + write_integer(4, len(rows))
    )
