"""The encoding of protocol buffers, as much of it as the client's messages use, without a library.

A message is a row of fields, each with a number and a wire type: a varint, 8 bytes, 4 bytes, or
bytes with their length. Left out: groups, packed floats, everything that needs a schema.
Source: protobuf.dev, "Encoding".
"""

from __future__ import annotations

import struct

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_U64 = (1 << 64) - 1

Field = int | float | bytes
"""A varint is an int, 8 bytes are a double, 4 bytes a float, the rest is bytes."""


class Fields:
    """The fields of one message, by number. A field that was not sent has its default."""

    def __init__(self, data: bytes) -> None:
        """`ValueError` where `data` is no message."""
        self._values: dict[int, list[Field]] = {}
        at = 0
        while at < len(data):
            tag, at = _read_varint(data, at)
            value, at = _read_value(data, at, tag & 7)
            self._values.setdefault(tag >> 3, []).append(value)

    def has(self, number: int) -> bool:
        return number in self._values

    def integer(self, number: int) -> int:
        value = self._last(number, 0)
        if not isinstance(value, int):
            raise ValueError(f"protobuf field {number}: is not a varint")
        return value - (1 << 64) if value >> 63 else value

    def double(self, number: int) -> float:
        value = self._last(number, 0.0)
        if not isinstance(value, float):
            raise ValueError(f"protobuf field {number}: is not a double")
        return value

    def data(self, number: int) -> bytes:
        return _as_bytes(number, self._last(number, b""))

    def text(self, number: int) -> str:
        return self.data(number).decode()

    def message(self, number: int) -> Fields:
        return Fields(self.data(number))

    def messages(self, number: int) -> list[Fields]:
        return [Fields(_as_bytes(number, value)) for value in self._values.get(number, [])]

    def entries(self, number: int) -> dict[str, Fields]:
        """A map: the message of each entry, whose field 2 is the value, by its key."""
        return {entry.text(1): entry for entry in self.messages(number)}

    def integers(self, number: int) -> list[int]:
        """A repeated integer, packed or not."""
        found: list[int] = []
        for value in self._values.get(number, []):
            if isinstance(value, int):
                found.append(value)
                continue
            packed, at = _as_bytes(number, value), 0
            while at < len(packed):
                one, at = _read_varint(packed, at)
                found.append(one)
        return found

    def _last(self, number: int, default: Field) -> Field:
        values = self._values.get(number)
        return default if values is None else values[-1]


def write_integer(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value & _U64)


def write_double(number: int, value: float) -> bytes:
    return _varint(number << 3 | _FIXED64) + struct.pack("<d", value)


def write_bytes(number: int, value: bytes | str) -> bytes:
    """Bytes, a text, or a message that is already encoded."""
    raw = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _varint(len(raw)) + raw


def write_entry(number: int, key: str, value: bytes) -> bytes:
    """One entry of a map; `value` is its field 2, encoded."""
    return write_bytes(number, write_bytes(1, key) + value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while shift < 70:
        if at >= len(data):
            raise ValueError("protobuf: the message ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & _U64, at
        shift += 7
    raise ValueError("protobuf: a number has more than 10 bytes")


def _read_value(data: bytes, at: int, wire: int) -> tuple[Field, int]:
    if wire == _VARINT:
        return _read_varint(data, at)
    if wire == _BYTES:
        size, at = _read_varint(data, at)
    elif wire in (_FIXED64, _FIXED32):
        size = 8 if wire == _FIXED64 else 4
    else:
        raise ValueError(f"protobuf: wire type {wire} is not known; is this a protobuf message?")
    end = at + size
    if end > len(data):
        raise ValueError("protobuf: the message ends within a field")
    if wire == _BYTES:
        return data[at:end], end
    value: float = struct.unpack_from("<d" if wire == _FIXED64 else "<f", data, at)[0]
    return value, end


def _as_bytes(number: int, value: Field) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"protobuf field {number}: is a number, must be bytes")
    return value
