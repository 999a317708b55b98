"""`WorkerPool`: processes with somebody else's code, a deadline for each call, and no mercy.

    pool = WorkerPool(ScoreHost, ("my_rewards:by_length",), num_workers=2, limits=HostingLimits())
    await pool.start()                       # ValueError: the code cannot be loaded
    await pool.call("score", rollout)        # of the shared object of some worker
    episode = await pool.open()              # an object that lives in one of them
    await episode.call("step", "4")
    pool.close()

A worker that does not answer in time, dies or returns what is too large or unreadable is killed,
with all that it started, and made anew for the next call. Its calls under way, and later ones to
objects that it held, raise `InfrastructureError`: their rollouts are played again.
Left out: a limit on memory, and isolation (see host_worker.py). One event loop serves a pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from nanorl.envs.hosting.host_worker import CodeWorker, WorkerReply
from nanorl.types import InfrastructureError
from nanosched import ActorHandle, Future, Scheduler, TaskError, WorkerDied

MAX_MOVES = 20  # of a call, to workers that then die too before its turn comes
MAX_STARTS = 3  # of a worker that dies before it has loaded the code


@dataclass(frozen=True, kw_only=True)
class HostingLimits:
    """The limits of a worker."""

    deadline_s: float = 60.0
    """Of one call, from when its worker has finished those before it."""
    start_s: float = 120.0
    """Of loading the code, heavy imports included."""
    max_result_bytes: int = 16 << 20
    """Of one result, as it is sent."""

    def __post_init__(self) -> None:
        for name in ("deadline_s", "start_s", "max_result_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be positive and finite")


class BystanderError(InfrastructureError):
    """The worker of a call was ended for what another call did."""


class _Life:
    """One life of a worker: a process, and the calls under way in it in the order of sending."""

    def __init__(self, handle: ActorHandle[CodeWorker], kill: Callable[[], None]) -> None:
        self.handle = handle
        self.pid: int | None = None
        self.reason: str | None = None  # why it ended
        self.culprit: int | None = None  # the call that is to blame
        self.has_died = False  # and not been ended
        self.num_objects = 0
        self._kill = kill
        self._numbers = itertools.count()
        self._since: dict[int, float] = {}  # call -> when its turn came

    @property
    def num_calls(self) -> int:
        return len(self._since)

    async def ask(self, what: str, future: Future[WorkerReply], limit_s: float) -> Any:
        """The result of a call that was sent last, or InfrastructureError. Somebody who stops
        waiting leaves the watch on the call as it is."""
        reply = await asyncio.shield(asyncio.ensure_future(self._watch(what, future, limit_s)))
        if reply.is_unfit:
            self.end(f"{what} {reply.error}")
        if reply.error is not None:
            kind = BystanderError if reply.is_bystander else InfrastructureError
            raise kind(f"{what}: {reply.error}")
        try:
            return pickle.loads(reply.data)
        except Exception as error:  # whatever pickle raises, of a class that only the worker has
            self.end(f"{what} returned what cannot be read")
            raise InfrastructureError(f"{what} returned what cannot be read: {error}") from error

    async def _watch(self, what: str, future: Future[WorkerReply], limit_s: float) -> WorkerReply:
        number = next(self._numbers)
        self._since[number] = time.monotonic()
        answer = asyncio.ensure_future(self._answer(number, future))
        is_late = False
        while not answer.done():
            left_s = self._since[number] + limit_s - time.monotonic()
            if left_s <= 0 and number == min(self._since):  # nobody waits behind another
                if is_late:
                    self.end(f"{what} took longer than {limit_s:g} s", number)
                is_late = True  # or this process stood still, and the answer is about to be read
            await asyncio.wait({answer}, timeout=max(left_s, 0.05))
        return answer.result()

    async def _answer(self, number: int, future: Future[WorkerReply]) -> WorkerReply:
        try:
            return await future
        except TaskError as error:
            return WorkerReply(error=str(error))
        except WorkerDied as died:
            self.has_died = self.has_died or self.reason is None
            # Code that blocks runs call after call: the oldest one was at work when it died.
            self.end(str(died), min(self._since, default=number))
            return WorkerReply(
                error=f"its worker was ended: {self.reason}",
                is_bystander=number != self.culprit,
            )
        finally:  # and not when its watch wakes: whoever dies next would find it at work
            self._turn_ends(number)

    def _turn_ends(self, number: int) -> None:
        """Code that blocks runs call after call: the clocks of those behind start now."""
        del self._since[number]
        now = time.monotonic()
        for later in self._since:
            if later > number:
                self._since[later] = now

    def end(self, reason: str, culprit: int | None = None) -> None:
        """Kill the process and everything that it started, for the doing of the call `culprit`.
        Ending it again is fine."""
        if self.reason is None:
            self.reason, self.culprit = reason, culprit
            _kill_group(self.pid)
            self._kill()


class HostedObject:
    """An object in one of the workers, until it is closed or the worker ends."""

    def __init__(self, life: _Life, number: int, limit_s: float) -> None:
        self._life, self._number, self._limit_s = life, number, limit_s
        self._is_open = True

    async def call(self, method: str, *args: Any) -> Any:
        """The method's result; InfrastructureError where there is none."""
        if self._life.reason is not None:
            raise InfrastructureError(f"{method}: its worker was ended: {self._life.reason}")
        future = self._life.handle.call(CodeWorker.call, self._number, method, args)
        return await self._life.ask(method, future, self._limit_s)

    def close(self) -> None:
        """Have the worker forget it. Closing twice is fine."""
        if self._is_open:
            self._is_open = False
            self._life.num_objects -= 1
            if self._life.reason is None:
                self._life.handle.call(CodeWorker.drop, self._number)


