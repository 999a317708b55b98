"""The server inside a session's worker: one folder and one interpreter, kept for an episode.

Runs like worker.py's, with these differences:

    folder   a tmpfs of its own mount namespace, handed to every execution; so is /tmp
    jobs     the host asks for one of several (jobs.py), each in fresh namespaces; all that it
             started is dead before the result is sent: between two jobs only files are left
    repl     one execution that is kept; it stands still (SIGSTOP) between its calls

No execution is forked ahead: an idle session is this process and nothing else. It never has the
session's folder on its import path, so nothing that a program leaves there is run by it.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import tarfile
import time
import traceback
import unittest
from contextlib import suppress
from typing import Any

from nanorl.sandbox import jobs, protocol, usage
from nanorl.sandbox.first import HeldHooks
from nanorl.sandbox.protocol import (
    FLAG_FORGOT,
    GO,
    HELLO,
    NO_STATUS,
    PING,
    PONG,
    RESULT,
    receive,
    send,
)
from nanorl.sandbox.worker import Child, Server, prepare

# Loaded once, here; a job that imported them itself would take ten times as long.
_FOR_JOBS = (tarfile, traceback, unittest)


class Keeper(Server):
    """Serves the jobs of one session until the host closes the control socket."""

    def __init__(self, control: socket.socket, config: dict[str, Any], hooks: HeldHooks) -> None:
        super().__init__(control, config, hooks)
        self.child.reap()
        self.confinement.mount_folder("/tmp")
        self.repl: Child | None = None
        self.talk: socket.socket | None = None

    def serve(self) -> None:
        self.control.send(HELLO)
        while True:
            message, descriptors = receive(self.control)
            if not message:
                return
            if message == PING:
                self.control.send(PONG)
            if len(message) != GO.size:
                continue  # a ping, or a kill for a job that has ended
            self.control.send(self._job(message, descriptors))

    def _job(self, message: bytes, descriptors: list[int]) -> bytes:
        job, argument = GO.unpack(message)[2:]
        if job == protocol.REPL:
            return self._call_repl(message, descriptors)
        if job == protocol.UNPACK:
            self._renew_folder(protocol.FOLDERS[argument])
        elif job == protocol.LAY_TESTS:
            for path in (protocol.TESTS, protocol.LOGS):
                self.confinement.mount_folder(path)
        if job == protocol.TEST:
            result = self._run_test(message, descriptors)
        else:
            self.child = self._start(jobs.main_of_grader if job == protocol.VERIFY else jobs.main)
            result = self._run(message, descriptors)
        if RESULT.unpack(result)[1] & protocol.FLAG_MEMORY and self.repl is not None:
            self._end_repl()  # its share of the memory would end the next job as well
            result = _with_flag(result)
        if job == protocol.LAY_TESTS:
            self.confinement.make_read_only(protocol.TESTS)
        return result

    def _run_test(self, message: bytes, descriptors: list[int]) -> bytes:
        """A test and the program that it asks: two executions that cannot see one another."""
        ours, theirs = socket.socketpair()
        program = self._start(jobs.serve_program)
        send(program.sock, message, [theirs.fileno()])
        theirs.close()
        self.child = self._start(jobs.main_of_grader)
        payload, *outputs = descriptors
        result = self._run(message, [payload, ours.detach(), *outputs])
        program.reap()
        return result

    def _renew_folder(self, folder: str) -> None:
        if self.repl is not None:
            self._end_repl()
        if self.confinement.folder:
            self.confinement.unmount(self.confinement.folder)
            self.confinement.unmount("/tmp")
            self.confinement.mount_folder("/tmp")
        self.confinement.mount_folder(folder)
        self.confinement.folder = folder

    def _start(self, main: Any) -> Child:
        for _ in range(2):  # the first may have died of the memory limit that it shares
            child = Child(self, main)
            if child.is_ready():
                return child
            child.reap()
        raise SystemExit("a confined process does not start")

    # The interpreter that is kept.

    def _call_repl(self, message: bytes, descriptors: list[int]) -> bytes:
        run_id, limit_s, _, _ = GO.unpack(message)
        start = time.monotonic()
        if self.repl is None:
            self._start_repl()
        assert self.repl is not None and self.talk is not None, "both were started above"
        self.child = self.repl
        cpu_s = usage.cpu_of(self.repl.pid)
        usage.resume_all()
        with suppress(OSError):  # one that does not read its orders runs into the time limit
            send(self.talk, message, descriptors, socket.MSG_DONTWAIT)
        for descriptor in descriptors:
            os.close(descriptor)
        flags, status = self._wait(run_id, start + limit_s, self.talk)
        usage.halt_all()
        is_done = flags & protocol.FLAG_DONE  # else its children count as well
        cpu_s = max((usage.cpu_of(self.repl.pid) if is_done else usage.cpu_s()) - cpu_s, 0.0)
        maxrss = 0
        if not is_done:
            own_status, reaped = self._end_repl()
            status = own_status if status is None else status
            flags, maxrss = flags | FLAG_FORGOT, reaped.ru_maxrss
        wall_s = time.monotonic() - start
        return RESULT.pack(run_id, flags, status, cpu_s, wall_s, maxrss)

    def _start_repl(self) -> None:
        self.talk, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.repl = self._start(jobs.main)
        with theirs:
            order = GO.pack(bytes(16), 0.0, protocol.REPL, 0)
            send(self.repl.sock, order, [theirs.fileno()])

    def _end_repl(self) -> tuple[int, resource.struct_rusage]:
        """Ends its whole tree; its wait status and what it used."""
        assert self.repl is not None and self.talk is not None, "there is one to end"
        ended = self.repl.reap()
        self.talk.close()
        self.repl = self.talk = None
        return ended


def _with_flag(result: bytes) -> bytes:
    run_id, flags, *rest = RESULT.unpack(result)
    return RESULT.pack(run_id, flags | FLAG_FORGOT, *rest)


def main(hooks: HeldHooks) -> None:
    assert NO_STATUS < 0 and all(module.__name__ in sys.modules for module in _FOR_JOBS)
    Keeper(*prepare(hooks), hooks).serve()
