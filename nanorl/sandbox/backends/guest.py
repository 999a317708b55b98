"""The server inside a box: takes an order, forks a process for it, sends what that prints.

Where descriptors cannot be handed in (a container, a virtual machine) this stands in for worker.py
and keeper.py: it speaks frames (worker_frames.py) over standard input and output, and does the same
jobs (jobs.py). The programs' own process is confined by rights.py.

    stateless   one order, then the host throws the box away
    session     one box an episode: the folder stays, a job's processes do not, and the interpreter
                of `repl` stands still between its calls

All that a job left running is killed before its result is sent. The server keeps nothing that a
program could use: it is not dumpable, so its descriptors are out of reach, and as the init of its
namespace, where it is one, it cannot be killed or stopped from inside. Where a program does break
it, it breaks its own box, and the host says so.
Stdlib only, Python >= 3.8: the sources come in the first frame (box.py), no file of it lies inside.
"""

from __future__ import annotations

import fcntl
import gc
import os
import random
import select
import signal
import site
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from nanorl.sandbox import jobs, protocol, usage
from nanorl.sandbox import stream_frames as frames
from nanorl.sandbox.backends import rights, worker_frames
from nanorl.sandbox.backends.worker_frames import JobOrder
from nanorl.sandbox.confine import close_from
from nanorl.sandbox.program import execute, exit_now, parts_of, renew_streams
from nanorl.sandbox.worker import limit_cpu

_WATCH_PERIOD_S = 0.05
_CLEAN_LIMIT_S = 5.0
_READ_BYTES = 1 << 16
_ADD_ENTROPY, _RESEED = 0x40085203, 0x5207  # random(4)


class Job:
    """A forked process, the pipes from and to it, and how much of its output has gone out."""

    def __init__(self, order: JobOrder) -> None:
        self.order = order
        self.deadline = time.monotonic() + order.limit_s
        self.outputs: dict[int, int] = {}  # descriptor -> worker_frames.OUT or worker_frames.ERR
        self.num_bytes = {worker_frames.OUT: 0, worker_frames.ERR: 0}
        self.feeds: dict[int, memoryview] = {}  # descriptor -> what is still to be written
        self.flags = 0
        self.status = protocol.NO_STATUS
        self.is_over = False
        self._theirs: list[int] = []

    def output(self, kind: int) -> int:
        """The program's end of a new pipe for its output."""
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        self.outputs[ours] = kind
        self._theirs.append(theirs)
        return theirs

    def feed(self, data: bytes) -> int:
        """The program's end of a new pipe that holds `data`."""
        theirs, ours = os.pipe()
        os.set_blocking(ours, False)
        self.feeds[ours] = memoryview(data)
        self._theirs.append(theirs)
        return theirs

    def hold(self, descriptor: int) -> int:
        """A descriptor that the program gets, to be closed here with the others."""
        self._theirs.append(descriptor)
        return descriptor

    def hand_over(self) -> None:
        """The program has its ends; here they are closed."""
        for descriptor in self._theirs:
            os.close(descriptor)
        self._theirs.clear()

    def end(self, flags: int) -> None:
        self.flags |= flags
        self.is_over = True

    def close(self) -> None:
        for descriptor in [*self.outputs, *self.feeds]:
            os.close(descriptor)
        self.outputs.clear()
        self.feeds.clear()


