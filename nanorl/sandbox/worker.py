"""The warm fork server that runs inside bubblewrap: one clean, confined child for each execution.

Processes, outermost first:
    server   pid 1 of the worker; trusted; holds CAP_SYS_ADMIN of its own user namespace
    pid 1    of one execution's pid namespace: does nothing (confine.PidNamespace)
    program  pid 2 of it, in mount and ipc namespaces of its own; the server's child: no
             capabilities, no_new_privs, resource limits, system-call filter

The next child is forked and confined ahead of time and waits for descriptors. The host sends
[payload, stdin, stdout, stderr], stdin only if there is input, over a SEQPACKET socket; the server
passes them on unread and returns one fixed-size RESULT, so neither program text nor output passes
through memory that a later program inherits, and a program holds no descriptor on which a result
could be written.

Stdlib only: the interpreter in here need not be the host's. Runs on Python >= 3.9.
Next: confine.py (the rights), program.py (the program's process).
"""

from __future__ import annotations

import _signal
import _socket
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import site
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from nanorl.sandbox import usage
from nanorl.sandbox.confine import Confinement, close_from, pidfd_open
from nanorl.sandbox.first import HeldHooks
from nanorl.sandbox.program import execute, exit_now, lay_files, ready_streams, renew_streams
from nanorl.sandbox.protocol import (
    DONE,
    FLAG_DONE,
    FLAG_KILLED,
    FLAG_MEMORY,
    FLAG_TIMEOUT,
    GO,
    HELLO,
    KILL,
    NO_STATUS,
    PING,
    PONG,
    PROGRAM_NAME,
    READY,
    RESULT,
    receive,
    send,
)

# Memory is looked at this often, and more often the less of it is left: what is left would last for
# the period if two cores did nothing but fill memory. One core writes 5 GB/s into sockets.
_WATCH_PERIOD_S, _SHORTEST_PERIOD_S = 0.05, 0.005
_FASTEST_BYTES_PER_S = 16 << 30

ProgramMain = Callable[[Confinement, _socket.socket], None]


class Child:
    """One execution, spawned ahead: its program's process, and its pid 1, which holds the rest."""

    def __init__(self, server: Server, main: ProgramMain | None = None) -> None:
        """`main`: what the confined process does; None: it becomes the program that it is sent."""
        self.namespace = server.confinement.new_pid_namespace()
        # Not the class of `socket`: made in Python, of enumerations, it costs as much as the calls.
        self.sock, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            _run_or_die(_child_main, server, theirs, main or _program_main)
        theirs.close()
        self.end = pidfd_open(self.pid)

    def is_ready(self) -> bool:
        """Waits until the child has confined itself; False if it could not."""
        return self.sock.recv(8) == READY

    def has_ended(self) -> bool:
        return bool(select.select([self.end], [], [], 0)[0])

    def reap(self) -> tuple[int, resource.struct_rusage]:
        """Kills what is left. When this returns no process of the execution exists.

        Returns the wait status of the program, and what it used with the children it waited for.
        """
        os.kill(self.namespace.pid if self.namespace else self.pid, signal.SIGKILL)
        try:
            _, status, usage = os.wait4(self.pid, 0)
        except ChildProcessError:  # killed by the kernel in the moment that another one was made
            status, usage = int(signal.SIGKILL), resource.struct_rusage([0] * 16)
        if self.namespace:
            os.waitpid(self.namespace.pid, 0)
        self.sock.close()
        os.close(self.end)
        return status, usage


def _run_or_die(function: Any, *args: Any) -> NoReturn:
    try:
        function(*args)
    except BaseException:  # a fork must never return into the server's loop
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        exit_now(125)


def _child_main(server: Server, sock: _socket.socket, main: ProgramMain) -> None:
    server.hooks.register()
    server.confinement.isolate()
    main(server.confinement, sock)


def take_order(confinement: Confinement, sock: _socket.socket) -> tuple[bytes, list[int]]:
    """Gives up every right, says so, and waits for what is to be done with what descriptors."""
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    confinement.confine()
    sock.send(READY)
    order = receive(sock)
    sock.detach()  # its number is closed with all others
    return order


def _program_main(confinement: Confinement, sock: _socket.socket) -> None:
    message, descriptors = take_order(confinement, sock)
    limit_cpu(GO.unpack(message)[1])
    code = lay_files(descriptors[0])
    connect(descriptors)
    execute(code)


def limit_cpu(limit_s: float) -> None:
    """A second wall behind the server's: it alone looks at the wall clock."""
    cpu_s = int(limit_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))


def connect(descriptors: list[int]) -> None:
    """Makes [payload, (stdin,) stdout, stderr] the standard streams and closes all others."""
    has_input = len(descriptors) > 3
    if not has_input:
        # An open file of its own: flags, offset and locks of a shared one would outlive the run.
        descriptors.insert(1, os.open("/dev/null", os.O_RDONLY))
    for target, descriptor in enumerate(descriptors[1:]):
        os.dup2(descriptor, target)
    close_from(3)
    if has_input:
        renew_streams()


