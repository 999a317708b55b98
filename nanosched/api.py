"""A trainer writes `Scheduler`, actor builders and handles; the back end runs it somewhere.

    sched = Scheduler(backend="inline")
    counter = sched.actor(Counter).options(name="counter").remote(start=3)
    future = counter.call(Counter.add, 2)    # a Future[int], if `add` returns an int
    sched.get(future)                        # in plain code
    await future                             # in a coroutine

`call` names the method by the function itself, so an editor finds it and a type checker sees its
arguments and its result. `counter.add.remote(2)` does the same without types, for arguments that
are futures of other calls and for names that are known at run time only.

The shape is Ray's, and so are the promises (see nanosched.inline, which is where to read next).
Left out: back ends of several processes, placement groups, lineage and nested tasks.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from nanosched.errors import GetTimeout, SchedulerError
from nanosched.future import Future
from nanosched.inline import InlineActor, InlineBackend

BACKENDS = {"inline": InlineBackend}

A = TypeVar("A")  # the class of an actor
P = ParamSpec("P")  # what a method or a constructor takes
R = TypeVar("R")  # what a method returns


@dataclass(frozen=True, kw_only=True)
class ActorOptions:
    """Says how an actor is placed and supervised. Inline, cpus and gpus reserve nothing."""

    num_cpus: float = 1
    num_gpus: float = 0
    name: str | None = None
    max_restarts: int = 0

    def __post_init__(self) -> None:
        for option in ("num_cpus", "num_gpus", "max_restarts"):
            if getattr(self, option) < 0:
                raise ValueError(
                    f"{option}={getattr(self, option)}: cannot be negative; give 0 for none"
                )


def _check_options(options: dict[str, Any]) -> None:
    allowed = [f.name for f in fields(ActorOptions)]
    for name in options:
        if name not in allowed:
            raise ValueError(f"unknown actor option {name!r}; allowed: {', '.join(allowed)}")


class RemoteMethod:
    """`handle.method`: call it with `.remote(...)`."""

    def __init__(self, handle: ActorHandle[Any], method: str) -> None:
        self._handle = handle
        self._method = method

    @classmethod
    def of(cls, handle: ActorHandle[Any], name: str) -> RemoteMethod:
        """`AttributeError` lists the methods that there are."""
        actor = handle._actor.cls
        if name.startswith("_") or not callable(getattr(actor, name, None)):
            methods = [
                method
                for method, _ in inspect.getmembers(actor, callable)
                if not method.startswith("_")
            ]
            raise AttributeError(
                f"actor {actor.__name__} has no public method {name!r}; it has: "
                f"{', '.join(methods) or 'none'}"
            )
        return cls(handle, name)

    def remote(self, *args: Any, **kwargs: Any) -> Future[Any]:
        handle = self._handle
        return handle._backend.submit(handle._actor, self._method, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise SchedulerError(
            f"{self._method} belongs to an actor and cannot be called directly; "
            f"write handle.{self._method}.remote(...)"
        )


class ActorHandle(Generic[A]):
    """Refers to one actor of class `A`, which ends when its last handle is gone."""

    def __init__(self, backend: InlineBackend, actor: InlineActor) -> None:
        self._backend = backend
        self._actor = actor

    @overload
    def call(
        self,
        method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[R]: ...

    @overload
    def call(
        self, method: Callable[Concatenate[A, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...

    def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls a method of the actor, named as `Class.method`; a subclass's own version of it runs
        if the actor has one."""
        return RemoteMethod.of(self, method.__name__).remote(*args, **kwargs)

    def __getattr__(self, name: str) -> RemoteMethod:
        return RemoteMethod.of(self, name)

    def __repr__(self) -> str:
        return f"<ActorHandle {self._actor.label}>"


@dataclass(frozen=True)
class ActorBuilder(Generic[P, A]):
    """A class and the options of the actors to make of it. `.options` returns a changed copy."""

    scheduler: Scheduler
    cls: Callable[P, A]
    actor_options: ActorOptions

    def options(self, **options: Any) -> ActorBuilder[P, A]:
        _check_options(options)
        return replace(self, actor_options=replace(self.actor_options, **options))

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ActorHandle[A]:
        """Creates the actor. Its constructor's error surfaces at its first call, not here."""
        return self.scheduler.create(self, args, kwargs)


