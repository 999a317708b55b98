"""A trainer writes `Scheduler`, actor builders and handles; the back end runs it somewhere.

    sched = Scheduler(backend="inline")
    counter = sched.actor(Counter).options(name="counter").remote(start=3)
    future = counter.call(Counter.add, 2)    # a Future[int], if `add` returns an int
    sched.get(future)                        # in plain code
    await future                             # in a coroutine

`call` names the method by the function itself, so an editor finds it and a type checker sees its
arguments and its result. `counter.add.remote(2)` does the same without types, for arguments that
are futures of other calls and for names that are known at run time only.

The shape is Ray's, and so are the promises (see nanosched.inline_backend, which is where to read
next, and nanosched.backend, the contract). Left out: lineage, nested tasks and autoscaling.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar, overload

from nanosched.backend import Backend
from nanosched.errors import GetTimeout, SchedulerError
from nanosched.future import Future
from nanosched.handle import ActorHandle
from nanosched.resources import ActorOptions, PlacementGroup, Resources
from nanosched.worker_group import WorkerGroup

BACKENDS = ("inline", "local", "ray")

A = TypeVar("A")  # the class of an actor
P = ParamSpec("P")  # what a constructor takes
R = TypeVar("R")  # what a method returns


def _check_options(options: dict[str, Any]) -> None:
    allowed = [f.name for f in fields(ActorOptions)]
    for name in options:
        if name not in allowed:
            raise ValueError(f"unknown actor option {name!r}; allowed: {', '.join(allowed)}")


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

    def __init__(
        self,
        backend: str = "inline",
        *,
        resources: Resources | None = None,
        preload: Sequence[str] = (),
        address: str | None = None,
    ) -> None:
        """`resources`: what there is to give to actors; None: what the machine has.
        `preload`: modules that processes of actors share from their start (local).
        `address`: of a Ray cluster that runs; None starts one (ray)."""
        if backend not in BACKENDS:
            raise ValueError(
                f"unknown scheduler back end {backend!r}; allowed: {', '.join(BACKENDS)}"
            )
        if address is not None and backend != "ray":
            raise ValueError(f"address={address!r}: only the back end 'ray' has one")
        self._backend = _start_backend(backend, resources, preload, address)
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
        self._check_open()
        options = builder.actor_options
        if options.name is not None and options.name in self._named:
            raise ValueError(f"an actor named {options.name!r} is alive; kill it or choose another")
        assert isinstance(builder.cls, type), "`actor` saw to it"
        actor = self._backend.create(builder.cls, args, kwargs, options)
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
        return self._backend.put(obj)

    def kill(self, handle: ActorHandle[Any]) -> None:
        """Ends the actor for good; its pending and later calls raise WorkerDied."""
        self._backend.kill(handle._actor)
        for name in [name for name, named in self._named.items() if named is handle]:
            del self._named[name]

    def death(self, handle: ActorHandle[Any]) -> Future[str]:
        """Settles when the actor is dead for good, restarts used up; its value says why."""
        return self._backend.death(handle._actor)

    @property
    def num_server_deaths(self) -> int:
        """The number of times that the process that starts the others has ended, which ends them
        all: whoever counts an actor's deaths leaves those out. Only `local` has such a process."""
        return self._backend.num_server_deaths

    # -- resources -------------------------------------------------------------------------------

    def available(self) -> Resources:
        """The resources that no actor and no placement group holds at the moment."""
        return self._backend.available()

    def placement_group(
        self,
        bundles: Sequence[Resources],
        strategy: str = "PACK",
        timeout_s: float | None = None,
    ) -> PlacementGroup:
        """Reserves all bundles, or none, and holds them until `remove`.

        Waits until enough is free: GetTimeout after `timeout_s`. ValueError at once, saying what
        there is, for bundles that could never be had together.
        """
        self._check_open()
        group = PlacementGroup(tuple(bundles), strategy)
        self._backend.reserve(group, timeout_s)
        return group

    def remove(self, group: PlacementGroup) -> None:
        """Gives the bundles back; actors in them are killed. Removing twice is fine."""
        self._backend.remove(group)

    def group(
        self,
        cls: Callable[..., A],
        args: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        *,
        bundles: Sequence[int] | None = None,
        **options: Any,
    ) -> WorkerGroup[A]:
        """One actor per entry of `args`, which are each one's (args, kwargs), ranks in order.

        With `placement`, rank r takes bundle `bundles[r]`; without `bundles` and `bundle`, bundle r
        if there are as many. With `name`, rank r is called `name.r`.
        """
        if not args:
            raise ValueError("a group without workers: give one (args, kwargs) for each")
        builder = self.actor(cls, **options)
        placement = builder.actor_options.placement
        is_open = bundles is None and builder.actor_options.bundle is None
        if is_open and placement is not None and len(placement.bundles) == len(args):
            bundles = range(len(args))
        if bundles is not None and len(bundles) != len(args):
            raise ValueError(f"{len(bundles)} bundles for {len(args)} ranks: name one for each")
        handles = [
            builder.options(**_options_of_rank(builder.actor_options, rank, bundles)).remote(
                *positional, **named
            )
            for rank, (positional, named) in enumerate(args)
        ]
        return WorkerGroup(handles, [self.death(handle) for handle in handles], self.kill)

    def _check_open(self) -> None:
        if self._is_closed:
            raise SchedulerError("the scheduler is closed; make a new one")

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


def _start_backend(
    name: str, resources: Resources | None, preload: Sequence[str], address: str | None
) -> Backend:
    """Imported here, so that a program of one process loads neither multiprocessing nor Ray."""
    if name == "inline":
        from nanosched.inline_backend import InlineBackend  # here: it imports this file

        return InlineBackend(resources)
    if name == "local":
        from nanosched.local.process_backend import LocalBackend  # here: it imports this file

        return LocalBackend(resources, preload)
    from nanosched.ray_backend import RayBackend  # here: it imports this file, and an extra

    return RayBackend(resources, address)


def _options_of_rank(
    options: ActorOptions, rank: int, bundles: Sequence[int] | None
) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if options.name is not None:
        changed["name"] = f"{options.name}.{rank}"
    if bundles is not None:
        changed["bundle"] = bundles[rank]
    return changed
