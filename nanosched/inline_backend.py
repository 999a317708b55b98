"""The `inline` back end: actors are objects of this process, calls run in this thread.

A synchronous method runs inside `.remote()`; an `async` method becomes a task of the running event
loop, or, where none runs, of a private loop that `get` and `wait` drive. Same promises as a back
end of processes: calls of one actor start in the order they were made, a constructor's error
surfaces at the first call, a future passed as an argument is replaced by its value (nested ones
are not), a dead actor's calls fail with WorkerDied and are never repeated, and an actor whose last
handle is gone ends. Resources are accounted as on a machine of processes: an actor whose share is
taken is constructed when others end. Left out, because everything shares one process: devices are
not hidden, and arguments and results are passed by reference, so neither side may change them.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from asyncio import FIRST_COMPLETED
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nanosched.errors import GetTimeout, SchedulerError, TaskError, WorkerDied
from nanosched.future import Future, dereference, futures_in
from nanosched.ledger import Lease, Machine
from nanosched.resources import ActorOptions, PlacementGroup, Resources


@dataclass(kw_only=True, eq=False)
class _Call:
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    future: Future[Any]

    def pending_inputs(self) -> list[Future[Any]]:
        return [f for f in futures_in(self.args, self.kwargs) if not f.is_done()]


@dataclass(kw_only=True, eq=False)
class InlineActor:
    """One actor: its object, and the line of calls that wait for their inputs.

    `error` is what later calls raise; `ended` settles when the actor is dead for good.
    """

    backend: InlineBackend
    cls: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: ActorOptions
    restarts_left: int
    lease: Lease | None = None
    instance: Any = None
    error: SchedulerError | None = None
    ended: Future[str] = field(default_factory=lambda: Future("death"))
    calls: deque[_Call] = field(default_factory=deque)
    tasks: dict[asyncio.Task[None], Future[Any]] = field(default_factory=dict)
    is_pumping: bool = False
    has_started: bool = False
    has_handle: bool = True

    @property
    def label(self) -> str:
        return self.cls.__name__

    def submit(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        future: Future[Any] = Future(
            f"{self.label}.{method}", on_await=self.backend.start_lazy_tasks
        )
        if isinstance(self.error, WorkerDied):
            future.settle(error=self.error)
            return future
        self.calls.append(_Call(method=method, args=args, kwargs=kwargs, future=future))
        self.pump()
        return future

    def pump(self) -> None:
        """Runs the calls at the head of the line until one waits for an unfinished input."""
        if self.is_pumping:  # a method called its own actor: that call runs after this one
            return
        self.is_pumping = True
        try:
            if not self.has_started and not self._construct():
                return
            while self.calls:
                if self._waits_for(self.calls[0].pending_inputs()):
                    return
                self._run(self.calls.popleft())
        finally:
            self.is_pumping = False
            self.end_if_unwanted()

    def end_if_unwanted(self) -> None:
        """Without a handle nobody can call it any more; the calls under way are still served."""
        is_busy = self.is_pumping or self.calls or self.tasks or self.backend.has_lazy_task(self)
        if not self.has_handle and not is_busy:
            self.die(WorkerDied(f"{self.label} ended with its last handle"))

    def _waits_for(self, inputs: list[Future[Any]]) -> bool:
        if inputs:
            inputs[0].add_done_callback(lambda _: self.pump())
        return bool(inputs)

    def _construct(self) -> bool:
        """False while its resources are taken or an argument is unfinished. An error is kept for
        the calls to come."""
        if self.lease is None:
            self.lease = self.backend.lease_for(self)
            if self.lease is None:
                return False
        inputs = [f for f in futures_in(self.args, self.kwargs) if not f.is_done()]
        if self._waits_for(inputs):
            return False
        self.has_started = True
        try:
            args, kwargs = dereference(self.args, self.kwargs)
        except SchedulerError as error:  # of the call that an argument came from
            self.error = error
            return True
        try:
            self.instance = self.cls(*args, **kwargs)
        except SystemExit as error:
            place = f"{self.label}.__init__"
            self.die(WorkerDied(f"{self.label} called sys.exit({error.code!r}) in {place}"))
        except Exception as error:  # the boundary of the actor: recorded, raised by its calls
            self.error = TaskError(f"{self.label}.__init__", error)
        return True

    def _run(self, call: _Call) -> None:
        future = call.future
        if self.error is not None:
            future.settle(error=self.error)
            return
        try:
            args, kwargs = dereference(call.args, call.kwargs)
        except SchedulerError as error:  # of the call that an argument came from
            future.settle(error=error)
            return
        try:
            result = getattr(self.instance, call.method)(*args, **kwargs)
        except SystemExit as error:
            self._exited(future, error)
        except Exception as error:  # the boundary of the actor: recorded, raised by `get`
            future.settle(error=TaskError(future.label, error))
        else:
            if inspect.iscoroutine(result):
                self.backend.start(self, result, future)
            else:
                future.settle(result)

    async def finish(self, coroutine: Coroutine[Any, Any, Any], future: Future[Any]) -> None:
        """The body of an async method's task."""
        try:
            future.settle(await coroutine)
        except SystemExit as error:
            self._exited(future, error)
        except Exception as error:  # the boundary of the actor, as in _run
            future.settle(error=TaskError(future.label, error))

    def _exited(self, future: Future[Any], error: SystemExit) -> None:
        """`sys.exit` ends the actor; with restarts left, the next call meets a fresh object."""
        died = WorkerDied(f"{self.label} called sys.exit({error.code!r}) in {future.label}")
        future.settle(error=died)
        if self.restarts_left > 0:
            self.restarts_left -= 1
            self.instance, self.has_started = None, False
            self._construct()
        else:
            self.die(died)

    def die(self, died: WorkerDied) -> None:
        """Fails everything under way. Settling first: a cancelled task cannot answer later."""
        if isinstance(self.error, WorkerDied):
            return
        self.error, self.instance, self.has_started = died, None, True
        futures = [*self.tasks.values(), *(call.future for call in self.calls)]
        self.calls.clear()
        self.backend.drop_lazy_tasks(self, died)
        for future in futures:
            future.settle(error=died)
        for task in self.tasks:
            if not task.get_loop().is_closed() and not task.done():
                task.cancel()
        self.ended.settle(str(died))
        self.backend.forget(self)


