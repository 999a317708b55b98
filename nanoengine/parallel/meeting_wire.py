"""What a meeting's server and its clients say to each other, byte by byte.

    server -> client    a nonce                                       32 bytes
    client -> server    a nonce, and proof of the secret              32 + 32
    server -> client    proof of the secret                           32
    then frames both ways: a length, and fields, each with its length

A proof is an HMAC-SHA256 under the secret over who says it and both nonces, so none is good twice
and none can be thrown back. Until both have seen the other's, nobody believes a byte. Fields are
bytes and stay bytes: nothing that is received is ever unpickled.

Left out: secrecy and integrity of what follows on the connection. On the loopback the kernel keeps
other users out of it; on a network without TLS whoever sits between two machines does not need to
prove anything.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence

SECRET_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
MOST_BYTES = 1 << 24  # of a frame: an address, an id, an announcement, never a tensor
_LENGTH = struct.Struct("!I")
HEAD_BYTES = _LENGTH.size


def proof(secret: bytes, *said: bytes) -> bytes:
    """That whoever made it knows `secret`, and said all this; fields cannot run into each other."""
    return hmac.digest(secret, _joined(said), "sha256")


def is_proof(given: bytes, secret: bytes, *said: bytes) -> bool:
    """Say whether `given` is the proof of all this; takes the same time for every wrong one."""
    return hmac.compare_digest(given, proof(secret, *said))


def frame(*fields: bytes) -> bytes:
    """The fields as they travel. `ValueError` where they are too many bytes."""
    body = _joined(fields)
    if len(body) > MOST_BYTES:
        raise ValueError(f"{len(body)} bytes for a store: at most {MOST_BYTES}; send tensors apart")
    return _LENGTH.pack(len(body)) + body


def body_bytes(head: bytes) -> int:
    """The length in bytes of the frame that begins so. `ValueError` if it is longer than any of
    ours."""
    (length,) = _LENGTH.unpack(head)
    if length > MOST_BYTES:
        raise ValueError(f"a frame of {length} bytes: at most {MOST_BYTES}")
    return int(length)


def fields_of(body: bytes) -> list[bytes]:
    """The fields of a frame's body. `ValueError` where lengths and bytes do not agree."""
    fields, at = [], 0
    while at < len(body):
        if at + HEAD_BYTES > len(body):
            raise ValueError("a frame that ends inside a length")
        (length,) = _LENGTH.unpack_from(body, at)
        at += HEAD_BYTES
        if at + length > len(body):
            raise ValueError("a field that is longer than its frame")
        fields.append(bytes(body[at : at + length]))
        at += length
    return fields


def _joined(fields: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(field)) + field for field in fields)
