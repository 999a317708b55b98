"""Frames over a stream of bytes: a kind, a length, a body. The one framing of the sandboxes.

    send_frame(descriptor, kind, body)
    kind, body = FrameReader(descriptor, max_bytes=1 << 20).wait()

Neither side believes the other: a reader refuses a frame that is longer than its limit when the
header is there, before any of the body is.
Stdlib only, Python >= 3.8, and no imports of ours: this file runs inside as well. Left out: what
the kinds and bodies mean (backends/worker_frames.py, plain.py), and packets, which keep their
bounds and carry descriptors (protocol.py).
"""

from __future__ import annotations

import os
import struct

_HEADER = struct.Struct("<BI")
_READ_BYTES = 1 << 16


class ChannelError(Exception):
    """The other side is gone, or speaks another language."""


class LongFrameError(ChannelError):
    """The other side announced more bytes than a frame may have."""


def frame(kind: int, body: bytes = b"") -> bytes:
    return _HEADER.pack(kind, len(body)) + body


def send_frame(descriptor: int, kind: int, body: bytes = b"") -> None:
    write_all(descriptor, frame(kind, body))


def write_all(descriptor: int, data: bytes) -> None:
    """Writes to a descriptor that blocks until nothing is left. May raise OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class FrameReader:
    """Takes frames out of what a descriptor gives. `max_bytes` bounds one frame; 0: no bound."""

    def __init__(self, descriptor: int, max_bytes: int = 0) -> None:
        self.descriptor = descriptor
        self.max_bytes = max_bytes
        self._data = bytearray()

    def fill(self) -> None:
        """Reads once. ChannelError at the end."""
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelError(str(error)) from error
        if not data:
            raise ChannelError("the other side is gone")
        self._data += data

    def take(self) -> tuple[int, bytes] | None:
        """The next whole frame, if it is here."""
        if len(self._data) < _HEADER.size:
            return None
        kind, length = _HEADER.unpack_from(self._data)
        if self.max_bytes and length > self.max_bytes:
            raise LongFrameError(f"a frame of {length} bytes")
        end = _HEADER.size + length
        if len(self._data) < end:
            return None
        body = bytes(memoryview(self._data)[_HEADER.size : end])  # a slice would be copied twice
        del self._data[:end]
        return kind, body

    def wait(self) -> tuple[int, bytes]:
        """The next frame; blocks."""
        while (found := self.take()) is None:
            self.fill()
        return found

    @property
    def is_empty(self) -> bool:
        return not self._data