class InlineBackend:
    """Does what `Scheduler` asks of a back end: create, submit, get, wait, kill, close."""

    num_server_deaths: int = 0  # nothing starts processes here

    def __init__(self, resources: Resources | None = None) -> None:
        self._machine = Machine(resources)
        self._actors: weakref.WeakSet[InlineActor] = weakref.WeakSet()
        self._waiting: list[InlineActor] = []  # for resources
        self._lazy: list[tuple[InlineActor, Coroutine[Any, Any, Any], Future[Any]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def create(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], options: ActorOptions
    ) -> InlineActor:
        self._machine.check(options)
        actor = InlineActor(
            backend=self,
            cls=cls,
            args=args,
            kwargs=kwargs,
            options=options,
            restarts_left=options.max_restarts,
        )
        self._actors.add(actor)
        actor.pump()
        return actor

    def lease_for(self, actor: InlineActor) -> Lease | None:
        """The actor's resources; None while they are taken: `pump` runs when some are free."""
        lease = self._machine.lease(actor.options)
        if lease is None and actor not in self._waiting:
            self._waiting.append(actor)
        return lease

    def forget(self, actor: InlineActor) -> None:
        """Gives its resources to those who wait."""
        if actor.lease is not None:
            actor.lease.release()
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for actor in waiting:
            actor.pump()

    def submit(
        self, actor: InlineActor, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        return actor.submit(method, args, kwargs)

    def put(self, obj: Any) -> Future[Any]:
        future: Future[Any] = Future(f"put({type(obj).__name__})")
        future.settle(obj)
        return future

    def release(self, actor: InlineActor) -> None:
        actor.has_handle = False
        actor.end_if_unwanted()

    def reduce_handle(self, actor: InlineActor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        raise TypeError(f"a handle of the inline actor {actor.label} cannot leave its process")

    def kill(self, actor: InlineActor) -> None:
        actor.die(WorkerDied(f"{actor.label} was killed"))

    def death(self, actor: InlineActor) -> Future[str]:
        return actor.ended

    def reserve(self, group: PlacementGroup, timeout_s: float | None) -> None:
        """Nothing can free the bundles while the only thread stands here, so it does not wait."""
        self._machine.check_group(group)
        if self._machine.lease_group(group):
            return
        taken = f"the bundles are taken; free is {self.available()}"
        if timeout_s is None:
            raise SchedulerError(f"{taken}, and nothing runs that could free more")
        raise GetTimeout(taken)

    def remove(self, group: PlacementGroup) -> None:
        for actor in list(self._actors):
            if actor.options.placement is group:
                actor.die(WorkerDied(f"{actor.label} ended with its placement group"))
        self._machine.release_group(group)
        self._serve_waiting()

    def available(self) -> Resources:
        return self._machine.free()

    def close(self) -> None:
        for actor in list(self._actors):
            actor.die(WorkerDied(f"{actor.label} ended with its scheduler"))
        if self._loop is not None and not self._loop.is_closed():
            tasks = asyncio.all_tasks(self._loop)
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
            self._loop.close()

    def start(
        self, actor: InlineActor, coroutine: Coroutine[Any, Any, Any], future: Future[Any]
    ) -> None:
        """Starts an async method on the running loop, or keeps it until a loop runs."""
        self._lazy.append((actor, coroutine, future))
        if _running_loop() is not None:
            self.start_lazy_tasks()

    def start_lazy_tasks(self) -> None:
        loop = asyncio.get_running_loop()
        lazy, self._lazy = self._lazy, []
        for actor, coroutine, future in lazy:
            task = loop.create_task(actor.finish(coroutine, future), name=future.label)
            actor.tasks[task] = future
            task.add_done_callback(partial(_end_task, actor, coroutine))

    def has_lazy_task(self, actor: InlineActor) -> bool:
        return any(owner is actor for owner, _, _ in self._lazy)

    def drop_lazy_tasks(self, actor: InlineActor, died: WorkerDied) -> None:
        for owner, coroutine, future in self._lazy:
            if owner is actor:
                coroutine.close()
                future.settle(error=died)
        self._lazy = [entry for entry in self._lazy if entry[0] is not actor]

    def wait(
        self,
        futures: Sequence[Future[Any]],
        num_returns: int,
        timeout_s: float | None,
        stops_on_error: bool = False,
    ) -> None:
        """Lets actors work until `num_returns` futures are done or the time is up."""

        def is_enough() -> bool:
            if stops_on_error and any(future.error() is not None for future in futures):
                return True
            return sum(future.is_done() for future in futures) >= num_returns

        if is_enough():
            return
        if _running_loop() is None:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            self._loop.run_until_complete(self._drive(futures, is_enough, timeout_s))
        elif timeout_s != 0:
            raise SchedulerError(
                f"get or wait for {_first_pending(futures)!r} inside a running event loop would "
                "stop the very loop that has to finish it; use `await future` there"
            )

    async def _drive(
        self, futures: Sequence[Future[Any]], is_enough: Callable[[], bool], timeout_s: float | None
    ) -> None:
        self.start_lazy_tasks()
        loop = asyncio.get_running_loop()
        deadline_s = None if timeout_s is None else loop.time() + timeout_s
        enough = asyncio.Event()
        for future in futures:
            future.add_done_callback(lambda _: enough.set() if is_enough() else None)
        watch = asyncio.create_task(enough.wait())
        try:
            while not is_enough():
                tasks = asyncio.all_tasks() - {asyncio.current_task(), watch}
                if not tasks:
                    raise SchedulerError(
                        f"{_first_pending(futures)!r} can never finish: nothing runs that could "
                        "settle it (it waits for its own caller, or its event loop has stopped)"
                    )
                left_s = None if deadline_s is None else max(0.0, deadline_s - loop.time())
                await asyncio.wait({*tasks, watch}, timeout=left_s, return_when=FIRST_COMPLETED)
                if left_s == 0.0:
                    return
        finally:
            watch.cancel()


def _end_task(
    actor: InlineActor, coroutine: Coroutine[Any, Any, Any], task: asyncio.Task[None]
) -> None:
    """Also settles the future of a task that was cancelled, even before its first step."""
    future = actor.tasks.pop(task)
    if task.cancelled():
        coroutine.close()
        cause = asyncio.CancelledError("its task was cancelled")
        future.settle(error=TaskError(future.label, cause))
    actor.end_if_unwanted()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _first_pending(futures: Sequence[Future[Any]]) -> Future[Any]:
    return next(future for future in futures if not future.is_done())
