"""The packets that host and worker exchange over their SEQPACKET socket. Stdlib only.

host -> server    configuration (JSON, once), GO with descriptors, KILL
server -> host    HELLO (once), RESULT: fixed-size structs, no JSON and no pickle
server -> child   GO with the descriptors, unread; child -> server: READY, then a wait status
"""

from __future__ import annotations

import array
import socket
import struct

HELLO = b"warm"
READY = b"R"
GO = struct.Struct("<16sd")  # run id, wall-clock limit in seconds
KILL = struct.Struct("<1s16s")  # b"K", run id: the host has seen enough
RESULT = struct.Struct("<16sIiddQ")  # run id, flags, wait status, CPU s, wall s, maximal RSS in KiB
WAIT_STATUS = struct.Struct("<i")
PAYLOAD = struct.Struct("<II")  # bytes of one file's name, bytes of its text; the program first
FLAG_TIMEOUT, FLAG_MEMORY, FLAG_KILLED, FLAG_BROKEN = 1, 2, 4, 8
NO_STATUS = -1  # the execution was killed from outside
PROGRAM_NAME = "program.py"

_MAX_DESCRIPTORS = 4


def send(sock: socket.socket, message: bytes, descriptors: list[int]) -> None:
    rights = array.array("i", descriptors)
    sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a packet and its descriptors; an empty packet says that the other side is gone."""
    size = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
    message, ancillary, _, _ = sock.recvmsg(4096, size)
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    return message, list(descriptors)