class Scheduler:
    """Creates actors and waits for their results; several may live in one process.

    Use it as a context manager, or call `close`: both end all its actors.
    """

    def __init__(self, backend: str = "inline") -> None:
        if backend not in BACKENDS:
            raise ValueError(
                f"unknown scheduler back end {backend!r}; allowed: {', '.join(sorted(BACKENDS))}"
            )
        self._backend = BACKENDS[backend]()
        self._named: weakref.WeakValueDictionary[str, ActorHandle[Any]] = (
            weakref.WeakValueDictionary()
        )
        self._is_closed = False

    def actor(self, cls: Callable[P, A], **options: Any) -> ActorBuilder[P, A]:
        """A builder of actors of `cls`: `sched.actor(Worker, num_cpus=1).remote(...)`."""
        if not isinstance(cls, type):
            raise ValueError(f"actor({cls!r}): give the class itself, not an instance of it")
        _check_options(options)
        return ActorBuilder(self, cls, ActorOptions(**options))

    def create(
        self, builder: ActorBuilder[P, A], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ActorHandle[A]:
        """Make the actor; `ActorBuilder.remote` calls this."""
        if self._is_closed:
            raise SchedulerError("the scheduler is closed; make a new one")
        options = builder.actor_options
        if options.name is not None and options.name in self._named:
            raise ValueError(f"an actor named {options.name!r} is alive; kill it or choose another")
        assert isinstance(builder.cls, type), "`actor` saw to it"
        actor = self._backend.create(builder.cls, args, kwargs, options.max_restarts)
        handle: ActorHandle[A] = ActorHandle(self._backend, actor)
        if options.name is not None:
            self._named[options.name] = handle
        return handle

    def get_actor(self, name: str) -> ActorHandle[Any]:
        """The living actor of that name; ValueError if there is none."""
        handle = self._named.get(name)
        if handle is None:
            known = ", ".join(sorted(self._named)) or "none"
            raise ValueError(f"no actor is named {name!r}; named actors: {known}")
        return handle

    @overload
    def get(self, futures: Future[R], timeout_s: float | None = None) -> R: ...

    @overload
    def get(self, futures: Sequence[Future[R]], timeout_s: float | None = None) -> list[R]: ...

    def get(
        self, futures: Future[Any] | Sequence[Future[Any]], timeout_s: float | None = None
    ) -> Any:
        """The result, or the results in order; raises the first error among them.

        TaskError carries what the method raised; GetTimeout leaves the calls running.
        """
        wanted = [futures] if isinstance(futures, Future) else list(futures)
        self._backend.wait(wanted, len(wanted), timeout_s, stops_on_error=True)
        for future in wanted:
            if future.error() is not None:
                future.result()
        pending = [future.label for future in wanted if not future.is_done()]
        if pending:
            raise GetTimeout(f"no result after {timeout_s} s from: {', '.join(pending)}")
        results = [future.result() for future in wanted]
        return results[0] if isinstance(futures, Future) else results

    def wait(
        self,
        futures: Sequence[Future[R]],
        num_returns: int = 1,
        timeout_s: float | None = None,
    ) -> tuple[list[Future[R]], list[Future[R]]]:
        """(at most `num_returns` that are done, all others), both in the order given.

        Failed calls count as done; reading them raises. After `timeout_s` with what there is.
        """
        if not 1 <= num_returns <= len(futures):
            raise ValueError(
                f"num_returns={num_returns} of {len(futures)} futures: must lie between 1 and "
                "their number"
            )
        self._backend.wait(futures, num_returns, timeout_s)
        done = [future for future in futures if future.is_done()][:num_returns]
        chosen = {id(future) for future in done}
        return done, [future for future in futures if id(future) not in chosen]

    def put(self, obj: R) -> Future[R]:
        """A finished future of `obj`, to pass to many calls. `obj` must not change afterwards."""
        future: Future[R] = Future(f"put({type(obj).__name__})")
        future.settle(obj)
        return future

    def kill(self, handle: ActorHandle[Any]) -> None:
        """Ends the actor for good; its pending and later calls raise WorkerDied."""
        self._backend.kill(handle._actor)
        for name in [name for name, named in self._named.items() if named is handle]:
            del self._named[name]

    def close(self) -> None:
        """Ends all actors. Closing twice is fine."""
        if not self._is_closed:
            self._is_closed = True
            self._backend.close()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
