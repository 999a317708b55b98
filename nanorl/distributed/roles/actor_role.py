"""A role in a process of its own, under supervision: what happens when that dies or hangs.

`ActorRole.call` is called like any role's, and outlives the actor: a call that was under way
when the process died is made again on its successor. That is right for roles whose calls may be
repeated: playing a group gives the same rollouts (a sampled token depends on its request's seed and
position alone), storing a group replaces it by itself, a reference has no state. A trainer is
not like that: its ranks go back to the newest checkpoint together (cluster.py, run.py).

Deaths are seen through the scheduler's futures, in milliseconds. A process that lives and does not
answer (stopped, swapped out, deadlocked) is found by a heartbeat, which asks the role itself
between two pieces of its work, and is then killed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nanorl.distributed.roles.role import RoleLost
from nanorl.observability.monitor.monitor_control import RoleKind, RoleState, RoleStatus
from nanosched import ActorHandle, Scheduler, TaskError, WorkerDied

A = TypeVar("A")
OnRestart = Callable[["ActorRole[Any]", str], None]
"""Is told which role is started again, and why."""
MOST_FAILURES = 2
"""Starts that may fail one after the other, each from scratch, before the run gives up."""
MOST_COLLAPSES = 5
"""Starts that may be cut off one after the other because the process that starts all ended."""
NUM_LISTENINGS = 4
"""A role's time to answer is waited for in so many parts. The clock goes on while the driver itself
is stopped: one part of that time then says nothing of the role."""


class Attempts:
    """Counts starts that failed one after the other. Where the process that starts all others has
    ended meanwhile, it took everything with it: that is counted, but as nobody's own failure."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._collapses_seen = scheduler.num_server_deaths
        self._num_failures = self._num_collapses = 0

    def fail(self) -> bool:
        """One has failed; whether another may be made."""
        seen, self._collapses_seen = self._collapses_seen, self._scheduler.num_server_deaths
        if self._collapses_seen > seen:
            self._num_collapses += 1
        else:
            self._num_failures += 1
        return self._num_failures < MOST_FAILURES and self._num_collapses < MOST_COLLAPSES

    def __str__(self) -> str:
        return f"{self._num_failures + self._num_collapses} times"