class Server:
    """Serves one run at a time until the host closes the control socket."""

    def __init__(self, control: socket.socket, config: dict[str, Any], hooks: HeldHooks) -> None:
        self.control = control
        self.hooks = hooks
        self.watch_bytes = config["watch_bytes"]
        self.memory = usage.MemoryWatch()
        self.confinement = Confinement(config)
        self.confinement.enter_mount_namespace()
        self.confinement.give_up_for_all()
        ready_streams()
        self.child = Child(self)

    def serve(self) -> None:
        self.control.send(HELLO if self.child.is_ready() else b"broken")
        is_ready = True
        while True:
            message, descriptors = receive(self.control)
            if not message:
                return
            if len(message) != GO.size and message != PING:
                continue  # a kill for a run that has ended
            if not is_ready and not self.child.is_ready():
                self._respawn()
            is_ready = True
            if message == PING:
                if self.child.has_ended():
                    self._respawn()
                self.control.send(PONG)
                continue
            self.control.send(self._run(message, descriptors))
            self.child = Child(self)
            is_ready = False

    def _respawn(self) -> None:
        """The waiting child died (say, of the memory limit): once more, then give up."""
        self.child.reap()
        self.child = Child(self)
        if not self.child.is_ready():
            raise SystemExit("the confined child does not start")

    def _run(self, message: bytes, descriptors: list[int]) -> bytes:
        run_id, limit_s, _, _ = GO.unpack(message)
        start = time.monotonic()
        send(self.child.sock, message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        flags, status = self._wait(run_id, start + limit_s)
        cpu_s = 0.0
        if status == NO_STATUS:
            usage.stop_all()  # dozens of spinning processes would starve this one
            # The kernel adds the times of what dies with a pid namespace to nobody's.
            cpu_s = usage.cpu_s()
        own_status, reaped = self.child.reap()
        status = own_status if status is None else status
        cpu_s = max(cpu_s, reaped.ru_utime + reaped.ru_stime)
        wall_s = time.monotonic() - start
        return RESULT.pack(run_id, flags, status, cpu_s, wall_s, reaped.ru_maxrss)

    def _memory_left(self, deadline: float) -> int:
        """The bytes left up to the limit; a negative number says that it is passed.

        Counting exactly may take a while, in which no page may be copied and no process forked: all
        stand still, and are left so if the run is at its end.
        """
        if (left := self.watch_bytes - self.memory.most_bytes()) >= 0:
            return left
        standing = usage.stop_all()
        left = self.watch_bytes - self.memory.exact_bytes(self.watch_bytes, deadline)
        if left >= 0 and time.monotonic() < deadline:
            usage.resume(standing)
        return left

    def _wait(
        self, run_id: bytes, deadline: float, talk: socket.socket | None = None
    ) -> tuple[int, int | None]:
        """(flags, wait status). None: the program has ended, and `reap` knows how. NO_STATUS: it is
        to be killed.

        `talk`: where a session's interpreter says that it has come to the end of its code.
        """
        child, control = self.child.end, self.control.fileno()
        poller = select.poll()
        poller.register(child, select.POLLIN)
        poller.register(control, select.POLLIN)
        if talk is not None:
            poller.register(talk, select.POLLIN)
        period_s = _watch_period_s(self.watch_bytes) if self.watch_bytes else float("inf")
        while True:
            left_s = deadline - time.monotonic()
            ready = [fd for fd, _ in poller.poll(max(min(period_s, left_s), 0.0) * 1000 + 1)]
            if child in ready:  # in time, as far as a process that stood still meanwhile can know
                return 0, None
            if control in ready:
                packet = self.control.recv(64)
                if not packet:
                    os._exit(0)  # the host is gone, and with this process the whole worker
                if packet == KILL.pack(b"K", run_id):
                    return FLAG_KILLED, NO_STATUS
            if talk is not None and talk.fileno() in ready:
                packet = talk.recv(64)
                if len(packet) == DONE.size and packet.startswith(run_id):
                    return FLAG_DONE, packet[-1] << 8
                if packet:  # the program itself speaks here: it shall not keep this one busy
                    return 0, NO_STATUS
                poller.unregister(talk)  # closed: it ends, or runs into the limit
                talk = None
            if left_s <= 0:
                return FLAG_TIMEOUT, NO_STATUS
            if not ready and self.watch_bytes:
                start = time.monotonic()
                if (left := self._memory_left(deadline)) < 0:
                    return FLAG_MEMORY, NO_STATUS
                period_s = _watch_period_s(left, watching_s=time.monotonic() - start)


def _watch_period_s(left: int, watching_s: float = 0.0) -> float:
    """Until the next look at the memory, of which `left` bytes are free; the last look took
    `watching_s`, and looking takes no more than a fifth of the time."""
    wanted_s = max(_SHORTEST_PERIOD_S, left / _FASTEST_BYTES_PER_S, 4 * watching_s)
    return min(_WATCH_PERIOD_S, wanted_s)


def _restore_signals() -> None:
    """Programs must not depend on how the run was started: the background job of a shell ignores
    SIGINT and SIGQUIT, and children inherit that. No handler stays, Python's for SIGINT neither:
    the kernel keeps from pid 1 of a namespace what its own programs send, unless it is handled."""
    for number in signal.valid_signals():
        is_pythons_own = number in (signal.SIGPIPE, signal.SIGXFSZ)
        if number not in (signal.SIGKILL, signal.SIGSTOP) and not is_pythons_own:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def prepare(hooks: HeldHooks) -> tuple[socket.socket, dict[str, Any]]:
    """The control socket and the configuration; afterwards the process is fit to be forked."""
    hooks.release()
    _restore_signals()
    control = socket.socket(fileno=int(sys.argv[1]))
    config = json.loads(control.recv(1 << 16))
    sys.path[0] = config["import_path"]
    for name in config["preload"]:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.startswith("nanorl")]:
        del sys.modules[name]  # programs have a name space of their own
    os.environ.pop("PWD", None)
    random.seed(0)  # programs on all workers draw the same numbers
    site.setquit()  # -S leaves out exit() and quit(), which programs do call
    sys.argv[:] = [PROGRAM_NAME]
    gc.collect()
    gc.freeze()
    gc.disable()
    return control, config


def main(hooks: HeldHooks) -> None:
    Server(*prepare(hooks), hooks).serve()
