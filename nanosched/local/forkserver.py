"""The process that starts the actors' processes: it has imported what they need, and forks.

    python -c "... main(socket)"        started by the driver, one per scheduler

multiprocessing's own fork server listens at a path in a temporary folder, which stays behind when
the driver is killed, and needs a second process to track such things; this one talks over a socket
pair. It ends when the driver does, however that ends: the kernel kills it, also while it imports or
is stopped, and then the actors, whose parent it is (PR_SET_PDEATHSIG).

Each fork is a question, and it answers at once unless it imports. One that does not is told to go
on (SIGCONT), because it may have been stopped, and is killed if that does not help (`look`).
Left out: threads. What is preloaded must not start any, nor touch a gpu.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from nanosched.errors import SchedulerError
from nanosched.local.actor_messages import Exited, Fork, Forked, Ready
from nanosched.local.channel import Channel, Received, pair, readable
from nanosched.local.shared_segments import Pool

PR_SET_PDEATHSIG = 1
TICK_S = 1.0
"""How often somebody looks after a fork server that has been asked."""
FORK_TICKS, IMPORT_TICKS = 10, 300
"""So many without an answer, and it is killed: a fork takes milliseconds, imports a minute."""
PATIENT_TICKS = 2  # before it is told to go on
SAY_S = 5.0
"""So long the driver waits to hear how a process ended: on a busy machine that is told late."""
LOOK_S = 0.05  # how often it looks meanwhile whether that is stopped, and will say nothing
DRIVERS_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # a terminal or a supervisor tells every process
# The kernel's order to end with its parent belongs to the thread that started it: where that is not
# the main one, which lives as long as its process, the thread may end before the driver does.
PROGRAM = """
import ctypes, os, sys
if {is_main_thread}:
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != {driver_pid}:
    os._exit(1)
