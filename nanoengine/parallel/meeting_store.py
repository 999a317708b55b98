"""A client of a meeting, as the store that torch's process groups are built from.

    store = MeetingStore(point)          # point.secret came by a channel that only we can read
    store.set("key", b"value"); store.get("key")

It does what torch's TCPStore does and is written in Python, so torch calls it under the lock of
the interpreter: a few calls when a group is made, no more. A TCPStore obeys whoever reaches its
port; here both ends prove the secret first (meeting_wire.py).

Each call has a connection of its own from a small pool, so threads do not wait for each other and
one that has waited too long just hangs up.

Left out: queues, lists and the calls that take many keys at once, which torch does without, and
going on after the server has ended: every call raises torch's DistNetworkError then.
"""

from __future__ import annotations

import secrets
import socket
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from nanoengine.parallel.meeting_server import MeetingServer
from nanoengine.parallel.meeting_wire import (
    HEAD_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    body_bytes,
    fields_of,
    frame,
    is_proof,
    proof,
)

_ATTEMPTS = 20  # to prove the secret: the server shows strangers out while others flood it


@dataclass(frozen=True)
class MeetingPoint:
    """The address of a mesh's store, and the secret with which a rank proves that it belongs there:
    small and picklable, to be handed to the other ranks by whatever starts them and to nobody
    else."""

    host: str
    port: int
    secret: bytes = field(repr=False)


class MeetingStore(dist.Store):
    """Whoever makes a process group of it keeps it as long as the group lives: torch holds the C++
    half alone."""

    def __init__(
        self,
        point: MeetingPoint,
        *,
        timeout_s: float = 300.0,
        server: MeetingServer | None = None,
    ) -> None:
        """No call waits longer than `timeout_s`. A `server` is closed with this store."""
        super().__init__()
        self.point = point
        self._limit_s = timeout_s
        self._idle: deque[socket.socket] = deque()
        self._closing = weakref.finalize(self, _close, self._idle, server)

    def close(self) -> None:
        """Hang up, and end the server if it is this store's. Idempotent."""
        self._closing()

    # -- what torch calls --------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:  # type: ignore[override]
        self._ask(b"set", key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        """Waits until the key is there. DistStoreError after the store's timeout."""
        (value,) = self._ask(b"get", key.encode())
        return value

    def add(self, key: str, amount: int) -> int:
        (total,) = self._ask(b"add", key.encode(), b"%d" % amount)
        return int(total)

    def compare_set(  # type: ignore[override]
        self, key: str, expected: str | bytes, desired: str | bytes
    ) -> bytes:
        fields = (key.encode(), _bytes(expected), _bytes(desired))
        (found,) = self._ask(b"compare_set", *fields)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        (found,) = self._ask(b"check", *_names(keys))
        return found == b"1"

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Until all keys are there. DistStoreError after `timeout`, or the store's."""
        self._ask(b"wait", *_names(keys), limit=timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """For the calls from now on."""
        self._limit_s = timeout.total_seconds()

    def delete_key(self, key: str) -> bool:
        (found,) = self._ask(b"delete", key.encode())
        return found == b"1"

    def num_keys(self) -> int:
        (found,) = self._ask(b"count")
        return int(found)

    deleteKey, getNumKeys = delete_key, num_keys

    # -- the connection ------------------------------------------------------------------------

    def _ask(self, *fields: bytes, limit: timedelta | None = None) -> list[bytes]:
        limit_s = self._limit_s if limit is None else limit.total_seconds()
        message = frame(*fields)
        try:
            sock = self._idle.pop() if self._idle else self._connect()
        except IndexError:  # another thread was faster
            sock = self._connect()
        try:
            sock.settimeout(max(limit_s, 0.001))
            sock.sendall(message)
            answer = _frame_from(sock)
        except TimeoutError as error:
            sock.close()
            what = b" ".join(fields[:2]).decode(errors="replace")
            raise dist.DistStoreError(f"{what}: no answer after {limit_s:g} s") from error
        except OSError as error:
            sock.close()
            raise dist.DistNetworkError(f"{self._where} has ended: {error}") from error
        self._idle.append(sock)
        return answer

    @property
    def _where(self) -> str:
        return f"the store at {self.point.host}:{self.point.port}"

    def _connect(self) -> socket.socket:
        for _ in range(_ATTEMPTS):
            sock = self._reach()
            try:
                self._prove(sock)
            except ConnectionError:  # shown out, as one of too many or for a wrong secret
                sock.close()
            except BaseException:  # Ctrl-C too: the socket is nobody's yet
                sock.close()
                raise
            else:
                return sock
        raise dist.DistNetworkError(
            f"{self._where} does not let this process in: the secret is not the one of this "
            f"meeting, or others flood it with connections"
        )

    def _reach(self) -> socket.socket:
        address = (self.point.host, self.point.port)
        try:
            sock = socket.create_connection(address, self._limit_s)
        except OSError as error:
            raise dist.DistNetworkError(f"{self._where} cannot be reached: {error}") from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _prove(self, sock: socket.socket) -> None:
        """Both ways. ConnectionError where the other end hangs up."""
        secret, ours = self.point.secret, secrets.token_bytes(NONCE_BYTES)
        try:
            theirs = _exactly(sock, NONCE_BYTES)
            sock.sendall(ours + proof(secret, b"client", theirs, ours))
            given = _exactly(sock, PROOF_BYTES)
        except TimeoutError as error:
            raise dist.DistNetworkError(f"{self._where} says nothing") from error
        if not is_proof(given, secret, b"server", theirs, ours):
            raise dist.DistNetworkError(
                f"{self._where} is not this run's: whoever listens there does not know its secret"
            )


def _close(idle: deque[socket.socket], server: MeetingServer | None) -> None:
    while idle:
        idle.pop().close()
    if server is not None:
        server.close()


def _frame_from(sock: socket.socket) -> list[bytes]:
    return fields_of(_exactly(sock, body_bytes(_exactly(sock, HEAD_BYTES))))


def _exactly(sock: socket.socket, count: int) -> bytes:
    read = bytearray()
    while len(read) < count:
        page = sock.recv(count - len(read))
        if not page:
            raise ConnectionResetError("the connection was closed")
        read += page
    return bytes(read)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _names(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]