class GuestServer:
    """Serves one order at a time until the host closes its end."""

    def __init__(self, config: Mapping[str, Any], reader: frames.FrameReader, out: int) -> None:
        self.config = config
        self.folder = ""
        self._reader, self._out = reader, out
        self._wake, waker = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(waker, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        has_count = os.path.exists("/proc/net/sockstat")  # gVisor shows none
        self._memory = usage.MemoryWatch() if config["watch_bytes"] and has_count else None
        self._ended: dict[int, int] = {}  # pid -> wait status
        self._cpu_s, self._maxrss = 0.0, 0
        self._repl = 0  # its pid
        self._talk: socket.socket | None = None

    def serve(self) -> None:
        self._send(worker_frames.HELLO)
        while True:
            kind, body = self._reader.wait()
            if kind == worker_frames.WAKE:
                _wake_up(*worker_frames.WAKING.unpack(body))
                self._send(worker_frames.HELLO)
            elif kind == worker_frames.GO:
                order = JobOrder.unpack(body)
                del body
                self._do(order)

    def _send(self, kind: int, body: bytes = b"") -> None:
        frames.send_frame(self._out, kind, body)

    def _do(self, order: JobOrder) -> None:
        job, start = Job(order), time.monotonic()
        num_oom_kills = self._num_oom_kills()
        self._cpu_s, self._maxrss = 0.0, 0
        standing = _descendants() if self._repl else set()
        if order.job == protocol.REPL:
            standing = self._call_repl(job)
        else:
            if order.job == protocol.UNPACK:
                self.folder = self.config["root"] + protocol.FOLDERS[order.argument]
            channel = self._start_program(job) if order.job == protocol.TEST else -1
            self._wait(job, self._fork(job, self._perform, channel))
        self._clean(job, standing)
        self._pump(job)
        job.close()
        if self._num_oom_kills() > num_oom_kills:
            job.flags |= protocol.FLAG_MEMORY
        result = (order.run_id, job.flags, job.status, self._cpu_s)
        wall_s = time.monotonic() - start
        self._send(worker_frames.RESULT, protocol.RESULT.pack(*result, wall_s, self._maxrss))

    # The forked process.

    def _start_program(self, job: Job) -> int:
        """The program that a test asks, in a process of its own; the test's end of the talk."""
        ours, theirs = socket.socketpair()
        self._fork(job, self._serve_program, theirs, has_streams=False)
        theirs.close()
        return job.hold(ours.detach())

    def _serve_program(self, order: JobOrder, _: list[int], theirs: socket.socket) -> None:
        os.chdir(self.folder)
        _be_expendable()
        rights.lower(self.config)
        limit_cpu(order.limit_s)
        jobs.answer_tests(theirs.detach(), self.folder)

    def _fork(
        self, job: Job, main: Callable[..., None], *arguments: Any, has_streams: bool = True
    ) -> int:
        streams = []
        if has_streams:
            stdin = job.feed(job.order.stdin) if job.order.stdin else -1
            streams = [stdin, job.output(worker_frames.OUT), job.output(worker_frames.ERR)]
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.setsid()
                random.seed(0)  # the module reseeds itself after every fork
                main(job.order, streams, *arguments)
            except BaseException:  # a fork must never return into the server's loop
                traceback.print_exc()
            finally:
                exit_now(125)
        job.hand_over()
        return pid

    def _perform(self, order: JobOrder, streams: list[int], channel: int) -> None:
        os.chdir(self.folder or self.config["root"] + "/tmp")
        _be_expendable()
        rights.lower(self.config, is_hidden=order.job in (protocol.TEST, protocol.VERIFY))
        limit_cpu(order.limit_s)
        if streams[0] < 0:
            streams[0] = channel if channel >= 0 else os.open("/dev/null", os.O_RDONLY)
        for target, descriptor in enumerate(streams):
            os.dup2(descriptor, target)
        close_from(3)
        renew_streams()
        parts = parts_of(order.payload)
        if order.job != protocol.PROGRAM:
            named = dict(parts)
            if "root" in named:
                named["root"] = self.config["root"].encode() + named["root"]
            jobs.perform(order.job, named, self.folder)
        for name, text in parts:
            with open(name, "wb", buffering=0) as file:
                file.write(text)
        sys.path[0] = os.getcwd()
        execute(parts[0][1])

    # The interpreter that is kept.

    def _call_repl(self, job: Job) -> set[int]:
        """Runs one piece of code in it; returns the processes that are to be left alone."""
        if not self._repl:
            self._talk, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._repl = self._fork(job, self._serve_repl, theirs, has_streams=False)
            theirs.close()
        assert self._talk is not None, "made with the interpreter"
        order = job.order
        ends = [
            job.feed(order.payload),
            job.output(worker_frames.OUT),
            job.output(worker_frames.ERR),
        ]
        _signal_all(_descendants(), signal.SIGCONT)
        cpu_s = _cpu_s(_descendants())
        with suppress(OSError):  # one that does not read its orders runs into the limit
            go = protocol.GO.pack(order.run_id, order.limit_s, order.job, 0)
            protocol.send(self._talk, go, ends, socket.MSG_DONTWAIT)
        job.hand_over()
        self._wait(job, self._repl, self._talk)
        _stop_all()
        self._cpu_s = max(_cpu_s(_descendants()) - cpu_s, 0.0)
        if job.flags & protocol.FLAG_DONE:
            return _descendants()
        job.flags |= protocol.FLAG_FORGOT
        self._talk.close()
        self._repl, self._talk = 0, None
        return set()

    def _serve_repl(self, order: JobOrder, streams: list[int], theirs: socket.socket) -> None:
        os.chdir(self.folder)
        _be_expendable()
        rights.lower(self.config)
        renew_streams()
        jobs.serve_repl(theirs.detach(), self.folder)

    # Waiting.

    def _wait(self, job: Job, pid: int, talk: socket.socket | None = None) -> None:
        """Until the process ends, or says so, or has gone too far."""
        while not job.is_over:
            is_late = time.monotonic() >= job.deadline  # before it looks: it may stand still
            self._poll(job, talk)
            self._reap()
            if pid in self._ended:
                job.status = self._ended.pop(pid)
                job.end(0)
            elif is_late and not job.is_over:
                job.end(protocol.FLAG_TIMEOUT)
            elif self.config["watch_bytes"] and self._is_too_large(job):
                job.end(protocol.FLAG_MEMORY)

    def _poll(self, job: Job, talk: socket.socket | None) -> None:
        poller = select.poll()
        for descriptor in (self._wake, self._reader.descriptor, *job.outputs):
            poller.register(descriptor, select.POLLIN)
        for descriptor in job.feeds:
            poller.register(descriptor, select.POLLOUT)
        if talk is not None:
            poller.register(talk.fileno(), select.POLLIN)
        left_s = min(max(job.deadline - time.monotonic(), 0), _WATCH_PERIOD_S)
        ready = {descriptor for descriptor, _ in poller.poll(left_s * 1000 + 1)}
        if self._wake in ready:
            os.read(self._wake, 4096)
        if self._reader.descriptor in ready:
            self._listen(job)
        self._pump(job)
        if talk is not None and talk.fileno() in ready and not job.is_over:
            packet = talk.recv(64)
            if len(packet) == protocol.DONE.size and packet.startswith(job.order.run_id):
                job.status = packet[-1] << 8
                job.end(protocol.FLAG_DONE)
            elif packet:  # the program itself speaks here
                job.end(0)

    def _listen(self, job: Job) -> None:
        self._reader.fill()
        while (found := self._reader.take()) is not None:
            if found == (worker_frames.KILL, job.order.run_id):
                job.end(protocol.FLAG_KILLED)

    def _pump(self, job: Job) -> None:
        """Moves what is there, out of the pipes and into them."""
        for descriptor in list(job.outputs):
            kind = job.outputs[descriptor]
            while job.num_bytes[kind] <= job.order.max_output_bytes:
                try:
                    data = os.read(descriptor, _READ_BYTES)
                except BlockingIOError:
                    break
                if not data:
                    del job.outputs[descriptor]
                    os.close(descriptor)
                    break
                job.num_bytes[kind] += len(data)
                self._send(kind, data)
            else:
                job.end(protocol.FLAG_KILLED)
        for descriptor in list(job.feeds):
            self._feed(job, descriptor)

    def _feed(self, job: Job, descriptor: int) -> None:
        view = job.feeds[descriptor]
        try:
            view = view[os.write(descriptor, view[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:  # nobody reads it
            view = view[len(view) :]
        job.feeds[descriptor] = view
        if not view:
            del job.feeds[descriptor]
            os.close(descriptor)

    def _is_too_large(self, job: Job) -> bool:
        most = self.config["watch_bytes"]
        if self._memory is None:
            return _resident_bytes(_descendants()) > most
        if self._memory.most_bytes() <= most:
            return False
        standing = usage.stop_all()
        is_too_large = self._memory.exact_bytes(most, job.deadline) > most
        if not is_too_large:
            usage.resume(standing)
        return is_too_large

    def _num_oom_kills(self) -> int:
        """The kernel's count, where it shows one: its own limit came before the watch."""
        for path in self.config["oom_files"]:
            with suppress(OSError), open(path) as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0

    # Cleaning up.

    def _reap(self) -> None:
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._ended[pid] = status
            self._cpu_s += used.ru_utime + used.ru_stime
            self._maxrss = max(self._maxrss, used.ru_maxrss)

    def _clean(self, job: Job, standing: set[int]) -> None:
        """Kills all that the job left; ends the whole box where that does not help."""
        deadline, is_late = time.monotonic() + _CLEAN_LIMIT_S, False
        while alive := _descendants() - standing:
            if is_late:
                raise SystemExit(f"processes that cannot be killed: {sorted(alive)}")
            if os.getpid() == 1:
                usage.stop_all()  # else a program that forks fast enough outruns the loop
            _signal_all(alive, signal.SIGKILL)
            time.sleep(0.0005)
            self._reap()
            is_late = time.monotonic() > deadline
        self._reap()
        self._ended.clear()


def _wake_up(now_s: float, entropy: bytes) -> None:
    """A machine from a snapshot has the time and the random numbers of every other one."""
    time.clock_settime(time.CLOCK_REALTIME, now_s)
    with open("/dev/urandom", "wb", buffering=0) as device:
        fcntl.ioctl(
            device, _ADD_ENTROPY, struct.pack("ii", 8 * len(entropy), len(entropy)) + entropy
        )
        fcntl.ioctl(device, _RESEED)


def _be_expendable() -> None:
    """Offer this program to the kernel: where memory runs out it goes, not the server."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _descendants() -> set[int]:
    """Every process below this one; of an init these are all, but for a kernel's own threads."""
    own = os.getpid()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != str(own)]
    children: dict[int, list[int]] = {}
    for pid in pids:
        with suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [own]
    while todo:
        new = children.get(todo.pop(), [])
        found.update(new)
        todo += new
    return found


def _signal_all(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _stop_all() -> None:
    """Makes every process below this one stand still."""
    if os.getpid() == 1:
        usage.stop_all()
        return
    stopped: set[int] = set()
    while new := _descendants() - stopped:
        _signal_all(new, signal.SIGSTOP)
        stopped |= new


def _resident_bytes(pids: set[int]) -> int:
    pages = 0
    for pid in pids:
        with suppress(OSError, IndexError), open(f"/proc/{pid}/statm") as file:
            pages += int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def _cpu_s(pids: set[int]) -> float:
    ticks = 0
    for pid in pids:
        with suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
            ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def main(config: Mapping[str, Any]) -> NoReturn:
    """Serves until the host is gone. Standard input and output are the channel."""
    reader, out = frames.FrameReader(os.dup(0)), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)
    rights.keep_for_itself()
    os.environ.clear()
    os.environ.update(config["environment"])
    site.setquit()
    sys.argv[:] = [protocol.PROGRAM_NAME]
    sys.path[0] = "/nonexistent"
    server = GuestServer(config, reader, out)
    for name in [name for name in sys.modules if name.startswith("nanorl")]:
        del sys.modules[name]  # programs have a name space of their own
    gc.collect()
    gc.freeze()
    try:
        server.serve()
    except frames.ChannelError:  # the host is gone
        _end_all()
    exit_now(0)


def _end_all() -> None:
    """Kill all that is left below this process, which would die with it only if it were an init."""
    deadline = time.monotonic() + _CLEAN_LIMIT_S
    while (alive := _descendants()) and time.monotonic() < deadline:
        _signal_all(alive, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
