"""One end of a socket pair between two processes: messages, payloads, files, loans of segments.

The sockets keep the boundaries of what is sent (SOCK_SEQPACKET), so that a message is one system
call on either side and files arrive with the message that they belong to. A segment's file is sent
once; later messages name its number. One that is received stays mapped until its lender forgets it.
Left out: threads; a channel belongs to one.
"""

from __future__ import annotations

import array
import os
import pickle
import select
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from nanosched.local.actor_messages import MESSAGES, Forget, Message, Release
from nanosched.local.payload import Payload
from nanosched.local.shared_segments import Hold, Pool, SharedSegment

FRAME_BYTES = 1 << 17  # what a socket takes at once everywhere; larger frames go into a file
MAX_FILES = 64  # per message
KINDS = {cls: kind for kind, cls in enumerate(MESSAGES)}
FLAGS = int(socket.MSG_CMSG_CLOEXEC)
IN_FILE = b"in file"  # sent for a frame that is in a file; frames themselves start with b"\x80"


class Received(NamedTuple):
    """A message and what came with it. Who takes `files` closes them."""

    message: Message
    payloads: list[Payload]
    files: list[int]


class Channel:
    """Blocks as long as a socket does by default; after `set_waiting` it never does."""

    def __init__(self, sock: socket.socket, pool: Pool) -> None:
        self._sock = sock
        self._pool = pool
        self._wants_write: Callable[[bool], None] | None = None
        self._unsent: deque[tuple[bytes, list[int], tuple[Payload, ...]]] = deque()
        self._buffer = bytearray(FRAME_BYTES)
        self._space = socket.CMSG_SPACE(MAX_FILES * array.array("i").itemsize)
        self._segments: dict[int, SharedSegment] = {}  # lent to us, by the lender's numbers
        self._sent: set[int] = set()  # of our segments: those whose file the other side has
        self._lent: dict[int, list[Hold]] = defaultdict(list)
        self._released: deque[int] = deque()  # appended to wherever an object happens to end
        self._forgotten: deque[int] = deque()
        self.num_received = 0
        self.is_closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def set_waiting(self, wants_write: Callable[[bool], None]) -> None:
        """From now on nothing waits here. `wants_write` is called with True when the socket is
        full, so that somebody calls `flush` when it is not, and with False when all is sent."""
        self._sock.setblocking(False)
        self._wants_write = wants_write

    # -- sending ---------------------------------------------------------------------------------

    def send(
        self, message: Message, payloads: Sequence[Payload] = (), files: Sequence[int] = ()
    ) -> None:
        """Never waits on a socket that does not block: what it cannot take is sent by `flush`.
        Nothing happens where the other process is gone; its death is told another way."""
        if self.is_closed:
            return
        if self._released or self._forgotten:
            self.tidy()
        all_files = list(files)
        wires = [
            payload.data if payload.is_plain else self._lend(payload, all_files)
            for payload in payloads
        ]
        frame = pickle.dumps((KINDS[type(message)], tuple(message), wires), 5)
        spilled = -1
        if len(frame) > FRAME_BYTES:
            spilled = _file_of(frame)
            frame, all_files = IN_FILE, [*all_files, spilled]
        if self._unsent or not self._post(frame, all_files):
            if not self._unsent and self._wants_write is not None:
                self._wants_write(True)
            # Files of others may be closed by then; segments are kept by their payloads.
            copies = [os.dup(file) for file in all_files]
            self._unsent.append((frame, copies, tuple(payloads)))
        if spilled >= 0:
            os.close(spilled)

    def _lend(self, payload: Payload, files: list[int]) -> Any:
        """The payload as it is sent; a segment becomes (number, bytes, is its file sent along)."""
        data, buffers, hold, handles = payload
        if hold is None:
            return data, buffers, None, handles
        segment = hold.segment
        is_new = segment.segment_id not in self._sent
        if is_new:
            files.append(segment.fd)
            self._sent.add(segment.segment_id)
            segment.known_to.add(self)
        self._lent[segment.segment_id].append(hold)
        return data, buffers, (segment.segment_id, segment.num_bytes, is_new), handles

    def _post(self, frame: bytes, files: list[int]) -> bool:
        """False if the socket is full."""
        try:
            if files:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
                self._sock.sendmsg([frame], [rights])
            else:
                self._sock.send(frame)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            pass  # the other process is gone
        return True

    def flush(self) -> None:
        """Sends what the socket did not take before."""
        while self._unsent:
            frame, files, _ = self._unsent[0]
            if not self._post(frame, files):
                return
            self._unsent.popleft()
            for file in files:
                os.close(file)
        if self._wants_write is not None:
            self._wants_write(False)

    # -- receiving -------------------------------------------------------------------------------

    def receive(self) -> Received | None:
        """The next message; None at the end. BlockingIOError where there is none and the socket
        does not block. `Release` and `Forget` are done with when they are returned: waiting for
        the one behind them here would keep a blocking caller from its other channels."""
        received = self._read()
        if received is None:
            return None
        self.num_received += 1
        message = received.message
        if isinstance(message, Release):
            for number in message.segments:
                self._lent[number].pop()
        elif isinstance(message, Forget):
            for number in message.segments:
                self._segments.pop(number, None)
        return received

    def _read(self) -> Received | None:
        while True:
            try:
                count, rights, _, _ = self._sock.recvmsg_into([self._buffer], self._space, FLAGS)
                break
            except ConnectionResetError:
                continue  # told once, before what the other process sent; then its end
        if count == 0:
            return None
        files = [] if not rights else _files_of(rights)
        if count != len(IN_FILE):  # no frame is that short
            kind, fields, wires = pickle.loads(memoryview(self._buffer)[:count])
        else:
            kind, fields, wires = pickle.loads(_content_of(files.pop()))
        payloads = [
            Payload(wire) if type(wire) is bytes else self._borrow(wire, files)
            for wire in reversed(wires)
        ]
        payloads.reverse()
        return Received(MESSAGES[kind](*fields), payloads, files)

    def _borrow(self, wire: Any, files: list[int]) -> Payload:
        """The payload; the file of a new segment is the last of those that are left."""
        data, buffers, loan, handles = wire
        if loan is None:
            return Payload(data, buffers, None, handles)
        number, num_bytes, is_new = loan
        if is_new:
            self._segments[number] = self._pool.adopt(files.pop(), num_bytes)

        def give_back(_: SharedSegment) -> None:
            self._released.append(number)  # and no more: this may run anywhere, even in `send`

        return Payload(data, buffers, Hold(self._segments[number], give_back), handles)

    # -- segments --------------------------------------------------------------------------------

    def forget_soon(self, segment_id: int) -> None:
        self._sent.discard(segment_id)
        self._lent.pop(segment_id, None)
        self._forgotten.append(segment_id)

    def tidy(self) -> None:
        """Tells the other side what is not used any more. Call it before a long wait."""
        if self._released:
            self.send(Release(_drained(self._released)))
        if self._forgotten:
            self.send(Forget(_drained(self._forgotten)))

    def close(self) -> None:
        """Ends it; what the other side held of ours is free again. Closing twice is fine."""
        if self.is_closed:
            return
        self.is_closed = True
        for _, files, _ in self._unsent:
            for file in files:
                os.close(file)
        self._unsent.clear()
        self._sock.close()
        self._lent.clear()
        self._segments.clear()


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends that keep message boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _drained(numbers: deque[int]) -> tuple[int, ...]:
    return tuple([numbers.popleft() for _ in range(len(numbers))])


def _files_of(rights: Any) -> list[int]:
    files = array.array("i")
    for _, _, numbers in rights:
        files.frombytes(numbers)
    return files.tolist()


def readable(fds: Iterable[int], timeout_s: float | None = None) -> set[int]:
    """Those of the files that have something to read, or have ended. `select.select` would not take
    numbers above 1023."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}


def _file_of(content: bytes) -> int:
    fd = os.memfd_create("nanosched", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    return fd


def _content_of(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()
