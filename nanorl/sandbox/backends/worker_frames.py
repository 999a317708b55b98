"""The bytes that the host and the server inside a box exchange over one pipe each way.

    host -> guest    CONFIG (once, JSON), GO (an order and all that it needs), KILL (a run's id),
                     WAKE (to a machine that was restored)
    guest -> host    HELLO (once), OUT and ERR (what the program prints), RESULT (protocol.RESULT)

A frame is its kind, its length and its body. The host believes nothing of a guest: a frame that is
too long, of another kind or of another run breaks the box, and so does a number that cannot be.
Stdlib only, and no imports of ours but protocol.py: this file runs inside as well.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from nanorl.sandbox import protocol

HEADER = struct.Struct("<BI")
CONFIG, GO, KILL, HELLO, OUT, ERR, RESULT, WAKE = range(1, 9)
ENTROPY_BYTES = 64
WAKING = struct.Struct(f"<d{ENTROPY_BYTES}s")  # of WAKE: seconds since 1970, randomness
MOST_BYTES = 1 << 20  # of a frame from the guest
_READ_BYTES = 1 << 16
_LENGTHS = struct.Struct("<QI")  # output limit of each stream, bytes of stdin


class BoxChannelError(Exception):
    """The other side is gone, or speaks another language."""


class JobOrder(NamedTuple):
    """The order that the guest is to carry out: protocol.GO taken apart, and the rest."""

    run_id: bytes
    limit_s: float
    job: int
    argument: int
    max_output_bytes: int
    stdin: bytes
    payload: bytes

    def pack(self) -> bytes:
        go = protocol.GO.pack(self.run_id, self.limit_s, self.job, self.argument)
        lengths = _LENGTHS.pack(self.max_output_bytes, len(self.stdin))
        return b"".join((go, lengths, self.stdin, self.payload))

    @classmethod
    def unpack(cls, body: bytes) -> JobOrder:
        limit, num_stdin = _LENGTHS.unpack_from(body, protocol.GO.size)
        start = protocol.GO.size + _LENGTHS.size
        stdin, payload = body[start : start + num_stdin], body[start + num_stdin :]
        run_id, limit_s, job, argument = protocol.GO.unpack_from(body)
        return cls(run_id, limit_s, job, argument, limit, stdin, payload)


def frame(kind: int, body: bytes = b"") -> bytes:
    return HEADER.pack(kind, len(body)) + body


class FrameReader:
    """Takes frames out of what a descriptor gives. `max_bytes` bounds one frame; 0: no bound."""

    def __init__(self, descriptor: int, max_bytes: int = 0) -> None:
        self.descriptor = descriptor
        self.max_bytes = max_bytes
        self._data = bytearray()

    def fill(self) -> None:
        """Reads once. BoxChannelError at the end."""
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise BoxChannelError(str(error)) from error
        if not data:
            raise BoxChannelError("the other side is gone")
        self._data += data

    def take(self) -> tuple[int, bytes] | None:
        """The next whole frame, if it is here."""
        if len(self._data) < HEADER.size:
            return None
        kind, length = HEADER.unpack_from(self._data)
        if self.max_bytes and length > self.max_bytes:
            raise BoxChannelError(f"a frame of {length} bytes")
        if len(self._data) < HEADER.size + length:
            return None
        body = bytes(self._data[HEADER.size : HEADER.size + length])
        del self._data[: HEADER.size + length]
        return kind, body

    def wait(self) -> tuple[int, bytes]:
        """The next frame; blocks."""
        while (found := self.take()) is None:
            self.fill()
        return found

    @property
    def is_empty(self) -> bool:
        return not self._data
