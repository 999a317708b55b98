"""The frames that the host and the server inside a box exchange over one pipe each way.

    host -> guest    CONFIG (once, JSON), GO (an order and all that it needs), KILL (a run's id),
                     WAKE (to a machine that was restored)
    guest -> host    HELLO (once), OUT and ERR (what the program prints), RESULT (protocol.RESULT)

How a frame travels is stream_frames.py's, one folder up. The host believes nothing of a guest: a
frame that is too long, of another kind or of another run breaks the box, and so does a number that
cannot be. Stdlib only, and no imports of ours but protocol.py: this file runs inside as well.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from nanorl.sandbox import protocol

CONFIG, GO, KILL, HELLO, OUT, ERR, RESULT, WAKE = range(1, 9)
ENTROPY_BYTES = 64
WAKING = struct.Struct(f"<d{ENTROPY_BYTES}s")  # of WAKE: seconds since 1970, randomness
MOST_BYTES = 1 << 20  # of a frame from the guest
_LENGTHS = struct.Struct("<QI")  # output limit of each stream, bytes of stdin


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
