"""The packets that host and worker exchange over their SEQPACKET socket. Stdlib only.

host -> server    configuration (JSON, once), GO with descriptors, KILL, PING
server -> host    HELLO (once), RESULT, PONG: fixed-size structs, no JSON and no pickle
server <-> repl   a session's interpreter: GO with descriptors, then DONE
server -> child   GO with the descriptors, unread; child -> server: READY
"""

from __future__ import annotations

import _socket
import struct
from collections.abc import Sequence

HELLO = b"warm"
PING, PONG = b"P", b"p"  # of a worker that nothing runs in: is it there, and fit for the next run?
READY = b"R"
GO = struct.Struct("<16sdBB")  # run id, wall-clock limit in seconds, a Job, its argument
KILL = struct.Struct("<1s16s")  # b"K", run id: the host has seen enough
RESULT = struct.Struct("<16sIiddQ")  # run id, flags, wait status, CPU s, wall s, maximal RSS in KiB
DONE = struct.Struct("<16sB")  # run id, exit code: a session's interpreter has come to the end
PAYLOAD = struct.Struct("<II")  # bytes of one file's name, bytes of its text; the program first
FLAG_TIMEOUT, FLAG_MEMORY, FLAG_KILLED = 1, 2, 4
FLAG_DONE = 16  # a session's interpreter came to the end of its code, and waits for more
FLAG_FORGOT = 32  # the session's interpreter ended: its names are gone
NO_STATUS = -1  # the execution was killed from outside
PROGRAM_NAME = "program.py"
TIER = "bwrap"  # what stands in results
FILTER_PATH = "/sbx/filter.bpf"  # where a worker finds its system-call filter

# What a session's worker can be asked for (keeper.py); a stateless one knows PROGRAM alone.
PROGRAM, PYTHON, SHELL, REPL, READ, WRITE, PACK, UNPACK, LAY_TESTS, TEST, CALL, VERIFY = range(12)
FOLDERS = ("/work", "/app", "/workspace", "/testbed", "/repo")
"""The working folders that a session can have: mount points, made before it is known which."""
TESTS, LOGS = "/tests", "/logs"
REWARDS = (f"{LOGS}/verifier/reward.txt", f"{LOGS}/verifier/reward.json")
"""Where a script writes its reward: of both the first counts."""

_MAX_DESCRIPTORS = 4
_INT = struct.calcsize("i")
_SPACE = _socket.CMSG_SPACE(_MAX_DESCRIPTORS * _INT)


def send(sock: _socket.socket, message: bytes, descriptors: list[int], flags: int = 0) -> None:
    rights = struct.pack(f"{len(descriptors)}i", *descriptors)
    sock.sendmsg([message], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)], flags)


def pack(parts: Sequence[tuple[str, bytes]]) -> bytes:
    """The payload of a run: named parts, one after the other; `program.read_payload` undoes it."""
    framed = []
    for name, content in parts:
        name_bytes = name.encode(errors="surrogatepass")
        framed += [PAYLOAD.pack(len(name_bytes), len(content)), name_bytes, content]
    return b"".join(framed)


def receive(sock: _socket.socket) -> tuple[bytes, list[int]]:
    """Receive a packet and its descriptors; an empty packet says that the other side is gone."""
    message, ancillary, _, _ = sock.recvmsg(4096, _SPACE)
    descriptors: list[int] = []
    for _, _, data in ancillary:
        descriptors += struct.unpack(f"{len(data) // _INT}i", data)
    return message, descriptors