class WorkerPool:
    """`num_workers` processes, each with an object `factory(*args)` and what `open` makes of it.

    Factory and arguments are pickled: a class by its name, so its module is imported there.
    """

    def __init__(
        self,
        factory: Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        num_workers: int = 2,
        limits: HostingLimits | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        """`preload` names modules that every worker finds imported: one that is made anew would
        spend seconds on heavy ones."""
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: must be at least 1")
        self.limits = limits or HostingLimits()
        self._factory, self._args = factory, args
        self._scheduler = Scheduler(
            backend="local", preload=("nanorl.envs.hosting.host_worker", *preload)
        )
        self._lives: list[_Life | None] = [None] * num_workers
        self._locks = [asyncio.Lock() for _ in range(num_workers)]
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Start all workers. ValueError where the code cannot be loaded, which says why."""
        try:
            for place in range(len(self._lives)):  # the first says what is wrong with the code
                await self._life(place)
        except InfrastructureError as error:
            raise ValueError(str(error)) from error

    async def call(self, method: str, *args: Any) -> Any:
        """Call the shared object of the worker with the least to do. InfrastructureError where it
        raises, takes too long, or takes its worker down; one whose worker is ended for another's
        doing is called again elsewhere."""
        for _ in range(MAX_MOVES):
            life = await self._life(self._least(lambda life: life.num_calls))
            future = life.handle.call(CodeWorker.call, None, method, args)
            with contextlib.suppress(BystanderError):
                return await life.ask(method, future, self.limits.deadline_s)
        raise InfrastructureError(f"{method}: {MAX_MOVES} workers died while it waited its turn")

    async def open(self, *args: Any) -> HostedObject:
        """`shared.open(*args)` in the worker with the fewest such objects."""
        life = await self._life(self._least(lambda life: life.num_objects))
        number = next(self._numbers)
        opened = HostedObject(life, number, self.limits.deadline_s)
        life.num_objects += 1
        try:
            future = life.handle.call(CodeWorker.open, number, args)
            await life.ask("open", future, self.limits.deadline_s)
        except BaseException:  # a cancellation too: the object may be there
            opened.close()
            raise
        return opened

    def close(self) -> None:
        """End all workers. Closing twice is fine."""
        for life in self._lives:
            if life is not None:
                life.end("the pool was closed")
        self._scheduler.close()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _least(self, load: Callable[[_Life], int]) -> int:
        """The place with the smallest load; one without a worker has none."""

        def load_at(place: int) -> int:
            life = self._lives[place]
            return 0 if life is None or life.reason is not None else load(life)

        return min(range(len(self._lives)), key=load_at)

    async def _life(self, place: int) -> _Life:
        """The living worker at that place, made if there is none."""
        async with self._locks[place]:
            life = self._lives[place]
            if life is None or life.reason is not None:
                life = self._lives[place] = await self._begin()
            return life

    async def _begin(self) -> _Life:
        """Whoever dies before it has loaded the code may be somebody's victim: then another one."""
        for _ in range(MAX_STARTS - 1):
            with contextlib.suppress(WorkerDied):
                return await self._begin_one()
        try:
            return await self._begin_one()
        except WorkerDied as died:
            raise InfrastructureError(f"no worker could be started: {died}") from died

    async def _begin_one(self) -> _Life:
        handle = self._scheduler.actor(CodeWorker).remote(self.limits.max_result_bytes)
        life = _Life(handle, lambda: self._scheduler.kill(handle))
        try:
            life.pid = await handle.call(CodeWorker.pid)
            future = handle.call(CodeWorker.make, self._factory, self._args)
            await life.ask("loading the code", future, self.limits.start_s)
        except BaseException as error:  # a cancellation too: nobody has the worker yet
            life.end("it did not start")
            if life.has_died:
                raise WorkerDied(str(error)) from error
            raise
        return life


def _kill_group(leader: int | None) -> None:
    """Kill the process group that the worker leads or led: while a member lives, the kernel gives
    its number to nobody else, so a process of that number which leads no session is a stranger."""
    if leader is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if not Path(f"/proc/{leader}").exists() or os.getsid(leader) == leader:
            os.killpg(leader, signal.SIGKILL)
