"""A process of another user of this machine, for the tests of who may join a meeting.

    with Stranger() as stranger:
        stranger.call(join_as_rank_0, port, marker)     # runs there, as `nobody` where we are root

It knows where the ranks meet, as /proc/net/tcp tells every user, and all about our protocol; it
does not know the run's secret.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - what a socket needs of files that `nobody` may not read
import multiprocessing
import os
import pickle
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pool import PRELOAD

from nanoengine.parallel.layout import Layout
from nanoengine.parallel.meeting_store import MeetingPoint
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.rendezvous import join_mesh

NOBODY = 65534
PATIENCE = timedelta(seconds=5)


class Stranger:
    """Calls functions of this module, one after the other, in a process of its own."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._connection.send((function, arguments))

    def answer(self) -> Any:
        """What the function returned, or the error that it raised, as a text."""
        return self._connection.recv()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.start(function, *arguments)
        return self.answer()

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = function(*arguments)
        except Exception:
            answer = traceback.format_exc()
        connection.send(answer)


def whoami() -> int:
    return os.getuid()


class Make:
    """Where it is unpickled, a folder is made, whose owner tells by whom."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self._marker),)


def join_as_rank_0(port: int, marker: Path) -> str:
    """In torch's own store: find the group that a follower of two waits for, join it as its leader
    and say something that makes a folder where it is unpickled."""
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=PATIENCE
    )
    keys = store.list_keys()
    while not any(key.endswith("/tp/0/0/1") for key in keys):
        keys = store.list_keys()
    name = next(key for key in keys if key.endswith("/tp/0/0/1")).removesuffix("/tp/0/0/1")
    mesh = Mesh(Layout(tp=2), 0, store, name=name, timeout_s=30, host="127.0.0.1")
    raw = pickle.dumps(Make(marker))
    page = (len(raw).to_bytes(8, "little") + raw).ljust(2048, b"\0")
    mesh.broadcast("tp", torch.frombuffer(bytearray(page), dtype=torch.uint8))
    return "said"


_haunted: dict[int, list[str]] = {}
_held: list[socket.socket] = []
_attacks: list[threading.Thread] = []


def haunt(port: int, marker: Path) -> None:
    """Whatever listens at `port`: say nothing to it, and in a thread everything else."""
    sock = socket.socket()
    if sock.connect_ex(("127.0.0.1", port)) == 0:
        _held.append(sock)
    _haunted[port] = []

    def attack() -> None:
        for attempt in (join_as_rank_0, join_with_another_secret):
            try:
                said = attempt(port, marker)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"[:120]
            _haunted[port].append(said)

    _attacks.append(threading.Thread(target=attack, daemon=True))
    _attacks[-1].start()


def join_with_another_secret(port: int, marker: Path) -> str:
    """As rank 0 of a group that it knows by name, in our own store."""
    meeting = MeetingPoint("127.0.0.1", port, bytes(32))
    mesh = join_mesh(meeting, Layout(tp=2), 0, name="r0", timeout_s=5)
    mesh.barrier()
    return "joined"


def haunted() -> dict[int, list[str]]:
    """What became of it, all attempts at an end: `said` or `joined` where it was let in, else the
    error."""
    for attack in _attacks:
        attack.join(120)
    return dict(_haunted)


def listening_ports(root: int) -> set[int]:
    """Where the process `root` and those below it listen on TCP."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family, size = {root}, 0
    while len(family) > size:
        size = len(family)
        family |= {pid for pid, parent in parents.items() if parent in family}
    theirs = set()
    for pid in family:
        with suppress(OSError):
            for one in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # closed meanwhile, as the one that lists them is
                    theirs.add(os.readlink(one))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {
        int(row[1].split(":")[1], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in theirs
    }


# -- gloo's own connections ----------------------------------------------------------------------

_heard: list[bytes] = []
_PREAMBLE = struct.Struct("=6Q")  # bytes in all, what it is, slot, offset, length, remote offset
_DATA, _SEND_READY, _RECV_READY = 1, 2, 3


def take_places(ports: list[int], size: int, said: bytes | None) -> None:
    """Connect to gloo's listeners at `ports` in the place of every rank of a group of `size`. From
    then on answer each receive with `said`, or with what was heard last, and hear what is sent."""
    for port in ports:
        for rank in range(size):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.sendall(struct.pack("=q", rank))  # gloo's whole introduction
            threading.Thread(target=_be_a_rank, args=(sock, said), daemon=True).start()


def heard() -> list[bytes]:
    return list(_heard)


def _be_a_rank(sock: socket.socket, said: bytes | None) -> None:
    """gloo's protocol: who wants to send or to receive says so, and the other says go or sends."""
    last = b""
    with suppress(OSError, EOFError):
        while True:
            _, kind, slot, _, length, _ = _PREAMBLE.unpack(_read(sock, _PREAMBLE.size))
            if kind == _DATA:
                last = _read(sock, length)
                _heard.append(last)
            elif kind == _SEND_READY:
                sock.sendall(_PREAMBLE.pack(_PREAMBLE.size, _RECV_READY, slot, 0, length, 0))
            elif kind == _RECV_READY:
                data = (last if said is None else said).ljust(length, b"?")[:length]
                head = _PREAMBLE.pack(_PREAMBLE.size + length, _DATA, slot, 0, length, 0)
                sock.sendall(head + data)


def _read(sock: socket.socket, count: int) -> bytes:
    read = b""
    while len(read) < count:
        page = sock.recv(count - len(read))
        if not page:
            raise EOFError
        read += page
    return read
