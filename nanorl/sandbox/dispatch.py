"""The thread that feeds the workers of a pool and reads what their programs print.

A thread, not an event loop's reader: programs are started and drained while the caller's loop is
inside a decoding step, any number of loops may come and go, and workers need a parent thread that
lives as long as they do. An execution costs it one memfd, two pipes and about four wake-ups.
Output is read here, capped in bytes; a result is believed only from the server's fixed struct.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol

from nanorl.sandbox import protocol
from nanorl.sandbox.base import ExecResult, SandboxFailure, SandboxSpec
from nanorl.sandbox.execution import Attempt, Execution, Stream
from nanorl.sandbox.outcome import Outcome, blame, judge

_START_LIMIT_S = 30.0
MAX_STARTS = 3
# Until then nobody looks at a program's output: what a short one prints fits into its pipes and is
# read at its end, in one wake-up instead of four.
_QUIET_S, _PIPE_BYTES = 0.01, 1 << 16


class State(Enum):
    DEAD = 0
    STARTING = 1
    IDLE = 2
    BUSY = 3


@dataclass(frozen=True)
class Size:
    """The number of workers: `least` are always there, up to `most` while executions wait; one of
    those ends when it has had nothing to do for `idle_s`."""

    least: int
    most: int
    idle_s: float


class ProgramWorker(Protocol):
    """A process that runs one program after the other behind its walls (bwrap.py)."""

    control: socket.socket
    """Our end of the conversation in protocol.py."""

    @property
    def memory_tier(self) -> str: ...

    def num_oom_kills(self) -> int:
        """Programs that the kernel has killed for their memory, since it started."""
        ...

    def messages(self) -> str:
        """The messages of a worker that did not start."""
        ...

    def close(self) -> None: ...


class WorkerSlot:
    """A place for one worker, and the execution that it tries at present."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = State.DEAD
        self.worker: ProgramWorker | None = None
        self.deadline = float("inf")
        self.watch_at = float("inf")  # when the attempt's output is to be looked at
        self.idle_since = 0.0
        self.is_asked = False  # whether it still is there; it has not answered yet
        self.num_runs = 0
        self.num_oom_kills = 0
        self.execution: Execution | None = None  # kept for this slot: it goes before the queue
        self.attempt: Attempt | None = None


