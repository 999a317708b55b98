"""The `ray` back end: the same contract on one or many machines, by Ray's actors and object store.

Ray moves the data, starts and restarts processes, and reserves resources; here its words become
ours. A future reads its result when somebody asks for it, so that a result may go from actor to
actor without passing through the driver. A process has one connection to Ray: schedulers share it,
and `close` ends what its own scheduler started.

A private Ray listens on the loopback device alone, with the access token that Ray makes. Ray's
view of free resources lags behind by a moment, and it reports the death of an actor with restarts
left after about two seconds (of others, at once). Left out: `preload`, autoscaling, and several
machines of different code: each needs the same packages installed.
Next: ray_host.py, which runs in the actors' processes.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future as RayAnswer
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

try:
    import ray
except ModuleNotFoundError as error:
    raise ValueError(
        f"the back end 'ray' needs Ray; run: {sys.executable} -m pip install ray"
    ) from error
from ray._private import ray_constants, worker
from ray.exceptions import ActorUnavailableError, RayError
from ray.job_config import JobConfig
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nanosched.errors import GetTimeout, SchedulerError, SchedulerLost, WorkerDied
from nanosched.future import Future
from nanosched.handle import ActorHandle
from nanosched.ray_guard import RayGuard
from nanosched.ray_host import AsyncHost, Input, Place, SyncHost, error_of, share_tensors
from nanosched.resources import ActorOptions, PlacementGroup, Resources

# How often a wait for results looks after futures that only callbacks wait for, such as deaths.
LOOK_S = 0.1
MOST_STARTS, LATE = 3, "timed out during startup"
CONNECT_S = 10.0  # for the head of a cluster to accept a connection; Ray itself asks for minutes


@dataclass(eq=False)
class RayActor:
    """One actor as this process sees it. `ended` is why we ended it, if we did."""

    cls: type
    is_async: bool
    handle: Any  # Ray's; None once our handle is gone
    placement: PlacementGroup | None = None
    ended: str | None = None
    death: RayDeath | None = None
    caller: str = field(default_factory=lambda: uuid.uuid4().hex)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def label(self) -> str:
        return self.cls.__name__


class RayFuture(Future[Any]):
    """A future over an object of Ray's. Known to be done, it still is read when asked for."""

    __slots__ = ("__weakref__", "_caller", "_has_arrived", "actor", "ref")

    def __init__(self, caller: RayCaller, label: str, ref: Any, actor: RayActor | None) -> None:
        super().__init__(label)
        self._caller = caller
        self._has_arrived = False
        self.ref = ref
        self.actor = actor

    def is_done(self) -> bool:
        return self._is_done or self._has_arrived

    def error(self) -> Exception | None:
        self._read()
        return super().error()

    def result(self) -> Any:
        self._read()
        return super().result()

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        super().add_done_callback(callback)
        if not self._is_done:
            self._caller.observe(self)

    def arrive(self) -> None:
        """Ray has the result, or the error."""
        self._has_arrived = True

    def _read(self) -> None:
        if self._has_arrived and not self._is_done:
            self.take(partial(ray.get, self.ref))

    def take(self, read: Callable[[], Any]) -> None:
        """Settles with what `read` returns or raises."""
        try:
            self.settle(read())
        except Exception as error:  # the boundary of the actor: in our terms, raised by `result`
            self.settle(error=self._in_our_terms(error))

    def _in_our_terms(self, error: Exception) -> SchedulerError:
        ours = error_of(error, self.label)
        if isinstance(ours, WorkerDied) and self.actor is not None and self.actor.ended is not None:
            return WorkerDied(f"{self.actor.label} {self.actor.ended}")
        return ours

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _receive_future, (self.label, self.ref)


