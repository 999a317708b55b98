"""Actors of one class that work together, such as the ranks of a mesh: called and ended as one.

If one dies, all are killed: the others would wait for it in the next collective operation, and a
collective group cannot be joined again. Restarting is up to who made the group, with a new one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from nanosched.future import Future
from nanosched.handle import ActorHandle

A = TypeVar("A")  # the class of the workers
P = ParamSpec("P")  # what a method takes
R = TypeVar("R")  # what a method returns


class WorkerGroup(Generic[A]):
    """`handles` in order of rank; `death` settles when the first of them dies, saying which."""

    def __init__(
        self,
        handles: Sequence[ActorHandle[A]],
        deaths: Sequence[Future[str]],
        kill: Callable[[ActorHandle[A]], None],
    ) -> None:
        self.handles = list(handles)
        self._kill = kill
        self.death: Future[str] = Future("death of a group", deaths[0].prepare_to_wait)
        ended = partial(_ended, weakref.ref(self))  # weak: or the group would keep itself alive
        for rank, death in enumerate(deaths):
            death.add_done_callback(partial(ended, rank))

    @overload
    def call(
        self,
        method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[Future[R]]: ...

    @overload
    def call(
        self, method: Callable[Concatenate[A, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[R]]: ...

    def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Calls the method on every rank with the same arguments; results in order of rank."""
        return [handle.call(method, *args, **kwargs) for handle in self.handles]

    def call_each(
        self, method: Callable[..., Any], args: Sequence[Sequence[Any]]
    ) -> list[Future[Any]]:
        """Calls the method on every rank, on rank r with the arguments `args[r]`."""
        if len(args) != len(self.handles):
            raise ValueError(
                f"arguments for {len(args)} of {len(self.handles)} ranks: give one entry for each"
            )
        return [handle.call(method, *own) for handle, own in zip(self.handles, args, strict=True)]

    def kill(self) -> None:
        """Ends all ranks for good."""
        for handle in self.handles:
            self._kill(handle)

    def __len__(self) -> int:
        return len(self.handles)


def _ended(group: weakref.ref[WorkerGroup[Any]], rank: int, death: Future[str]) -> None:
    living = group()
    if living is None or living.death.is_done():
        return
    if (error := death.error()) is not None:  # of the scheduler: nobody knows how the actor is
        living.death.settle(error=error)
    else:
        living.death.settle(f"rank {rank}: {death.result()}")
        living.kill()
