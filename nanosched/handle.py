"""A handle refers to one actor: `handle.call(Class.method, ...)` or `handle.method.remote(...)`.

It may be passed as an argument of a call and used by the actor that receives it, if that has async
methods: it then calls the other actor without the driver in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from nanosched.backend import BackendActor, Caller
from nanosched.errors import SchedulerError
from nanosched.future import Future

A = TypeVar("A")  # the class of an actor
P = ParamSpec("P")  # what a method takes
R = TypeVar("R")  # what a method returns


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

    def __init__(self, backend: Caller, actor: BackendActor) -> None:
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

    def __del__(self) -> None:
        self._backend.release(self._actor)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._backend.reduce_handle(self._actor)

    def __repr__(self) -> str:
        return f"<ActorHandle {self._actor.label}>"
