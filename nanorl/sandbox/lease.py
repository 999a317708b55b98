"""The dispatcher of sessions: each open session holds one worker, from a small warm supply.

A lease is asked for, granted in order of asking once fewer than `max_sessions` are held, and given
back. While it is held, executions of its session run on its worker, in order. Copies that only
grade (grading.py) have a bound of their own: else sixteen sessions that all want to be graded
would wait for one another.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from nanorl.sandbox import protocol
from nanorl.sandbox.base import SandboxFailure
from nanorl.sandbox.dispatch import (
    MAX_STARTS,
    Attempt,
    Dispatcher,
    State,
    WorkerSlot,
    fail,
    succeed,
)
from nanorl.sandbox.execution import Execution
from nanorl.sandbox.outcome import blame

_NUM_GRADERS = 4


class SessionLease:
    """One session's right to a worker."""

    def __init__(self, is_grader: bool) -> None:
        self.is_grader = is_grader
        self.queue: deque[Execution] = deque()
        self.num_breaks = 0  # of its worker; what the session held is gone each time
        self.error = ""  # of the machinery: the session is over
        self.is_returned = False
        self.returned: Future[None] = Future()

    def end(self) -> None:
        with suppress(InvalidStateError):
            self.returned.set_result(None)


class _Place(WorkerSlot):
    """A slot that a lease may hold."""

    lease: SessionLease | None = None
    num_starts = 0  # that came to nothing


class SessionDispatcher(Dispatcher):
    """Grows and shrinks with the sessions. All methods may be called from any thread."""

    backstop_s = 10.0  # a session has no second attempt, so a busy machine gets more time

    def _prepare(self) -> None:
        self._places: list[_Place] = []
        self._waiting: deque[SessionLease] = deque()
        self._is_warming = True

    def lease(self, is_grader: bool = False) -> SessionLease:
        self._check_open()
        lease = SessionLease(is_grader)
        self._is_warming = True
        self._waiting.append(lease)
        self._poke()
        return lease

    def submit_to(self, lease: SessionLease, execution: Execution) -> None:
        self._check_open()
        if lease.error or lease.is_returned:
            raise SandboxFailure(lease.error or "the session is closed")
        execution.future.add_done_callback(self._on_done)
        lease.queue.append(execution)
        self._poke()
        if self._is_closing:  # meanwhile; the thread may have looked at the queue already
            fail(execution, SandboxFailure("the sandbox pool was closed"))

    def give_back(self, lease: SessionLease) -> Future[None]:
        """Ends everything in the session; the future is done when nothing of it is left."""
        lease.is_returned = True
        self._poke()
        if self._is_closing:
            lease.end()
        return lease.returned

    # The thread.

    def _feed(self) -> None:
        self._take_back()
        self._grant()
        if self._is_warming and (self._places or self._waiting):
            num_free = sum(place.lease is None for place in self._places)
            for _ in range(self.spec.warm_sessions - num_free):
                self._add_place()
        for place in list(self._places):
            if place.state is State.DEAD:
                self._start(place)
        for place in self._places:
            if place.state is State.IDLE and (execution := self._next_execution(place)):
                self._begin(place, execution)

    def _take_back(self) -> None:
        for place in [p for p in self._places if p.lease and p.lease.is_returned]:
            lease = place.lease
            running = [place.attempt.execution] if place.attempt else []
            self._remove(place)
            assert lease is not None, "filtered above"
            for execution in [*running, *lease.queue]:
                fail(execution, SandboxFailure("the session was closed"))
            lease.end()
        for lease in [lease for lease in self._waiting if lease.is_returned]:
            self._waiting.remove(lease)
            for execution in lease.queue:
                fail(execution, SandboxFailure("the session was closed"))
            lease.end()

    def _grant(self) -> None:
        for lease in list(self._waiting):
            most = _NUM_GRADERS if lease.is_grader else self.spec.max_sessions
            held = [p.lease for p in self._places if p.lease]
            if sum(each.is_grader == lease.is_grader for each in held) >= most:
                continue
            free = [place for place in self._places if place.lease is None]
            free.sort(key=lambda place: place.state is not State.IDLE)
            place = free[0] if free else self._add_place()
            place.lease = lease
            place.num_starts = 0  # failures before anybody asked are not this session's
            self._waiting.remove(lease)

    def _add_place(self) -> _Place:
        taken = {place.index for place in self._places}
        index = next(n for n in range(len(taken) + 1) if n not in taken)
        place = _Place(index)
        self._places.append(place)
        self._slots.append(place)
        return place

    def _remove(self, place: _Place) -> None:
        self._stop(place)
        self._places.remove(place)
        self._slots.remove(place)

    def _next_execution(self, slot: WorkerSlot) -> Execution | None:
        assert isinstance(slot, _Place), "all slots are made in _add_place"
        while slot.lease and slot.lease.queue:
            execution = slot.lease.queue.popleft()
            if not execution.future.cancelled():
                return execution
        return None

    def _end_lease(self, slot: WorkerSlot, reason: str) -> None:
        """The machinery failed: the session is over, and so is all that it waited for."""
        assert isinstance(slot, _Place), "all slots are made in _add_place"
        lease, slot.lease = slot.lease, None
        attempt = slot.attempt
        self._remove(slot)
        if attempt is not None:
            fail(attempt.execution, SandboxFailure(reason))
        if lease is None:
            self._is_warming = False  # until somebody asks: it would fail for ever
            return
        lease.error = reason
        for execution in lease.queue:
            fail(execution, SandboxFailure(reason))
        lease.end()

    def _on_start_failure(self, slot: WorkerSlot, reason: str, *, is_silent: bool = False) -> None:
        assert isinstance(slot, _Place), "all slots are made in _add_place"
        self.start_error = reason
        slot.num_starts += 1
        if is_silent and slot.num_starts < MAX_STARTS:  # it was killed or stopped: another one
            self._stop(slot)
            return
        self._end_lease(slot, f"the session's worker does not start: {reason}")

    def _on_idle_end(self, slot: WorkerSlot) -> None:
        self._end_lease(slot, "the session's worker ended while nothing ran in it")

    def _on_idle_death(self, slot: WorkerSlot, attempt: Attempt) -> None:
        self._on_idle_end(slot)

    def _on_broken_worker(self, slot: WorkerSlot) -> None:
        """The program broke its worker: no second attempt, since its files are gone as well."""
        attempt = slot.attempt
        assert isinstance(slot, _Place) and slot.worker and attempt, "a busy slot has them"
        is_oom = slot.worker.num_oom_kills() > slot.num_oom_kills
        self._stop(slot)
        lost = [attempt.execution]
        if slot.lease is not None:
            slot.lease.num_breaks += 1
            lost += slot.lease.queue
            slot.lease.queue.clear()
        for execution in lost:
            succeed(execution, blame(is_oom, protocol.TIER))

    def _abandon(self) -> list[Execution]:
        leases = [*self._waiting, *(place.lease for place in self._places if place.lease)]
        for lease in leases:
            lease.end()
        return [execution for lease in leases for execution in lease.queue]
