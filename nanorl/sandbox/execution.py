"""An execution as the host sees it: the descriptors that go in, the two pipes that come out.

The program's text and input travel in anonymous files, never through the server's memory; stdin
is sealed, since a program that could grow it would have memory that no limit counts.
"""

from __future__ import annotations

import fcntl
import os
import socket
from concurrent.futures import Future
from dataclasses import dataclass, field

from nanorl.sandbox import protocol
from nanorl.sandbox.base import ExecResult

_READ_BYTES = 1 << 16
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(eq=False)
class Execution:
    """A program to run, and the future of its result.

    `payload` is the program followed by its files, framed; `num_errors` counts workers that broke
    while it ran, `num_starts` those that were found dead when it came.
    """

    payload: bytes
    stdin: bytes
    timeout_s: float
    max_output_bytes: int
    job: int = protocol.PROGRAM
    argument: int = 0
    future: Future[ExecResult] = field(default_factory=Future)
    num_errors: int = 0
    num_starts: int = 0


@dataclass(eq=False)
class Stream:
    """The read end of one pipe and what has come out of it."""

    descriptor: int
    data: bytearray = field(default_factory=bytearray)
    is_open: bool = True

    def read(self) -> bool:
        """Takes what is there, at most 64 KiB. False: nothing, or the end, which closes."""
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        self.data += data
        self.is_open = bool(data)
        return bool(data)

    def drain(self, max_bytes: int) -> bytes:
        """All that was written, cut somewhere beyond `max_bytes`; never waits."""
        while self.is_open and len(self.data) <= max_bytes and self.read():
            pass
        return bytes(self.data)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self.is_open = -1, False


class Attempt:
    """An execution handed to a worker; a second one follows if the worker breaks under it."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.run_id = os.urandom(16)
        self.streams: list[Stream] = []

    def start(self, control: socket.socket) -> None:
        """Hands the program to the server at the other end of `control`. May raise OSError."""
        theirs: list[int] = []
        try:
            theirs.append(memory_file("program", self.execution.payload))
            if self.execution.stdin:  # otherwise the program opens a /dev/null of its own
                theirs.append(memory_file("stdin", self.execution.stdin, _SEALS))
            for _ in range(2):
                read_end, write_end = os.pipe2(os.O_CLOEXEC)
                self.streams.append(Stream(read_end))
                theirs.append(write_end)
                os.set_blocking(read_end, False)
            execution = self.execution
            order = (self.run_id, execution.timeout_s, execution.job, execution.argument)
            protocol.send(control, protocol.GO.pack(*order), theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)


def memory_file(name: str, content: bytes, seals: int = 0) -> int:
    """An anonymous file with this content, at its beginning."""
    flags = os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if seals else 0)
    descriptor = os.memfd_create(name, flags)
    try:
        written = 0
        while written < len(content):  # at a place, so that the file stays at its beginning
            written += os.pwrite(descriptor, memoryview(content)[written:], written)
        if seals:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:  # Ctrl-C too: the descriptor is nobody's yet
        os.close(descriptor)
        raise
    return descriptor
