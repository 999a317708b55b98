"""The driver's side of the local back end: which actor is where, what it waits for, how it ends.

Everything happens in the caller's thread: `wait` polls one epoll that holds all sockets and
processes, and a running event loop watches that epoll as one file. An actor's calls go to its
socket at once, also before its process has been started; they wait in `line` only while an argument
is unfinished, its resources are taken, or it is between two lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from nanosched.errors import GetTimeout, SchedulerError, WorkerDied
from nanosched.future import Future
from nanosched.ledger import Lease, Machine
from nanosched.local.actor_messages import (
    Accept,
    Exiting,
    Failure,
    HandleGone,
    Link,
    Result,
    Start,
    Unlink,
)
from nanosched.local.calls import (
    Connection,
    LocalFuture,
    first_error,
    pack_arguments,
    payloads_of,
)
from nanosched.local.channel import Channel, Received, pair, readable
from nanosched.local.forkserver import SAY_S, TICK_S, ForkServer
from nanosched.local.payload import Packer, Payload, received_handle
from nanosched.local.shared_segments import Pool
from nanosched.local.ticker import Ticker
from nanosched.resources import ActorOptions, PlacementGroup, Resources

LEAVE_S = 0.4  # for processes to end when they are told to, before they are killed
KILL_S = 0.5  # for the kernel to end a killed process, before its resources are free


class _Call(NamedTuple):
    method: str
    payload: Payload
    inputs: list[Future[Any]]
    future: LocalFuture[Any]


class _Process(NamedTuple):
    pid: int
    pidfd: int
    server: ForkServer  # its parent


@dataclass(eq=False, kw_only=True)
class LocalActor:
    """The driver's record of an actor. `reason` says why it is dead for good. `error` is raised by
    calls then, or when an argument of the constructor failed."""

    actor_id: int
    cls: type
    options: ActorOptions
    plan: Payload  # for the constructor
    inputs: list[Future[Any]]
    restarts_left: int
    lease: Lease | None = None
    connection: Connection | None = None
    process: _Process | None = None
    is_forking: bool = False
    line: deque[_Call] = field(default_factory=deque)
    error: SchedulerError | None = None
    reason: str | None = None
    last_words: str | None = None  # of a life that ended by sys.exit
    ended: Future[str]
    num_handles: int = 1
    links: Counter[int] = field(default_factory=Counter)  # actors whose handles it has
    holders: dict[int, LocalActor] = field(default_factory=dict)  # actors that have its handle

    @property
    def label(self) -> str:
        return self.cls.__name__


class LocalBackend:
    """See `nanosched.backend.Backend`."""

    def __init__(self, resources: Resources | None, preload: Sequence[str]) -> None:
        if not hasattr(os, "pidfd_open"):
            raise ValueError("the back end 'local' needs Linux 5.3 or newer; use 'inline' here")
        self._machine = Machine(resources)
        self._preload = tuple(preload)
        self._packer = Packer(Pool())
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._actor_ids = itertools.count()
        self._actors: dict[int, LocalActor] = {}
        self._waiting: list[LocalActor] = []  # for resources
        self._num_failures = 0  # so far: `get` looks for one when it changes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker = Ticker(TICK_S)
        self._watch(self._ticker.fileno(), self._look_after_server)
        self.num_server_deaths = 0
        self._server = self._start_server()

    # -- actors ----------------------------------------------------------------------------------

    def create(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], options: ActorOptions
    ) -> LocalActor:
        self._machine.check(options)
        plan, inputs = pack_arguments(self._packer, f"{cls.__name__}.__init__", args, kwargs, cls)
        actor = LocalActor(
            actor_id=next(self._actor_ids),
            cls=cls,
            options=options,
            plan=plan,
            inputs=inputs,
            restarts_left=options.max_restarts,
            ended=Future(f"death of {cls.__name__}", self._attach),
        )
        self._actors[actor.actor_id] = actor
        self._attach()
        self._advance(actor)
        return actor

    def submit(
        self, actor: LocalActor, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LocalFuture[Any]:
        future: LocalFuture[Any] = LocalFuture(f"{actor.label}.{method}", self._attach)
        if actor.reason is not None:
            future.settle(error=actor.error)
            return future
        payload, inputs = pack_arguments(self._packer, future.label, args, kwargs)
        self._attach()
        call = _Call(method, payload, inputs, future)
        if actor.connection is not None and not actor.line and not inputs:
            self._send(actor, call)
            return future
        actor.line.append(call)
        if len(actor.line) == 1:
            self._advance(actor)
        return future

    def put(self, obj: Any) -> LocalFuture[Any]:
        future: LocalFuture[Any] = LocalFuture(f"put({type(obj).__name__})")
        try:
            future.settle_payload(self._packer.pack(obj))
        except Exception as error:  # whatever pickle raises
            raise ValueError(f"{future.label}: it cannot be pickled: {error}") from error
        return future

    def _advance(self, actor: LocalActor) -> None:
        """Starts the actor, and sends the calls at the head of its line, as far as possible."""
        if actor.reason is not None or not self._is_started(actor):
            return
        while actor.line:
            call = actor.line[0]
            if self._waits_for(actor, call.inputs):
                return
            actor.line.popleft()
            error = actor.error or first_error(call.inputs)
            if error is not None:
                call.future.settle(error=error)
                self._end_if_unwanted(actor)
            else:
                self._send(actor, call)

    def _waits_for(self, actor: LocalActor, inputs: Sequence[Future[Any]]) -> bool:
        pending = next((one for one in inputs if not one.is_done()), None)
        if pending is not None:
            pending.add_done_callback(lambda _: self._advance(actor))
        return pending is not None

    def _send(self, actor: LocalActor, call: _Call) -> None:
        assert actor.connection is not None, "`_is_started` saw to it"
        self._lend_handles(actor, call.payload)
        payloads = [call.payload, *payloads_of(self._packer, call.inputs)]
        actor.connection.call(call.method, payloads, call.future)

    def _is_started(self, actor: LocalActor) -> bool:
        """Tries to; False while something is missing."""
        if actor.connection is not None or actor.error is not None:
            return True
        if actor.process is not None or actor.is_forking or self._waits_for(actor, actor.inputs):
            return False
        actor.error = first_error(actor.inputs)
        if actor.error is not None:
            return True
        if actor.lease is None:
            actor.lease = self._machine.lease(actor.options)
        if actor.lease is None:
            if actor not in self._waiting:
                self._waiting.append(actor)
            return False
        self._launch(actor, actor.lease)
        return True

    def _launch(self, actor: LocalActor, lease: Lease) -> None:
        self._serve_server(self._server)  # it may have ended, and nobody has looked since
        if not self._server.is_alive:
            self._server = self._start_server()
        ours, theirs = pair()
        actor.is_forking = True
        self._server.fork(actor.actor_id, self._environment(lease), theirs.fileno())
        self._ticker.start()
        theirs.close()
        channel = Channel(ours, self._packer.pool)
        channel.set_waiting(partial(self._want_write, channel))
        self._watch(channel.fileno(), partial(self._serve, actor, channel))
        actor.connection = Connection(channel)
        payloads = [actor.plan, *payloads_of(self._packer, actor.inputs)]
        channel.send(Start(actor.label, _main_module()), payloads)
        self._lend_handles(actor, actor.plan)
        for holder in actor.holders.values():
            self._connect(holder, actor)

    def _environment(self, lease: Lease) -> dict[str, str]:
        """Devices are hidden only where this machine's are declared."""
        if self._machine.declared.num_gpus == 0:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(lease.gpus)}

    # -- what arrives ----------------------------------------------------------------------------

    def _serve(self, actor: LocalActor, channel: Channel, events: int) -> None:
        """Reads what an actor has sent, and sends what its socket did not take before."""
        if events & select.EPOLLOUT:
            channel.flush()
        try:
            received = channel.receive()
        except BlockingIOError:
            return
        if received is None:  # its end is told by its process
            self._unwatch(channel.fileno())
        else:
            self._receive(actor, received)
        if actor.num_handles == 0:
            self._end_if_unwanted(actor)

    def _receive(self, actor: LocalActor, received: Received) -> None:
        message = received.message
        if isinstance(message, HandleGone):
            self._take_handle(actor, message.actor_id)
        if not isinstance(message, Result | Failure | Exiting) or actor.connection is None:
            return
        if not isinstance(message, Result):
            self._num_failures += 1
        actor.connection.settle(message, received.payloads)
        if isinstance(message, Exiting):
            actor.last_words = message.reason
            if message.is_constructing or actor.restarts_left == 0:
                self._end(actor, message.reason, is_gentle=True)
            else:
                self._disconnect(actor, message.reason)

    def _look_after_server(self, _: int) -> None:
        self._ticker.take()
        self._server.look()
        if not self._server.is_asked:
            self._ticker.stop()
        self._serve_server(self._server)

    def _serve_server(self, server: ForkServer, events: int = 0) -> None:
        """Processes that were started; then, that it has ended."""
        if events & select.EPOLLOUT:
            server.flush()
        for actor_id, pid, pidfd in server.forked():
            actor = self._actors[actor_id]
            actor.is_forking = False
            actor.process = _Process(pid, pidfd, server)
            self._watch(pidfd, partial(self._bury, actor))
            if actor.reason is not None and actor.last_words is None:
                _end_process(pidfd)
        if server.is_alive or server.fileno() not in self._handlers:
            return
        self._unwatch(server.fileno())
        server.close()
        self.num_server_deaths += 1
        for actor in [one for one in self._actors.values() if one.is_forking]:
            actor.is_forking = False
            how = "could not be started: the fork server has ended"
            self._outlive(actor, how, is_own=not server.is_ready)

    def _bury(self, actor: LocalActor, _: int = 0) -> None:
        """The process has ended. What it had sent before still counts."""
        assert actor.process is not None
        pid, pidfd, server = actor.process
        if actor.connection is not None:
            channel = actor.connection.channel
            while not channel.is_closed and channel.fileno() in self._handlers:
                before = channel.num_received
                self._serve(actor, channel, 0)
                if channel.num_received == before:
                    break
        limit_s = SAY_S if actor.reason is None else 0.0  # nobody asks about one that was ended
        how, is_own = server.how_it_ended(pid, limit_s), True
        self._unwatch(pidfd)
        os.close(pidfd)
        actor.process = None
        if how is None:
            self._serve_server(server)  # before anybody hears of the actor
            is_own = server.is_alive
            how = "ended" if is_own else "ended with the fork server"
        self._outlive(actor, how, is_own=is_own)

    def _outlive(self, actor: LocalActor, how: str, *, is_own: bool = True) -> None:
        """An actor without a process is restarted, or dead for good. A death that is not its own,
        but the fork server's, costs it no restart."""
        reason = actor.last_words or f"{actor.label} {how}"
        actor.last_words = None
        if actor.reason is None and actor.restarts_left > 0:
            actor.restarts_left -= is_own
            self._disconnect(actor, reason)
            self._advance(actor)
            return
        self._end(actor, reason)
        if actor.lease is not None:
            actor.lease.release()
        if actor.num_handles == 0:
            self._actors.pop(actor.actor_id, None)
        self._serve_waiting()

    # -- ends ------------------------------------------------------------------------------------

    def kill(self, actor: LocalActor) -> None:
        self._kill(actor, f"{actor.label} was killed")

    def _kill(self, actor: LocalActor, reason: str) -> None:
        self._end(actor, reason)
        if actor.process is not None and readable([actor.process.pidfd], KILL_S):
            self._bury(actor)

    def death(self, actor: LocalActor) -> Future[str]:
        return actor.ended

    def release(self, actor: LocalActor) -> None:
        actor.num_handles -= 1
        self._end_if_unwanted(actor)

    def _end_if_unwanted(self, actor: LocalActor) -> None:
        """Without a handle nobody can call it any more; the calls under way are still served."""
        is_busy = actor.line or (actor.connection is not None and len(actor.connection))
        if actor.num_handles == 0 and not is_busy:
            if actor.reason is None:
                self._end(actor, f"{actor.label} ended with its last handle", is_gentle=True)
            elif actor.process is None and not actor.is_forking:
                self._actors.pop(actor.actor_id, None)

    def _end(self, actor: LocalActor, reason: str, is_gentle: bool = False) -> None:
        """Dead for good. A gentle end leaves it to the process to leave when its socket closes."""
        if actor.reason is not None:
            return
        actor.reason = reason
        actor.error = WorkerDied(reason)
        self._num_failures += 1
        self._disconnect(actor, reason)
        for call in actor.line:
            call.future.settle(error=actor.error)
        actor.line.clear()
        for holder in actor.holders.values():
            if holder.connection is not None:
                holder.connection.channel.send(Unlink(actor.actor_id, reason))
        if actor.process is not None and not is_gentle:
            _end_process(actor.process.pidfd)
        if actor.process is None and not actor.is_forking and actor.lease is not None:
            actor.lease.release()
        actor.ended.settle(reason)

    def _disconnect(self, actor: LocalActor, reason: str) -> None:
        """Calls under way fail; handles that the process had are gone with it."""
        connection, actor.connection = actor.connection, None
        if connection is None:
            return
        self._unwatch(connection.channel.fileno())
        connection.channel.close()
        self._num_failures += 1
        connection.fail(WorkerDied(reason))
        links, actor.links = actor.links, Counter()
        for actor_id, count in links.items():
            other = self._actors.get(actor_id)
            if other is not None:
                other.holders.pop(actor.actor_id, None)
                other.num_handles -= count
                self._end_if_unwanted(other)

    def close(self) -> None:
        """Within a second: processes are told to end, what does not is killed."""
        deadline_s = time.monotonic() + LEAVE_S
        try:
            for actor in list(self._actors.values()):
                self._end(actor, f"{actor.label} ended with its scheduler", is_gentle=True)
            while self._has_processes() and time.monotonic() < deadline_s:
                self._poll(max(0.0, deadline_s - time.monotonic()))
        finally:  # also when somebody presses Ctrl-C again
            self._kill_rest()
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._epoll.fileno())
            self._server.close()
            self._ticker.close()
            self._epoll.close()
            self._handlers.clear()  # they refer to us
            self._packer.pool.clear()

    def _has_processes(self) -> bool:
        return any(one.process is not None or one.is_forking for one in self._actors.values())

    def _kill_rest(self) -> None:
        processes = [one.process for one in self._actors.values() if one.process is not None]
        for process in processes:
            _end_process(process.pidfd)
        deadline_s = time.monotonic() + KILL_S
        for process in processes:
            readable([process.pidfd], max(0.0, deadline_s - time.monotonic()))
            os.close(process.pidfd)
        self._actors.clear()

    # -- handles that travel ---------------------------------------------------------------------

    def reduce_handle(self, actor: LocalActor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        self._packer.note_handle(actor.actor_id)
        return received_handle, (actor.actor_id, actor.cls)

    def _lend_handles(self, receiver: LocalActor, payload: Payload) -> None:
        """The receiver of a payload with handles gets ways to those actors."""
        for actor_id in payload.handles:
            actor = self._actors.get(actor_id)
            if actor is None or actor.reason is not None:
                reason = "it ended with its last handle" if actor is None else str(actor.reason)
                assert receiver.connection is not None
                receiver.connection.channel.send(Unlink(actor_id, reason))
                continue
            actor.num_handles += 1
            receiver.links[actor_id] += 1
            if receiver.actor_id not in actor.holders:
                actor.holders[receiver.actor_id] = receiver
                self._connect(receiver, actor)

    def _connect(self, caller: LocalActor, callee: LocalActor) -> None:
        """A socket pair between two actors; one that is not started gets it when it is."""
        if caller.connection is None or callee.connection is None:
            return
        one, other = pair()
        link = Link(callee.actor_id)
        caller.connection.channel.send(link, files=[one.fileno()])
        callee.connection.channel.send(Accept(), files=[other.fileno()])
        one.close()
        other.close()

    def _take_handle(self, holder: LocalActor, actor_id: int) -> None:
        if holder.links[actor_id] > 0:
            holder.links[actor_id] -= 1
            actor = self._actors.get(actor_id)
            if actor is not None:
                self.release(actor)

    # -- resources -------------------------------------------------------------------------------

    def reserve(self, group: PlacementGroup, timeout_s: float | None) -> None:
        self._machine.check_group(group)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._machine.lease_group(group):
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise GetTimeout(
                    f"no room for the bundles within {timeout_s} s; free is {self.available()}"
                )
            self._refuse_in_loop("a placement group that has to wait")
            self._poll(left_s)

    def remove(self, group: PlacementGroup) -> None:
        for actor in [one for one in self._actors.values() if one.options.placement is group]:
            self._kill(actor, f"{actor.label} ended with its placement group")
        self._machine.release_group(group)
        self._serve_waiting()

    def available(self) -> Resources:
        return self._machine.free()

    def _serve_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for actor in waiting:
            self._advance(actor)

    # -- waiting ---------------------------------------------------------------------------------

    def wait(
        self,
        futures: Sequence[Future[Any]],
        num_returns: int,
        timeout_s: float | None,
        stops_on_error: bool = False,
    ) -> None:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        has_polled = False
        num_failures = -1
        first = 0  # all before it are done
        while True:
            if stops_on_error and num_failures != self._num_failures:
                num_failures = self._num_failures
                if any(future.error() is not None for future in futures):
                    return
            while first < len(futures) and futures[first].is_done():
                first += 1
            if first >= num_returns:
                return
            is_some = num_returns < len(futures)
            if is_some and sum(future.is_done() for future in futures) >= num_returns:
                return
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if has_polled and left_s is not None and left_s <= 0:
                return
            if timeout_s != 0:
                self._refuse_in_loop(f"get or wait for {futures[first]!r}")
            self._poll(None if left_s is None else max(0.0, left_s))
            has_polled = True

    def _refuse_in_loop(self, what: str) -> None:
        if asyncio._get_running_loop() is not None:
            raise SchedulerError(
                f"{what} inside a running event loop would stop the loop for everybody else; use "
                "`await future` there"
            )

    def _poll(self, timeout_s: float | None) -> None:
        """Waits for something to happen, and lets it happen."""
        for actor in self._actors.values():
            if actor.connection is not None:
                actor.connection.channel.tidy()
        found = self._epoll.poll(timeout_s)
        handlers = [self._handlers.get(fd) for fd, _ in found]
        for (fd, events), handler in zip(found, handlers, strict=True):
            # An earlier one of these events may have ended it, and its number be another's now.
            if handler is not None and self._handlers.get(fd) is handler:
                handler(events)

    def _attach(self) -> None:
        """Lets the running event loop, if there is one, watch for us."""
        loop = asyncio._get_running_loop()
        if loop is not None and loop is not self._loop:
            self._loop = loop
            loop.add_reader(self._epoll.fileno(), self._poll, 0)

    def _watch(self, fd: int, handler: Callable[[int], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _want_write(self, channel: Channel | ForkServer, is_wanted: bool) -> None:
        if channel.fileno() in self._handlers:
            events = select.EPOLLIN | (select.EPOLLOUT if is_wanted else 0)
            self._epoll.modify(channel.fileno(), events)

    def _start_server(self) -> ForkServer:
        server = ForkServer(self._preload)
        server.set_waiting(partial(self._want_write, server))
        self._watch(server.fileno(), partial(self._serve_server, server))
        return server


def _end_process(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, and its parent knows
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _main_module() -> dict[str, str]:
    """The way for another process to import the program's main module, in multiprocessing's
    words."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return {"init_main_from_name": spec.name}
    path = getattr(main, "__file__", None)
    return {} if path is None else {"init_main_from_path": os.path.abspath(path)}
