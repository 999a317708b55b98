"""A GGUF file (llama.cpp's container): its fields and its tensors, read within the file's bounds.

The header is walked here and not by the reader of the package `gguf`, which believes every count
that a file states and then allocates without end. What a file can make us hold grows with its size
and with nothing that is written in it. The package has the sizes of the quantised types, and turns
their blocks into numbers.
Left out: writing, big-endian files, version 1, arrays of arrays. They are refused.
Next: gguf.py (a model from such a file), gguf_tokenizer.py (its tokenizer).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nanoengine.extras import missing

T = TypeVar("T", int, float, str, bool, list[str], np.ndarray)

_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4  # llama.cpp's
_SCALARS = {  # by the number of the type, as `struct` and numpy name it
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_NUMPY = {"<B": "u1", "<b": "i1", "<H": "<u2", "<h": "<i2", "<I": "<u4", "<i": "<i4", "<f": "<f4"}
_NUMPY |= {"<?": "?", "<Q": "<u8", "<q": "<i8", "<d": "<f8"}


class GgufFields:
    """The named values of a file. A value of another type than asked for is refused by name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, name: str, kind: type[T]) -> T | None:
        """The value, or None where the file has no such field."""
        value = self._values.get(name)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{name}={_short(value)}: must be {_KINDS[kind]}")
        return value

    def need(self, name: str, kind: type[T]) -> T:
        """The value of a field that every complete file has."""
        value = self.get(name, kind)
        if value is None:
            raise ValueError(f"the field {name} is missing; the file is not a complete model")
        return value

    def positive(self, name: str) -> float | None:
        """A number that something is divided by or raised to a power, or None."""
        value = self.get(name, float)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value:g}: must be a number above 0")
        return value

    def names(self) -> list[str]:
        return list(self._values)


_KINDS = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list of texts",
    np.ndarray: "a list of numbers",
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as it lies in the file. `shape` has the rows first, as in torch."""

    name: str
    kind: Any
    shape: tuple[int, ...]
    blocks: np.ndarray

    def values(self) -> np.ndarray:
        """The numbers in fp32: a view of the file, or a copy where they are quantised."""
        from gguf.quants import dequantize  # here: an extra

        try:
            found = dequantize(self.blocks, self.kind)
        except NotImplementedError as error:
            raise ValueError(
                f"tensor {self.name!r}: its type {self.kind.name} is not supported; quantise the "
                "model anew, as Q4_K_M for example"
            ) from error
        return found.astype(np.float32, copy=False).reshape(self.shape)


def read_gguf(file: Path) -> tuple[GgufFields, list[GgufTensor]]:
    """The fields and tensors of a file. Tensors are read when their `values` are asked for."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise missing("a GGUF file", "gguf", extra="gguf") from error
    if not file.is_file():
        raise ValueError(f"{file} does not exist: give a .gguf file")
    try:
        data = np.memmap(file, mode="r")
        return _read(data)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{file} is truncated or no GGUF file ({error}); fetch it again"
        ) from error


class _Cursor:
    """A place in the bytes of a file; nothing is taken from behind their end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.place = 0

    def take(self, size: int) -> memoryview:
        if size > len(self._data) - self.place:
            raise ValueError(f"{size} bytes were to follow byte {self.place}")
        self.place += size
        return self._data[self.place - size : self.place]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return str(self.take(self.number("<Q")), encoding="utf-8")

    def value(self) -> Any:
        kind = self.number("<I")
        if kind == _ARRAY:
            return self._array()
        if kind == _STRING:
            return self.text()
        return self.number(_form(kind))

    def _array(self) -> list[str] | np.ndarray:
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        form = _form(kind)
        return np.frombuffer(self.take(struct.calcsize(form) * count), dtype=_NUMPY[form])


def _form(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a field of type {kind}")
    return _SCALARS[kind]


def _read(data: np.ndarray) -> tuple[GgufFields, list[GgufTensor]]:
    cursor = _Cursor(data.data)
    if bytes(cursor.take(4)) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("<I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}; 2 and 3 are read")
    num_tensors, num_fields = cursor.number("<Q"), cursor.number("<Q")
    values: dict[str, Any] = {}
    for _ in range(num_fields):
        name = cursor.text()
        if name in values:
            raise ValueError(f"the field {name!r} is given twice")
        values[name] = cursor.value()
    fields = GgufFields(values)
    heads = [_tensor_head(cursor) for _ in range(num_tensors)]
    start = _aligned(cursor.place, fields.get("general.alignment", int))
    tensors = {name: _tensor(data, name, rest, start) for name, *rest in heads}
    if len(tensors) != len(heads):
        raise ValueError("a tensor is given twice")
    return fields, list(tensors.values())


def _aligned(place: int, alignment: int | None) -> int:
    step = 32 if alignment is None else alignment
    if step < 1:
        raise ValueError(f"general.alignment={alignment}")
    return -(-place // step) * step


def _tensor_head(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.text(), cursor.number("<I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
    shape = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions))
    return name, shape[::-1], cursor.number("<I"), cursor.number("<Q")


def _tensor(data: np.ndarray, name: str, rest: list[Any], start: int) -> GgufTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # here: an extra

    shape, number, offset = rest
    kind = GGMLQuantizationType(number)
    block, size = GGML_QUANT_SIZES[kind]
    width, part = divmod(shape[-1] * size, block)
    num_bytes = math.prod(shape[:-1]) * width
    if part or not num_bytes:
        raise ValueError(f"tensor {name!r} has the shape {shape}")
    first = start + offset
    if first + num_bytes > len(data):
        raise ValueError(f"tensor {name!r} ends behind the file")
    blocks = data[first : first + num_bytes].reshape(*shape[:-1], width)
    return GgufTensor(name, kind, shape, blocks)


def _short(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list | np.ndarray) else repr(value)[:40]