class ActorRole(Generic[A]):
    """An actor with a successor. `start` makes one that is ready for calls."""

    def __init__(
        self,
        name: str,
        kind: RoleKind,
        scheduler: Scheduler,
        start: Callable[[], Awaitable[ActorHandle[A]]],
        *,
        on_restart: OnRestart | None = None,
    ) -> None:
        self.name, self.kind = name, kind
        self.num_restarts = 0
        self.is_closed = False
        self._scheduler, self._start, self._on_restart = scheduler, start, on_restart
        self._handle: ActorHandle[A] | None = None
        self._starting = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._heartbeat: Callable[..., Any] | None = None
        self.answer: Mapping[str, Any] = {}
        """What the actor last said of itself (its heartbeat)."""

    @property
    def current(self) -> ActorHandle[A] | None:
        """The actor, if one is ready."""
        return self._handle

    def status(self) -> RoleStatus:
        """The status of the role, as it last said itself."""
        return status_of(self.name, self.kind, self.state, self.num_restarts, self.answer)

    @property
    def state(self) -> RoleState:
        if self.is_closed:
            return "dead"
        return "starting" if self._handle is None else "ready"

    async def handle(self) -> ActorHandle[A]:
        """The actor that serves now; starts one where there is none."""
        async with self._starting:
            if self.is_closed:
                raise RoleLost(f"{self.name} is closed and has no successor")
            if self._handle is None:
                self._handle = await self._start_again_and_again()
            return self._handle

    async def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method, again on a successor if the actor dies. Raises what the method raised."""
        while True:
            handle = await self.handle()
            try:
                return await handle.call(method, *args, **kwargs)
            except TaskError as error:
                raise error.cause from None
            except WorkerDied as died:
                self.replace(handle, str(died))

    def replace(self, handle: ActorHandle[A], why: str) -> None:
        """Forget an actor that is dead, unless that has been done; the next call starts another."""
        if self._handle is not handle or self.is_closed:
            return
        self._handle = None
        self._tell(why)

    def _tell(self, why: str) -> None:
        self.num_restarts += 1
        if self._on_restart is not None:
            self._on_restart(self, why)

    async def _start_again_and_again(self) -> ActorHandle[A]:
        attempts = Attempts(self._scheduler)
        while True:
            try:
                return await self._start()
            except WorkerDied as died:
                if not attempts.fail():
                    raise RoleLost(
                        f"{self.name} died {attempts} while it started, the last time: "
                        f"{died}. Look at the messages above (memory?), then go on with --resume"
                    ) from died
                self._tell(str(died))
            except TaskError as error:
                raise error.cause from None

    # -- supervision -------------------------------------------------------------------------

    def watch(
        self, heartbeat: Callable[..., Any], every_s: float, hang_s: float
    ) -> asyncio.Task[None]:
        """From now on a successor is started as soon as the actor dies or stops answering. The
        task ends with an error if none can be started, else when the role is closed."""
        self._heartbeat = heartbeat
        if self._watch is None:
            self._watch = asyncio.create_task(
                self._watch_forever(heartbeat, every_s, hang_s), name=f"watch {self.name}"
            )
        return self._watch

    async def _watch_forever(
        self, heartbeat: Callable[..., Any], every_s: float, hang_s: float
    ) -> None:
        while not self.is_closed:
            handle = await self.handle()
            pulse = Pulse(heartbeat, every_s, hang_s, self._hear)
            why = await until_dead(self._scheduler, handle, pulse)
            self.replace(handle, why)

    async def ask(self) -> None:
        """Have the actor say now how it is, if one is there and under watch."""
        if self._handle is not None and self._heartbeat is not None:
            answer = await heard(self._handle.call(self._heartbeat))
            if isinstance(answer, Mapping):
                self._hear(answer)

    def _hear(self, answer: Mapping[str, Any]) -> None:
        self.answer = answer

    def close(self) -> None:
        """No successor any more. The actor ends with its scheduler."""
        self.is_closed = True
        if self._watch is not None:
            self._watch.cancel()


@asynccontextmanager
async def limited_start(name: str, start_s: float) -> AsyncIterator[None]:
    """Inside, a process may take so long to become ready; WorkerDied after that. A process that
    does not answer yet has no heartbeat by which a hang could be seen."""
    limit = asyncio.timeout(start_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise WorkerDied(f"{name} was not ready after {start_s:g} s, so it was killed") from error


@asynccontextmanager
async def getting_ready(
    scheduler: Scheduler, handle: ActorHandle[A], name: str, start_s: float
) -> AsyncIterator[ActorHandle[A]]:
    """Inside, a new actor gets ready, in `start_s`. If that fails or is given up, nobody will ever
    use it, so it is killed: one that is stopped would stay."""
    try:
        async with limited_start(name, start_s):
            yield handle
    except BaseException:  # a cancellation too
        scheduler.kill(handle)
        raise


def status_of(
    name: str, kind: RoleKind, state: RoleState, restarts: int, answer: Mapping[str, Any]
) -> RoleStatus:
    """Read the status of a role from a heartbeat's answer; one that was not heard yet is taken to
    be on this machine."""
    metrics = dict(answer)
    pid, host = metrics.pop("pid", None), metrics.pop("host", None)
    return RoleStatus(
        name=name,
        kind=kind,
        state=state,
        restarts=restarts,
        pid=None if pid is None else int(pid),
        host=host or socket.gethostname(),
        metrics=metrics,
    )


@dataclass(frozen=True)
class Pulse:
    """The way to ask an actor whether it still works: a call of `heartbeat` every `every_s`
    seconds, each of which may take `hang_s`. `hear` is told the answers."""

    heartbeat: Callable[..., Any]
    every_s: float
    hang_s: float
    hear: Callable[[Mapping[str, Any]], None]


async def until_dead(scheduler: Scheduler, handle: ActorHandle[Any], pulse: Pulse) -> str:
    """Ask again and again until the actor is dead, and kill one that does not answer. Returns why
    it died."""
    death = asyncio.ensure_future(heard(scheduler.death(handle)))
    try:
        while not death.done():
            await asyncio.wait({death}, timeout=pulse.every_s)
            if death.done():
                break
            answer = asyncio.ensure_future(heard(handle.call(pulse.heartbeat)))
            for _ in range(NUM_LISTENINGS):
                done, _ = await asyncio.wait(
                    {death, answer},
                    timeout=pulse.hang_s / NUM_LISTENINGS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if done:
                    break
            if answer.done() and isinstance(answer.result(), Mapping):
                pulse.hear(answer.result())
            elif not answer.done() and not death.done():
                answer.cancel()
                scheduler.kill(handle)
                return f"no answer for {pulse.hang_s:g} s, so it was killed"
        return str(death.result())
    finally:
        death.cancel()


async def heard(future: Any) -> Any:
    """Waits for a call and returns its value, or its error as a value."""
    try:
        return await future
    except (TaskError, WorkerDied) as error:
        return error


async def ended(call: Any) -> None:
    """Wait for a call whose actor may be dead; its successor, if any, is told anyhow."""
    with suppress(WorkerDied):
        await call
