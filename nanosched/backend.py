"""What `Scheduler` and `ActorHandle` ask of a back end: the contract that all of them keep.

Futures of one back end are settled by it alone, and only while its program waits (`wait`, or a
running event loop that somebody awaits in) or calls it. Left out: how calls reach an actor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nanosched.future import Future
from nanosched.resources import ActorOptions, PlacementGroup, Resources


class BackendActor(Protocol):
    """A back end's own record of one actor; `label` names it in messages."""

    @property
    def cls(self) -> type: ...

    @property
    def label(self) -> str: ...


class Caller(Protocol):
    """The part of a back end that a handle needs, wherever the handle is."""

    def submit(
        self, actor: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        """Starts a call, or lines it up; calls of one actor start in the order of `submit`."""
        ...

    def release(self, actor: Any) -> None:
        """The handle is gone. The actor ends with its last handle, after the calls under way."""
        ...

    def reduce_handle(self, actor: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The value that pickle writes for a handle that travels as an argument, as `__reduce__`
        returns it. TypeError where it cannot travel."""
        ...


class Backend(Caller, Protocol):
    """A place where actors live. `actor` arguments are what `create` returned.

    `num_server_deaths` counts how often the process that starts the others has ended, and has taken
    them with it: such a death is no actor's own."""

    num_server_deaths: int

    def create(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], options: ActorOptions
    ) -> BackendActor:
        """Returns at once, for one handle; the actor starts when its resources are free.
        ValueError if they can never be."""
        ...

    def wait(
        self,
        futures: Sequence[Future[Any]],
        num_returns: int,
        timeout_s: float | None,
        stops_on_error: bool = False,
    ) -> None:
        """Lets actors work until `num_returns` futures are done or the time is up; with
        `stops_on_error` also until one has failed. SchedulerError inside a running event loop,
        unless `timeout_s` is 0."""
        ...

    def put(self, obj: Any) -> Future[Any]:
        """A finished future; what it costs to pass `obj` is paid once."""
        ...

    def kill(self, actor: Any) -> None:
        """Ends the actor for good, at once."""
        ...

    def death(self, actor: Any) -> Future[str]:
        """Settles with the reason when the actor is dead for good; the same future each time."""
        ...

    def reserve(self, group: PlacementGroup, timeout_s: float | None) -> None:
        """Waits until all bundles are held. ValueError if that can never be, GetTimeout."""
        ...

    def remove(self, group: PlacementGroup) -> None:
        """Gives the bundles back and kills the actors in them. Removing twice is fine."""
        ...

    def available(self) -> Resources:
        """The resources that no actor and no placement group holds."""
        ...

    def close(self) -> None:
        """Ends all actors."""
        ...