sys.path[:] = {path!r}
sys.argv[:] = {argv!r}
from nanosched.local.forkserver import main
main({fd}, {driver_pid}, {preload!r})
"""


class ForkServer:
    """The driver's side."""

    def __init__(self, preload: Sequence[str]) -> None:
        for name in preload:
            if importlib.util.find_spec(name.partition(".")[0]) is None:
                raise ValueError(f"preload={name!r}: no module of that name can be imported")
        ours, theirs = pair()
        program = PROGRAM.format(
            path=sys.path,
            argv=sys.argv,
            fd=theirs.fileno(),
            driver_pid=os.getpid(),
            is_main_thread=threading.current_thread() is threading.main_thread(),
            preload=tuple(preload),
        )
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        # Held back until `main` can leave them to the driver: earlier they would end the server.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, DRIVERS_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        self._channel = Channel(ours, Pool())
        self._exits: dict[int, int] = {}
        self._forked: list[Received] = []
        self._num_asked = 0  # forks without an answer
        self._num_ticks = 0  # since it was asked, or last said anything
        self.is_ready = False
        self.is_alive = True

    def fileno(self) -> int:
        return self._channel.fileno()

    def set_waiting(self, wants_write: Callable[[bool], None]) -> None:
        """As a channel's: a server that is busy with imports takes some hundred questions."""
        self._channel.set_waiting(wants_write)

    def flush(self) -> None:
        """Ask what its socket did not take before."""
        self._channel.flush()

    def fork(self, actor_id: int, environment: dict[str, str], worker_socket: int) -> None:
        """Ask for a process; `forked` tells when there is one."""
        self._num_asked += 1
        self._channel.send(Fork(actor_id, environment), files=[worker_socket])

    def forked(self) -> list[tuple[int, int, int]]:
        """(actor, pid, pidfd) of the processes that were started since the last time."""
        self._read()
        received, self._forked = self._forked, []
        return [
            (one.message.actor_id, one.message.pid, one.files[0])
            for one in received
            if isinstance(one.message, Forked)
        ]

    @property
    def is_asked(self) -> bool:
        """Say whether an answer is due."""
        return self.is_alive and self._num_asked > 0

    def look(self) -> None:
        """Once a tick while it is asked: one that is stopped goes on, one that hangs is killed."""
        self._read()
        if not self.is_asked:
            return
        self._num_ticks += 1
        if self._num_ticks > (FORK_TICKS if self.is_ready else IMPORT_TICKS):
            os.kill(self._process.pid, signal.SIGKILL)
        elif self._num_ticks > PATIENT_TICKS:
            os.kill(self._process.pid, signal.SIGCONT)

    def how_it_ended(self, pid: int, limit_s: float) -> str | None:
        """For a process that has ended, which the driver may notice first. None where nobody
        knows: the server is stopped, or has ended, which ended all that it had started."""
        deadline_s = time.monotonic() + limit_s
        self._read()
        while pid not in self._exits and self.is_alive:
            if time.monotonic() >= deadline_s or self._is_stopped():
                break
            readable([self._channel.fileno()], LOOK_S)
            self._read()
        status = self._exits.pop(pid, None)
        if status is None:
            return None
        return f"exited with code {status}" if status >= 0 else f"was killed by signal {-status}"

    def _is_stopped(self) -> bool:
        """By a signal or a debugger; otherwise it reaps as soon as the machine lets it."""
        try:
            with open(f"/proc/{self._process.pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except (FileNotFoundError, ProcessLookupError):
            return False

    def _read(self) -> None:
        while self.is_alive:
            try:
                received = self._channel.receive()
            except BlockingIOError:
                return
            self._num_ticks = 0
            if received is None:
                self.is_alive = False
            elif isinstance(received.message, Exited):
                self._exits[received.message.pid] = received.message.status
            elif isinstance(received.message, Ready):
                self.is_ready = True
            else:
                self._num_asked -= 1
                self._forked.append(received)

    def close(self, limit_s: float = 0.5) -> None:
        """Ends it, and with it every process that it has started."""
        self.is_alive = False
        self._channel.close()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:  # it is importing, say
            self._process.kill()
            self._process.wait()


def main(fd: int, driver_pid: int, preload: Sequence[str]) -> None:
    """The program of the fork server: until the driver closes its end or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to act on
    signal.signal(signal.SIGTERM, _leave_it_to_the_driver)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DRIVERS_SIGNALS)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    try:
        driver = os.pidfd_open(driver_pid)
    except ProcessLookupError:
        return
    if os.getppid() != driver_pid:
        return
    for name in preload:
        try:
            importlib.import_module(name)
        except Exception:  # the boundary of the process: actors that need it will say so again
            print(f"nanosched: preloading {name} failed", file=sys.stderr)
            traceback.print_exc()
    import nanosched.local.actor_worker  # here and not above: the driver does not need it

    gc.collect()
    gc.freeze()  # or the first collection in each actor would copy every page
    _Server(sock, driver, nanosched.local.actor_worker.main).run()


def _leave_it_to_the_driver(number: int, frame: object) -> None:
    """Slurm, systemd and `timeout` tell every process; the driver may still want to save. A handler
    and not SIG_IGN, which the programs that an actor starts would inherit."""


class _Server:
    """Forks on request, and reports and reaps what has ended."""

    def __init__(
        self, sock: socket.socket, driver: int, work: Callable[[socket.socket], None]
    ) -> None:
        self._sock = sock
        self._channel = Channel(sock, Pool())
        self._driver = driver
        self._work = work
        self._children: dict[int, int] = {}  # pidfd -> pid
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(driver, select.POLLIN)
        self._libc = ctypes.CDLL(None, use_errno=True)

    def run(self) -> None:
        self._channel.send(Ready())
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._driver:
                    return
                if fd in self._children:
                    self._reap(fd)
                    continue
                received = self._channel.receive()
                if received is None:
                    return
                assert isinstance(received.message, Fork)
                self._fork(received.message, received.files[0])

    def _reap(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        os.close(pidfd)
        pid, status = os.waitpid(self._children.pop(pidfd), 0)
        self._channel.send(Exited(pid, os.waitstatus_to_exitcode(status)))

    def _fork(self, wanted: Fork, worker_fd: int) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(server, wanted, worker_fd)
        os.close(worker_fd)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)
        self._channel.send(Forked(wanted.actor_id, pid), files=[pidfd])

    def _become_worker(self, server: int, wanted: Fork, worker_fd: int) -> None:
        """Never returns: the rest of the fork server's program is not the worker's."""
        code = 1
        try:
            self._libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != server:
                raise SchedulerError("the fork server ended before its worker began")
            self._sock.close()
            for fd in (self._driver, *self._children):
                os.close(fd)
            os.environ.update(wanted.environment)
            self._work(socket.socket(fileno=worker_fd))
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:  # the boundary of the process
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