class RayDeath(RayFuture):
    """Settles with the reason when a call of `watch`, which does not return, has failed for good:
    each life of the actor is watched by a call of its own."""

    __slots__ = ()

    def take(self, read: Callable[[], Any]) -> None:
        actor = self.actor
        assert actor is not None, "a death has an actor"
        try:
            read()
        except ActorUnavailableError as error:
            if actor.handle is not None and actor.ended is None:
                self._has_arrived = False
                self.ref = actor.handle.watch.remote()
                self._caller.observe(self)
            else:
                self.settle(str(self._in_our_terms(error)))
        except RayError as error:
            self.settle(str(self._in_our_terms(error)))
        else:
            self.settle(f"{actor.label} ended with its last handle")


class RayCaller:
    """Calls actors, in the driver or in an actor that was given a handle.

    Ray answers in threads of its own: they put what they have into `_inbox`, which is emptied in
    the event loop that somebody awaits in, or by the next wait."""

    def __init__(self) -> None:
        self._inbox: deque[tuple[RayFuture, Any, RayAnswer[Any]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: weakref.WeakSet[RayFuture] = weakref.WeakSet()
        self._is_closed = False
        self._lost: SchedulerLost | None = None

    def submit(
        self, actor: RayActor, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        future = RayFuture(self, f"{actor.label}.{method}", None, actor)
        if self._lost is not None:
            future.settle(error=self._lost)
            return future
        # Ray kills in its own time: one that we ended could still answer
        if self._is_closed or actor.handle is None or actor.ended is not None:
            reason = actor.ended or "ended with its last handle"
            future.settle(error=WorkerDied(f"{actor.label} {reason}"))
            return future
        share_tensors()
        wrap = Input if actor.is_async else _unwrapped
        try:
            args = tuple(_argument(value, wrap) for value in args)
            kwargs = {name: _argument(value, wrap) for name, value in kwargs.items()}
        except SchedulerError as error:  # of the call that an argument came from
            future.settle(error=error)
            return future
        if actor.is_async:
            place = Place(actor.caller, next(actor.numbers))
            future.ref = actor.handle.call.remote(place, method, args, kwargs)
        else:
            future.ref = actor.handle.call.remote(method, *args, **kwargs)
        self._pending.add(future)
        return future

    def release(self, actor: RayActor) -> None:
        """Ray ends the actor when no process has a handle left and its calls are done. The call
        that watches it would never be."""
        handle, actor.handle = actor.handle, None
        if handle is not None and actor.death is not None and ray.is_initialized():
            handle.unwatch.remote()

    def reduce_handle(self, actor: RayActor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _receive_handle, (actor.cls, actor.is_async, actor.handle)

    def observe(self, future: RayFuture) -> None:
        """Sees to it that the future is settled without being asked for."""
        with suppress(RuntimeError):  # outside of a loop, the next wait settles it
            self._loop = asyncio.get_running_loop()
        future.ref.future().add_done_callback(partial(self._answered, future, future.ref))

    def _answered(self, future: RayFuture, ref: Any, answer: RayAnswer[Any]) -> None:
        """In a thread of Ray's."""
        self._inbox.append((future, ref, answer))
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # a closed loop: the next wait or loop finds the answer
                loop.call_soon_threadsafe(self._empty_inbox)

    def _empty_inbox(self) -> None:
        if self._lost is not None:
            self._inbox.clear()
            for future in list(self._pending):
                future.settle(error=self._lost)
        while self._inbox:
            future, ref, answer = self._inbox.popleft()
            if not future._is_done and future.ref is ref:
                future.take(answer.result)


class RayBackend(RayCaller):
    """Does what `Scheduler` asks of a back end, by Ray."""

    num_server_deaths: int = 0  # of Ray's own processes Ray takes care, or says that it cannot

    def __init__(self, resources: Resources | None = None, address: str | None = None) -> None:
        super().__init__()
        if address is not None and resources is not None:
            raise ValueError(
                f"resources ({resources}) with address={address!r}: a running cluster has its "
                "own; leave one of the two out"
            )
        self._folder: Path | None = None
        self._has_connected = not ray.is_initialized()
        if not self._has_connected:
            _check_connection(address)
        elif address is not None:
            _require_somebody(address)
            ray.init(address, log_to_driver=False, job_config=_job())
        else:
            self._folder = Path(tempfile.mkdtemp(prefix="nanosched-ray-"))
            _start_ray(resources or Resources.of_machine(), self._folder)
        self._actors: weakref.WeakSet[RayActor] = weakref.WeakSet()
        self._groups: dict[PlacementGroup, Any] = {}
        self._guard = RayGuard(self._lose)

    def _lose(self, name: str) -> None:
        """In the guard's thread: Ray itself has ended."""
        self._lost = SchedulerLost(
            f"Ray's {name} has ended, and without it no process can be started or told anything; "
            "see to it that Ray runs (memory?), then go on with --resume"
        )
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # a closed loop: the next wait finds it
                loop.call_soon_threadsafe(self._empty_inbox)

    def create(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], options: ActorOptions
    ) -> RayActor:
        if self._lost is not None:
            raise self._lost
        self._check(options)
        share_tensors()
        is_async = any(asyncio.iscoroutinefunction(getattr(cls, name, None)) for name in dir(cls))
        ray_options: dict[str, Any] = {
            "num_cpus": options.num_cpus,
            "num_gpus": options.num_gpus,
            "max_restarts": options.max_restarts,
            # Lets calls wait for a new life that is on its way. No call is repeated: each method
            # of the hosts says so for itself.
            "max_task_retries": -1 if options.max_restarts else 0,
        }
        if options.placement is not None:
            ray_options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._groups[options.placement],
                placement_group_bundle_index=-1 if options.bundle is None else options.bundle,
            )
        if not is_async:
            ray_options["concurrency_groups"] = {"watch": 2}  # `watch`, and `unwatch` beside it
        host = ray.remote(**ray_options)(AsyncHost if is_async else SyncHost)
        positional = tuple(_argument(value, Input) for value in args)
        named = {name: _argument(value, Input) for name, value in kwargs.items()}
        handle = host.remote(cls, positional, named)
        actor = RayActor(cls, is_async, handle, placement=options.placement)
        self._actors.add(actor)
        return actor

    def wait(
        self,
        futures: Sequence[Future[Any]],
        num_returns: int,
        timeout_s: float | None,
        stops_on_error: bool = False,
    ) -> None:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        has_looked = False
        while True:
            self._empty_inbox()
            pending = [future for future in futures if not future.is_done()]
            missing = num_returns - (len(futures) - len(pending))
            if missing <= 0 or (stops_on_error and _has_failed(futures)):
                return
            left_s = LOOK_S if deadline_s is None else deadline_s - time.monotonic()
            if has_looked and left_s <= 0:
                return
            if timeout_s != 0 and _is_in_loop():
                raise SchedulerError(
                    f"get or wait for {pending[0]!r} inside a running event loop would stop the "
                    "loop; use `await future` there"
                )
            self._look(
                pending,
                1 if stops_on_error else missing,
                min(max(left_s, 0), LOOK_S),
                stops_on_error,
            )
            has_looked = True

    def _look(
        self, pending: Sequence[Future[Any]], num_returns: int, timeout_s: float, fetch: bool
    ) -> None:
        """Marks those that Ray has, waiting at most `timeout_s` for `num_returns` of them."""
        by_ref = {future.ref: future for future in pending if isinstance(future, RayFuture)}
        if not by_ref:
            time.sleep(timeout_s)  # for others, such as the death of a group: callbacks settle them
            return
        arrived, rest = ray.wait(
            list(by_ref),
            num_returns=min(num_returns, len(by_ref)),
            timeout=timeout_s,
            fetch_local=fetch,
        )
        if arrived and rest:
            more, _ = ray.wait(rest, num_returns=len(rest), timeout=0, fetch_local=fetch)
            arrived = [*arrived, *more]
        for ref in arrived:
            by_ref[ref].arrive()
            if isinstance(by_ref[ref], RayDeath):
                by_ref[ref].error()  # read at once: it may go on with the actor's next life

    def put(self, obj: Any) -> Future[Any]:
        share_tensors()
        future = RayFuture(self, f"put({type(obj).__name__})", ray.put(obj), None)
        future.arrive()
        return future

    def kill(self, actor: RayActor) -> None:
        self._end(actor, "was killed")

    def _end(self, actor: RayActor, reason: str) -> None:
        if actor.ended is None:
            actor.ended = reason
        if actor.handle is not None and self._lost is None:
            ray.kill(actor.handle, no_restart=True)

    def death(self, actor: RayActor) -> Future[str]:
        if actor.death is None:
            ref = actor.handle.watch.remote()
            actor.death = RayDeath(self, f"death of {actor.label}", ref, actor)
            self._pending.add(actor.death)
            self.observe(actor.death)
        return actor.death

    # -- resources -------------------------------------------------------------------------------

    def _check(self, options: ActorOptions) -> None:
        """ValueError if an actor with these options could never start."""
        wanted, group = options.resources, options.placement
        if group is None:
            _check_fits([wanted])
            return
        if group not in self._groups:
            raise ValueError("the placement group was removed, or is another scheduler's")
        chosen = group.bundles if options.bundle is None else (group.bundles[options.bundle],)
        if not any(_holds(bundle, wanted) for bundle in chosen):
            shown = " or ".join(f"({bundle})" for bundle in chosen)
            raise ValueError(f"{wanted} can never be had: the placement group has {shown}")

    def reserve(self, group: PlacementGroup, timeout_s: float | None) -> None:
        _check_fits(group.bundles)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        reserved = placement_group([_bundle(one) for one in group.bundles], group.strategy)
        while not reserved.wait(LOOK_S if timeout_s is None else min(LOOK_S, timeout_s)):
            if deadline_s is not None and time.monotonic() >= deadline_s:
                remove_placement_group(reserved)
                raise GetTimeout(
                    f"the bundles were not free within {timeout_s} s; free is {self.available()}"
                )
        self._groups[group] = reserved

    def remove(self, group: PlacementGroup) -> None:
        reserved = self._groups.pop(group, None)
        if reserved is None:
            return
        for actor in list(self._actors):
            if actor.placement is group:
                self._end(actor, "ended with its placement group")
        remove_placement_group(reserved)

    def available(self) -> Resources:
        return _resources(ray.available_resources())

    def close(self) -> None:
        self._is_closed = True
        self._guard.close()
        if self._lost is not None:
            self._empty_inbox()
            self._abandon()
            return
        for actor in list(self._actors):
            self._end(actor, "ended with its scheduler")
        for group in list(self._groups):
            self.remove(group)
        for future in list(self._pending):
            if future._is_done or future.actor is None:
                continue
            died = f"{future.actor.label} {future.actor.ended}"
            if isinstance(future, RayDeath):
                future.settle(died)
            else:
                future.settle(error=WorkerDied(died))
        if self._has_connected:
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # Ray's last processes still log there

    def _abandon(self) -> None:
        """Leave a Ray that is gone only at the end of this process, when somebody has said why: its
        shutdown may end the process. What it had started on this machine ends with it."""
        atexit.unregister(worker.shutdown)
        atexit.register(_leave)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _leave() -> None:
    """This process ends here: Ray's threads crash while a process takes its memory down, or wait a
    minute for what is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _start_ray(resources: Resources, folder: Path) -> None:
    """A Ray of this machine alone, for this process alone. Ray gives its raylet 30 s to come up,
    which a busy machine exceeds: then once more. What came too late ends with this process."""
    for attempt in range(1, MOST_STARTS + 1):
        try:
            _start_ray_once(resources, folder)
            return
        except Exception as error:  # Ray's own kind for this; all else is raised again
            if LATE not in str(error):
                raise
            if attempt == MOST_STARTS:
                raise SchedulerLost(
                    f"Ray did not come up, {attempt} times: {error} See to it that this machine "
                    "has cores and memory left, or leave it to --cluster.backend local"
                ) from error


def _start_ray_once(resources: Resources, folder: Path) -> None:
    with _loopback(), _without_chatter():
        ray.init(
            "local",
            num_cpus=int(resources.num_cpus),
            num_gpus=int(resources.num_gpus),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            job_config=_job(),
            _temp_dir=str(folder),
        )


@contextmanager
def _loopback() -> Iterator[None]:
    """Ray listens on the loopback device alone if it takes the machine for one that cannot be part
    of a cluster. It decides by this constant, which it sets so on macOS."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Ray warns on every start that it uses an access token."""
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _job() -> JobConfig:
    """Tells the workers where this process finds modules, Python's own and installed ones apart."""
    own = [path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix))]
    return JobConfig(_py_driver_sys_path=own)


