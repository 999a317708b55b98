"""Plain values between two processes that do not trust one another, and the talk that carries them.

A value travels as its content, under the name of a built-in type, and is built anew on the other
side: what a subclass says of itself stays behind. Plain are None, bool, int, float, complex, str,
bytes, bytearray, range, Decimal, Fraction, and lists, tuples, sets, frozensets and dicts of these.
Standard library only: it runs inside. Left out: what is not plain, which `other` may name.
Next: tests_side.py and program_side.py, the two ends.
"""

from __future__ import annotations

import builtins
import json
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from nanorl.sandbox.stream_frames import ChannelError, FrameReader, LongFrameError, send_frame

MAX_BYTES = 64 << 20
_MESSAGE = 0  # the one kind of frame here
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_NUMBERS = {"Decimal": "decimal", "Fraction": "fractions"}


def encode(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """A plain value as JSON; anything else as `other` has it. TypeError where it has it not."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return ["int", int.__format__(value, "x")]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", encode(value.real), encode(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        name = "bytes" if isinstance(value, bytes) else "bytearray"
        return [name, bytes.hex(bytes(memoryview(value)))]
    if isinstance(value, range):
        return ["range", *map(encode, (value.start, value.stop, value.step))]
    if isinstance(value, dict):
        pairs = dict.items(value)
        return ["dict", *([encode(key, other), encode(one, other)] for key, one in pairs)]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return [name, *(encode(one, other) for one in kind.__iter__(value))]
    for name, module in _NUMBERS.items():
        if module in sys.modules and isinstance(value, getattr(sys.modules[module], name)):
            return [name, getattr(sys.modules[module], name).__str__(value)]
    if other is not None:
        return other(value)
    raise TypeError(f"a {type(value).__name__} is no plain value")


def decode(data: Any, other: Callable[[str, list[Any]], Any] | None = None) -> Any:
    """The value that was encoded. ValueError, TypeError or the like for anything else."""
    if data is None or isinstance(data, (bool, str)):
        return data
    if not isinstance(data, list) or not data or not isinstance(data[0], str):
        raise ValueError(f"no value: {data!r:.80}")
    name, *rest = data
    if name == "int":
        return int(rest[0], 16)  # in a base that Python does not limit the digits of
    if name == "float":
        return float.fromhex(rest[0])
    if name == "complex":
        return complex(decode(rest[0]), decode(rest[1]))
    if name in ("bytes", "bytearray"):
        content = bytes.fromhex(rest[0])
        return content if name == "bytes" else bytearray(content)
    if name == "range":
        return range(*map(decode, rest))
    if name == "dict":
        return {decode(key, other): decode(one, other) for key, one in rest}
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(one, other) for one in rest)
    if name in _NUMBERS:
        return getattr(__import__(_NUMBERS[name]), name)(rest[0])
    if other is not None:
        return other(name, rest)
    raise ValueError(f"no value: {data!r:.80}")


def is_builtin(value: Any) -> bool:
    """True for a class of Python's own that goes by its name alone, such as `int`."""
    return isinstance(value, type) and vars(builtins).get(value.__name__) is value


class Peer:
    """One end of the talk: asks, and answers what it is asked meanwhile. One thread at a time."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._reader = FrameReader(channel.fileno(), MAX_BYTES)
        self._turn = threading.RLock()

    def ask(self, verb: str, *rest: Any) -> list[Any]:
        """Ask the other end, answer what it asks meanwhile, and return its reply."""
        with self._turn:
            self._send([verb, *rest])
            while (message := self._receive())[0] != "reply":
                self._send(["reply", *self.answer(message[0], message[1:])])
            return message[1:]

    def answer(self, verb: str, rest: list[Any]) -> list[Any]:
        """The reply to an order of the other end."""
        raise NotImplementedError

    def gone(self, why: str) -> NoReturn:
        """The other end has ended, or does not speak this language."""
        raise NotImplementedError

    def _send(self, message: list[Any]) -> None:
        try:
            send_frame(self._channel.fileno(), _MESSAGE, json.dumps(message).encode())
        except OSError:
            self.gone("ended")

    def _receive(self) -> list[Any]:
        try:
            kind, body = self._reader.wait()
        except LongFrameError:
            self.gone(f"says more than {MAX_BYTES >> 20} MiB at once")
        except ChannelError:
            self.gone("ended")
        try:
            message = json.loads(body) if kind == _MESSAGE else None
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, list) or not message or not isinstance(message[0], str):
            self.gone("says what is no message")
        return message
