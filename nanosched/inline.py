"""The `inline` back end: actors are objects of this process, calls run in this thread.

A synchronous method runs inside `.remote()`; an `async` method becomes a task of the running event
loop, or, where none runs, of a private loop that `get` and `wait` drive. Same promises as a back
end of processes: calls of one actor start in the order they were made, a constructor's error
surfaces at the first call, a future passed as an argument is replaced by its value (nested ones
are not), a dead actor's calls fail with WorkerDied and are never repeated, and an actor whose last
handle is gone ends. Left out, because everything shares one process: resources reserve nothing,
and arguments and results are passed by reference, so neither side may change them.
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

from nanosched.errors import SchedulerError, TaskError, WorkerDied
from nanosched.future import Future, dereference, futures_in


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
    """One actor: its object, and the line of calls that wait for their inputs."""

    backend: InlineBackend
    cls: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    restarts_left: int
    instance: Any = None
    death: SchedulerError | None = None
    calls: deque[_Call] = field(default_factory=deque)
    tasks: dict[asyncio.Task[None], Future[Any]] = field(default_factory=dict)
    is_pumping: bool = False
    has_started: bool = False

    @property
    def label(self) -> str:
        return self.cls.__name__

    def submit(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        future: Future[Any] = Future(
            f"{self.label}.{method}", on_await=self.backend.start_lazy_tasks
        )
        if isinstance(self.death, WorkerDied):
            future.settle(error=self.death)
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

    def _waits_for(self, inputs: list[Future[Any]]) -> bool:
        if inputs:
            inputs[0].add_done_callback(lambda _: self.pump())
        return bool(inputs)

    def _construct(self) -> bool:
        """False while an argument is unfinished. An error is kept for the calls to come."""
        inputs = [f for f in futures_in(self.args, self.kwargs) if not f.is_done()]
        if self._waits_for(inputs):
            return False
        self.has_started = True
        try:
            args, kwargs = dereference(self.args, self.kwargs)
        except SchedulerError as error:  # of the call that an argument came from
            self.death = error
            return True
        try:
            self.instance = self.cls(*args, **kwargs)
        except SystemExit as error:
            self.death = WorkerDied(f"{self.label}.__init__ called sys.exit({error.code!r})")
        except Exception as error:  # the boundary of the actor: recorded, raised by its calls
            self.death = TaskError(f"{self.label}.__init__", error)
        return True

    def _run(self, call: _Call) -> None:
        future = call.future
        if self.death is not None:
            future.settle(error=self.death)
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
        self.death, self.instance, self.has_started = died, None, True
        futures = [*self.tasks.values(), *(call.future for call in self.calls)]
        self.calls.clear()
        self.backend.drop_lazy_tasks(self, died)
        for future in futures:
            future.settle(error=died)
        for task in self.tasks:
            if not task.get_loop().is_closed() and not task.done():
                task.cancel()


class InlineBackend:
    """Does what `Scheduler` asks of a back end: create, submit, get, wait, kill, close."""

    def __init__(self) -> None:
        self._actors: weakref.WeakSet[InlineActor] = weakref.WeakSet()
        self._lazy: list[tuple[InlineActor, Coroutine[Any, Any, Any], Future[Any]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def create(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], max_restarts: int
    ) -> InlineActor:
        actor = InlineActor(
            backend=self, cls=cls, args=args, kwargs=kwargs, restarts_left=max_restarts
        )
        self._actors.add(actor)
        actor.pump()
        return actor

    def submit(
        self, actor: InlineActor, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        return actor.submit(method, args, kwargs)

    def kill(self, actor: InlineActor) -> None:
        actor.die(WorkerDied(f"{actor.label} was killed"))

    def close(self) -> None:
        for actor in list(self._actors):
            if not isinstance(actor.death, WorkerDied):
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


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _first_pending(futures: Sequence[Future[Any]]) -> Future[Any]:
    return next(future for future in futures if not future.is_done())