def _require_somebody(address: str) -> None:
    """`ValueError` unless somebody listens at host:port; other forms are Ray's to resolve."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"address={address!r}: nobody answers there ({error}); start the cluster with "
            "`ray start --head`, which says its address, or give none to have one on this machine"
        ) from None


def _check_connection(address: str | None) -> None:
    """A process has one connection to Ray."""
    current = ray.get_runtime_context().gcs_address
    if address not in ("auto", current):
        raise ValueError(
            f"address={address!r}: this process is already connected to the Ray at {current}; "
            "give address='auto' to share it, or close the scheduler that connected"
        )


def _check_fits(wanted: Iterable[Resources]) -> None:
    """ValueError if a bundle fits no machine of the cluster, or all are more than it has."""
    bundles = [one for one in wanted if one.num_cpus or one.num_gpus]
    if not bundles:
        return
    nodes = [_resources(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    total = _sum(nodes)
    fits_somewhere = all(any(_holds(node, one) for node in nodes) for one in bundles)
    if fits_somewhere and _holds(total, _sum(bundles)):
        return
    shown = ", ".join(f"({one})" for one in bundles)
    machines = " and ".join(f"({node})" for node in nodes)
    raise ValueError(f"{shown} can never be had: the cluster has {machines or 'no machine'}")


def _holds(there: Resources, wanted: Resources) -> bool:
    return there.num_cpus >= wanted.num_cpus and there.num_gpus >= wanted.num_gpus


def _sum(parts: Sequence[Resources]) -> Resources:
    return Resources(
        num_cpus=sum(one.num_cpus for one in parts), num_gpus=sum(one.num_gpus for one in parts)
    )


def _resources(found: dict[str, float]) -> Resources:
    return Resources(num_cpus=found.get("CPU", 0), num_gpus=found.get("GPU", 0))


def _bundle(resources: Resources) -> dict[str, float]:
    """In Ray's words; it knows no empty bundle, so that one asks for a byte of memory."""
    bundle = {"CPU": resources.num_cpus, "GPU": resources.num_gpus}
    return {name: amount for name, amount in bundle.items() if amount} or {"memory": 1}


def _argument(value: Any, wrap: Callable[[Any], Any]) -> Any:
    """The value that travels for an argument: for a future, its reference or result. The error of a
    failed future is raised."""
    if not isinstance(value, Future):
        return value
    if isinstance(value, RayFuture) and value.ref is not None:
        return wrap(value.ref)
    if not value.is_done():
        raise ValueError(f"{value!r} is of another back end: wait for it and pass its result")
    return value.result()


def _unwrapped(ref: Any) -> Any:
    return ref


def _has_failed(futures: Iterable[Future[Any]]) -> bool:
    return any(future.is_done() and future.error() is not None for future in futures)


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _receive_handle(cls: type, is_async: bool, handle: Any) -> ActorHandle[Any]:
    return ActorHandle(RayCaller(), RayActor(cls, is_async, handle))


def _receive_future(label: str, ref: Any) -> RayFuture:
    return RayFuture(RayCaller(), label, ref, None)