class Dispatcher:
    """Owns the workers. `submit` and `close` may be called from any thread."""

    backstop_s = 2.0  # after the server's own limit: a server that does not answer is killed
    check_s = 5.0  # how often an idle worker is asked whether it still is there
    answer_s = 10.0  # and how long it may take to say so, on a busy machine

    def __init__(
        self, spec: SandboxSpec, size: Size, new_worker: Callable[[int], ProgramWorker]
    ) -> None:
        """`new_worker` starts the worker of that number, and returns before it is warm."""
        self.spec = spec
        self.size = size
        self._new_worker = new_worker
        self.start_error = ""
        self.memory_tier = ""
        self._slots = [WorkerSlot(index) for index in range(size.most)]
        self._queue: deque[Execution] = deque()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._prepare()
        self._is_closing = False
        self._owner = os.getpid()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._watch(self._wake, self._on_wake)
        self._thread = threading.Thread(target=self._main, name="sandbox", daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        """Make what a kind of dispatcher needs besides, before the thread starts."""

    def submit(self, execution: Execution) -> None:
        self._check_open()
        execution.future.add_done_callback(self._on_done)
        self._enqueue(execution)
        self._poke()
        if self._is_closing:  # meanwhile; the thread may have looked at the queue already
            fail(execution, SandboxFailure("the sandbox pool was closed"))

    def _enqueue(self, execution: Execution) -> None:
        self._queue.append(execution)

    def _check_open(self) -> None:
        if self._is_closing or os.getpid() != self._owner:
            raise SandboxFailure("the sandbox pool is closed, or belongs to the parent process")

    def close(self) -> None:
        """Ends all workers and fails what was waiting. May be called again."""
        if self._is_closing or os.getpid() != self._owner:
            return
        self._is_closing = True
        self._poke()
        self._thread.join()
        self._epoll.close()
        os.close(self._wake)

    def _poke(self) -> None:
        with contextlib.suppress(OSError):  # closed
            os.eventfd_write(self._wake, 1)

    # The thread.

    def _main(self) -> None:
        try:
            while not self._is_closing:
                self._feed()
                now = time.monotonic()  # before it looks at what has come: it may stand still
                for descriptor, _ in self._epoll.poll(self._left_s()):
                    handler = self._handlers.get(descriptor)
                    if handler is not None:
                        handler()
                self._enforce_deadlines(now)
        finally:
            self._is_closing = True
            waiting = [s.execution for s in self._slots if s.execution]
            running = [s.attempt.execution for s in self._slots if s.attempt]
            for slot in self._slots:
                self._stop(slot)
            for execution in [*self._abandon(), *waiting, *running]:
                fail(execution, SandboxFailure("the sandbox pool was closed"))

    def _abandon(self) -> list[Execution]:
        """Return the executions that were still waiting when the pool closed."""
        return list(self._queue)

    def _left_s(self) -> float:
        next_time = float("inf")
        for slot in self._slots:
            next_time = min(next_time, slot.deadline, slot.watch_at)
        return min(max(next_time - time.monotonic(), 0.0), 3600.0)

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for slot in self._slots:  # a cancelled execution must not hold its worker
            if slot.attempt is not None and slot.attempt.execution.future.cancelled():
                self._kill_attempt(slot, slot.attempt)

    def _on_done(self, future: Future[ExecResult]) -> None:
        if future.cancelled() and not self._is_closing:
            self._poke()

    def _feed(self) -> None:
        """Starts the workers that are missing and gives every idle one an execution."""
        for slot in self._slots:
            if slot.state is State.IDLE and (execution := self._next_execution(slot)):
                self._begin(slot, execution)
        starting = sum(slot.state is State.STARTING for slot in self._slots)
        for slot in self._slots:
            if slot.state is State.DEAD and self._is_wanted(slot, len(self._queue) - starting):
                self._start(slot)
                starting += 1

    def _is_wanted(self, slot: WorkerSlot, num_waiting: int) -> bool:
        """`num_waiting`: executions for which no worker is on its way."""
        if slot.index < self.size.least:
            return bool(slot.execution or self._queue or slot.num_runs == 0)
        return slot.execution is not None or num_waiting > 0

    def _next_execution(self, slot: WorkerSlot) -> Execution | None:
        execution, slot.execution = slot.execution, None
        while execution is None or execution.future.cancelled():
            if not self._queue:
                return None
            execution = self._queue.popleft()
        return execution

    def _start(self, slot: WorkerSlot) -> None:
        try:
            slot.worker = self._new_worker(slot.index)
        except (SandboxFailure, OSError) as error:
            self._on_start_failure(slot, str(error))
            return
        self.memory_tier = slot.worker.memory_tier
        slot.state = State.STARTING
        slot.deadline = time.monotonic() + _START_LIMIT_S
        self._watch(slot.worker.control.fileno(), partial(self._on_control, slot))

    def _on_start_failure(self, slot: WorkerSlot, reason: str, *, is_silent: bool = False) -> None:
        """Nothing the program did: its execution fails as machinery; the next one tries again. A
        worker that says nothing (`is_silent`) was killed or stopped: another one is tried."""
        self.start_error = reason
        self._stop(slot)
        slot.num_runs = -1
        execution = slot.execution or (self._queue.popleft() if self._queue else None)
        slot.execution = None
        if execution is None:
            return
        execution.num_starts += 1
        if is_silent and execution.num_starts < MAX_STARTS:
            slot.execution = execution
        else:
            fail(execution, SandboxFailure(f"the sandbox worker does not start: {reason}"))

    def _on_control(self, slot: WorkerSlot) -> None:
        assert slot.worker is not None, "a stopped worker is not watched"
        try:
            packet = slot.worker.control.recv(256, socket.MSG_DONTWAIT)
        except BlockingIOError:  # the event was for a descriptor of the same number
            return
        except OSError:
            packet = b""
        if packet == protocol.PONG:
            if slot.state is State.IDLE:
                self._rest(slot, slot.idle_since)
        elif slot.state is State.STARTING:
            if packet == protocol.HELLO:
                self._rest(slot, time.monotonic())
                slot.num_oom_kills = slot.worker.num_oom_kills()
            else:
                said = slot.worker.messages()
                self._on_start_failure(slot, said, is_silent=not said)
        elif slot.state is State.BUSY and len(packet) == protocol.RESULT.size:
            self._finish(slot, packet)
        elif slot.state is State.BUSY:
            self._on_broken_worker(slot)
        else:
            self._on_idle_end(slot)

    def _rest(self, slot: WorkerSlot, idle_since: float) -> None:
        """The worker has nothing to do, and is looked at again after a while."""
        slot.state, slot.idle_since, slot.is_asked = State.IDLE, idle_since, False
        slot.deadline = time.monotonic() + self.check_s
        if slot.index >= self.size.least:
            slot.deadline = min(slot.deadline, idle_since + self.size.idle_s)

    def _look_at_idle(self, slot: WorkerSlot, now: float) -> None:
        """Lets go of a worker too many, or of one that does not answer; asks any other."""
        assert slot.worker is not None, "an idle slot has a worker"
        if slot.index >= self.size.least and now >= slot.idle_since + self.size.idle_s:
            self._stop(slot)
        elif slot.is_asked:
            self._on_idle_end(slot)
        else:
            slot.is_asked, slot.deadline = True, time.monotonic() + self.answer_s
            with contextlib.suppress(OSError):  # a dead one shows up on its control socket
                slot.worker.control.send(protocol.PING, socket.MSG_DONTWAIT)

    def _on_idle_end(self, slot: WorkerSlot) -> None:
        """A worker ended by itself, or does not answer; whoever needs one gets another."""
        self._stop(slot)

    def _begin(self, slot: WorkerSlot, execution: Execution) -> None:
        """Hands one program to an idle worker."""
        assert slot.worker is not None, "an idle slot has a worker"
        attempt = slot.attempt = Attempt(execution)
        slot.execution = None
        try:
            attempt.start(slot.worker.control)
        except (BrokenPipeError, ConnectionResetError):
            self._on_idle_death(slot, attempt)
            return
        except OSError as error:
            self._end_attempt(slot)
            fail(execution, SandboxFailure(f"the host cannot start a program: {error}"))
            return
        slot.state, now = State.BUSY, time.monotonic()
        slot.deadline = now + execution.timeout_s + self.backstop_s
        slot.watch_at = now + _QUIET_S if execution.max_output_bytes <= _PIPE_BYTES else now

    def _watch_output(self, slot: WorkerSlot) -> None:
        assert slot.attempt is not None, "only an attempt sets the time"
        slot.watch_at = float("inf")
        for stream in slot.attempt.streams:
            self._watch(stream.descriptor, partial(self._on_output, slot, slot.attempt, stream))

    def _on_output(self, slot: WorkerSlot, attempt: Attempt, stream: Stream) -> None:
        stream.read()
        if not stream.is_open or len(stream.data) > attempt.execution.max_output_bytes:
            self._unwatch(stream.descriptor)
            if stream.is_open:
                self._kill_attempt(slot, attempt)
            else:
                stream.close()

    def _kill_attempt(self, slot: WorkerSlot, attempt: Attempt) -> None:
        assert slot.worker is not None, "a busy slot has a worker"
        with contextlib.suppress(OSError):  # a dead worker shows up on its control socket
            slot.worker.control.send(protocol.KILL.pack(b"K", attempt.run_id), socket.MSG_DONTWAIT)

    def _finish(self, slot: WorkerSlot, packet: bytes) -> None:
        """The server's word has come: nothing of the program is alive, what it wrote is here."""
        attempt = slot.attempt
        assert slot.worker is not None and attempt is not None, "a busy slot has both"
        num_oom_kills = slot.worker.num_oom_kills()
        outcome = Outcome.unpack(packet, is_oom=num_oom_kills > slot.num_oom_kills)
        if outcome.run_id != attempt.run_id:
            self._on_broken_worker(slot)
            return
        slot.num_oom_kills = num_oom_kills
        limit = attempt.execution.max_output_bytes
        stdout, stderr = (stream.drain(limit) for stream in attempt.streams)
        self._end_attempt(slot)
        slot.num_runs += 1
        self._rest(slot, time.monotonic())
        if slot.num_runs >= self.spec.max_runs_per_worker:
            self._stop(slot)
        succeed(attempt.execution, judge(outcome, stdout, stderr, limit, protocol.TIER))

    def _on_broken_worker(self, slot: WorkerSlot) -> None:
        """The worker broke under a program: once more on a fresh one, then it is its doing."""
        attempt = slot.attempt
        assert slot.worker is not None and attempt is not None, "a busy slot has both"
        is_oom = slot.worker.num_oom_kills() > slot.num_oom_kills
        self._stop(slot)
        attempt.execution.num_errors += 1
        if attempt.execution.num_errors < 2:
            slot.execution = attempt.execution
        else:
            succeed(attempt.execution, blame(is_oom, protocol.TIER))

    def _on_idle_death(self, slot: WorkerSlot, attempt: Attempt) -> None:
        """The worker died while nothing ran in it; that is not the next program's doing."""
        self._stop(slot)
        attempt.execution.num_starts += 1
        if attempt.execution.num_starts < MAX_STARTS:
            slot.execution = attempt.execution
        else:
            fail(attempt.execution, SandboxFailure("sandbox workers die while they wait"))

    def _enforce_deadlines(self, now: float) -> None:
        """Act on what was due at `now` and has not come since."""
        for slot in list(self._slots):
            if now >= slot.watch_at:
                self._watch_output(slot)
            if now < slot.deadline:
                continue
            if slot.state is State.BUSY:
                self._on_broken_worker(slot)
            elif slot.state is State.IDLE:
                self._look_at_idle(slot, now)
            else:
                said = f"not ready after {_START_LIMIT_S:.0f} s"
                self._on_start_failure(slot, said, is_silent=True)

    def _end_attempt(self, slot: WorkerSlot) -> None:
        attempt, slot.attempt, slot.watch_at = slot.attempt, None, float("inf")
        for stream in attempt.streams if attempt else ():
            self._unwatch(stream.descriptor)
            stream.close()

    def _stop(self, slot: WorkerSlot) -> None:
        slot.state, slot.deadline, slot.num_runs = State.DEAD, float("inf"), 0
        self._end_attempt(slot)
        if slot.worker is not None:
            self._unwatch(slot.worker.control.fileno())
            slot.worker.close()
            slot.worker = None

    def _watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers[descriptor] = handler
        self._epoll.register(descriptor, select.EPOLLIN)

    def _unwatch(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)


def succeed(execution: Execution, result: ExecResult) -> None:
    """Gives the caller its result, unless it has gone."""
    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
        execution.future.set_result(result)


def fail(execution: Execution, error: SandboxFailure) -> None:
    """Tells the caller that the machinery failed, unless it has gone."""
    with contextlib.suppress(InvalidStateError):
        execution.future.set_exception(error)
