"""The server of a meeting: keys and values in memory, for clients who have proved the secret.

    server = MeetingServer("127.0.0.1", secret)      # listens at server.port until `close`

One thread serves all clients and never waits for one of them: what a client has not read waits in
a buffer, a client that waits for a key is put aside. Whoever has not proved the secret (a
*stranger*) is sent 32 bytes, may send 64, and has `PROOF_S` for it. There are at most
`MOST_STRANGERS` of them; one more, and the one who has been there longest is shown out. So silence
and floods cost a client one more attempt at worst.

Left out: what clients do with the keys (meeting_store.py), and persistence: the keys end with the
process, at once, and every client learns of it by the end of its connection.
"""

from __future__ import annotations

import random
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

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

PROOF_S = 10.0
MOST_STRANGERS = 256
_BACKLOG = 1024
_PAGE = 1 << 16
_FULL_S = 0.05  # between two attempts to accept while this process has no descriptor left


class _Guest:
    """A connection. A stranger until `is_proven`; `wanted` are the keys that it waits for."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with suppress(OSError):  # it may have gone already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.deadline = time.monotonic() + PROOF_S
        self.is_proven = False
        self.inbox, self.outbox = bytearray(), bytearray(self.nonce)
        self.wanted: tuple[bytes, ...] = ()
        self.answers_value = False


class MeetingServer:
    """Serves from its own thread, which ends with `close` or with the process."""

    def __init__(self, host: str, secret: bytes) -> None:
        """`ValueError` where `host` is not an address of this machine."""
        self._secret = secret
        self._listener = _listen(host)
        self.port: int = self._listener.getsockname()[1]
        self._bell, self._rope = socket.socketpair()
        self._values: dict[bytes, bytes] = {}
        self._strangers: dict[_Guest, None] = {}  # the longest there first
        self._waiting: dict[_Guest, None] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        # The thread holds the server and not the other way round: see MeetingStore.
        threading.Thread(target=self._serve, name="meeting", daemon=True).start()

    def close(self) -> None:
        """Let the thread end, and with it every connection. Idempotent."""
        self._rope.close()

    # -- the thread --------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while True:
                for key, mask in self._selector.select(self._patience()):
                    if key.fileobj is self._bell:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._attend(key.data, mask)
                self._show_out_the_late()
        finally:  # also where this thread fails: clients must not wait for it
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()

    def _patience(self) -> float | None:
        if not self._strangers:
            return None
        return max(0.0, next(iter(self._strangers)).deadline - time.monotonic())

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except ConnectionError:
            return
        except OSError:  # no descriptor is left in this process
            self._show_out_one()
            time.sleep(_FULL_S)
            return
        if len(self._strangers) >= MOST_STRANGERS:
            self._show_out_one()
        guest = _Guest(sock)
        self._strangers[guest] = None
        self._selector.register(sock, selectors.EVENT_READ, guest)
        self._attend(guest, selectors.EVENT_WRITE)

    def _show_out_one(self) -> None:
        """Any of them: whoever stays away for a moment cannot choose whose place is taken."""
        if self._strangers:
            self._drop(random.choice(list(self._strangers)))

    def _show_out_the_late(self) -> None:
        now = time.monotonic()
        for guest in [one for one in self._strangers if one.deadline <= now]:
            self._drop(guest)

    def _attend(self, guest: _Guest, mask: int) -> None:
        if guest.sock.fileno() < 0:  # dropped since the selector spoke
            return
        try:
            if mask & selectors.EVENT_READ:
                self._receive(guest)
            if mask & selectors.EVENT_WRITE:
                self._send(guest)
        except (OSError, ValueError):  # it has gone, or talks nonsense
            self._drop(guest)

    def _receive(self, guest: _Guest) -> None:
        limit = _PAGE if guest.is_proven else NONCE_BYTES + PROOF_BYTES - len(guest.inbox)
        with suppress(BlockingIOError):
            read = guest.sock.recv(limit)
            if not read:
                raise ConnectionResetError("the end of its connection")
            guest.inbox += read
        if not guest.is_proven:
            self._prove(guest)
        else:
            self._obey(guest)

    def _prove(self, guest: _Guest) -> None:
        if len(guest.inbox) < NONCE_BYTES + PROOF_BYTES:
            return
        theirs, given = bytes(guest.inbox[:NONCE_BYTES]), bytes(guest.inbox[NONCE_BYTES:])
        if not is_proof(given, self._secret, b"client", guest.nonce, theirs):
            raise ValueError("a stranger")
        guest.is_proven = True
        del self._strangers[guest]
        guest.inbox.clear()
        guest.outbox += proof(self._secret, b"server", guest.nonce, theirs)
        self._send(guest)

    def _obey(self, guest: _Guest) -> None:
        while len(guest.inbox) >= HEAD_BYTES:
            end = HEAD_BYTES + body_bytes(bytes(guest.inbox[:HEAD_BYTES]))
            if len(guest.inbox) < end:
                return
            name, *fields = fields_of(bytes(guest.inbox[HEAD_BYTES:end]))
            del guest.inbox[:end]
            if guest.wanted or name not in _ORDERS:
                raise ValueError(f"out of turn, or no such order: {name!r}")
            _ORDERS[name](self, guest, fields)

    def _send(self, guest: _Guest) -> None:
        with suppress(BlockingIOError):
            del guest.outbox[: guest.sock.send(guest.outbox)]
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.outbox else 0)
        if self._selector.get_key(guest.sock).events != mask:
            self._selector.modify(guest.sock, mask, guest)

    def _drop(self, guest: _Guest) -> None:
        self._strangers.pop(guest, None)
        self._waiting.pop(guest, None)
        self._selector.unregister(guest.sock)
        guest.sock.close()

    # -- what clients may ask ------------------------------------------------------------------

    def _answer(self, guest: _Guest, *fields: bytes) -> None:
        guest.outbox += frame(*fields)
        self._send(guest)

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for guest in [one for one in self._waiting if self._has(one.wanted)]:
            try:
                self._serve_wanted(guest)
            except OSError:
                self._drop(guest)

    def _has(self, keys: Sequence[bytes]) -> bool:
        return all(key in self._values for key in keys)

    def _serve_wanted(self, guest: _Guest) -> None:
        values = [self._values[guest.wanted[0]]] if guest.answers_value else []
        guest.wanted = ()
        self._waiting.pop(guest, None)
        self._answer(guest, *values)

    def _set(self, guest: _Guest, fields: list[bytes]) -> None:
        key, value = fields
        self._put(key, value)
        self._answer(guest)

    def _get(self, guest: _Guest, fields: list[bytes]) -> None:
        (key,) = fields
        self._await(guest, [key], answers_value=True)

    def _wait(self, guest: _Guest, fields: list[bytes]) -> None:
        self._await(guest, fields, answers_value=False)

    def _await(self, guest: _Guest, keys: list[bytes], answers_value: bool) -> None:
        guest.wanted, guest.answers_value = tuple(keys), answers_value
        self._waiting[guest] = None
        if self._has(keys):
            self._serve_wanted(guest)

    def _check(self, guest: _Guest, fields: list[bytes]) -> None:
        self._answer(guest, b"1" if self._has(fields) else b"0")

    def _add(self, guest: _Guest, fields: list[bytes]) -> None:
        key, amount = fields
        total = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
        self._put(key, total)
        self._answer(guest, total)

    def _compare_set(self, guest: _Guest, fields: list[bytes]) -> None:
        """As TCPStore does: a key that is not there equals nothing but an empty expectation, and
        then what was expected is the answer."""
        key, expected, desired = fields
        found = self._values.get(key)
        if found == expected or (found is None and not expected):
            self._put(key, desired)
            found = desired
        self._answer(guest, expected if found is None else found)

    def _delete(self, guest: _Guest, fields: list[bytes]) -> None:
        (key,) = fields
        self._answer(guest, b"0" if self._values.pop(key, None) is None else b"1")

    def _count(self, guest: _Guest, fields: list[bytes]) -> None:
        self._answer(guest, b"%d" % len(self._values))


_ORDERS: dict[bytes, Callable[[MeetingServer, _Guest, list[bytes]], None]] = {
    b"set": MeetingServer._set,
    b"get": MeetingServer._get,
    b"wait": MeetingServer._wait,
    b"check": MeetingServer._check,
    b"add": MeetingServer._add,
    b"compare_set": MeetingServer._compare_set,
    b"delete": MeetingServer._delete,
    b"count": MeetingServer._count,
}


def _listen(host: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"host={host!r}: not an IPv4 address of this machine ({error.strerror}); give the one "
            f"that the other ranks reach it by, or leave it out where all are on this machine"
        ) from error
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener
