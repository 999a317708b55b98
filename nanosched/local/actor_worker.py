"""The process of one actor: constructs it, runs its calls, answers.

A class without async methods is served by a loop that blocks in `recv`, which is the fastest way to
get a call; one with async methods lives in an asyncio loop, where they run as tasks. The driver
closing its end is the order to leave. SIGINT is ignored: Ctrl-C is the driver's to act on.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import spawn
from typing import Any

from nanosched.errors import TaskError
from nanosched.handle import ActorHandle
from nanosched.local.actor_messages import (
    Accept,
    Exiting,
    Failure,
    HandleGone,
    Invoke,
    Link,
    Result,
    Start,
    Unlink,
)
from nanosched.local.calls import fill_slots
from nanosched.local.channel import Channel, Received, readable
from nanosched.local.payload import Packer, Payload, unpack
from nanosched.local.peers import Peers
from nanosched.local.shared_segments import Pool

LEAVE_S = 0.5  # for tasks to end after the order to leave; the kernel ends the process then
NO_CALL = -1
MAX_MESSAGES = 32  # from one channel before others have their turn


def main(sock: socket.socket) -> None:
    """The program of a worker: until the driver closes its end, or the actor leaves."""
    pool = Pool()
    driver = Channel(sock, pool)
    received = driver.receive()
    if received is None:
        return
    assert isinstance(received.message, Start)
    with open("/proc/self/comm", "w") as name:  # what ps and top show; the kernel cuts it at 15
        name.write(received.message.label)
    host = _Host(driver, pool, received)
    if host.is_async:
        asyncio.run(_AsyncLoop(host, pool).run())
    else:
        _BlockingLoop(host, pool).run()


class _Left(BaseException):
    """The actor has said that it ends; its loop is to end."""


class _Host:
    """The actor's object, and how a call of it becomes an answer."""

    def __init__(self, driver: Channel, pool: Pool, received: Received) -> None:
        assert isinstance(received.message, Start)
        self.driver = driver
        self.packer = Packer(pool)
        self.peers = Peers(pool, self.packer)
        self._start = received.message
        self._has_main = False
        self._instance: Any = None
        self._error: TaskError | None = None
        self._plan: tuple[type, tuple[Any, ...], dict[str, Any]] | None = None
        try:
            self._plan = self._arguments(received.payloads)
        except Exception as error:  # the boundary of the actor: raised by its calls
            self._fails_with(error)
        self.is_async = self._plan is not None and _has_async_methods(self._plan[0])

    def construct(self) -> None:
        """Its error is kept, and is what every call raises."""
        if self._plan is None:
            return
        (cls, args, kwargs), self._plan = self._plan, None
        try:
            self._instance = cls(*args, **kwargs)
        except SystemExit as error:
            self.leave(self.driver, NO_CALL, error, "__init__")
        except Exception as error:  # the boundary of the actor, as above
            self._fails_with(error)

    def _fails_with(self, error: Exception) -> None:
        error.add_note(f"in the actor's process:\n{''.join(traceback.format_exception(error))}")
        self._error = TaskError(f"{self._start.label}.__init__", error)

    def run(self, channel: Channel, call: Invoke, payloads: list[Payload]) -> None:
        """Runs the call and answers."""
        try:
            self._answer(channel, call, self._invoke(call, payloads))
        except SystemExit as error:
            self.leave(channel, call.call_id, error, call.method)
        except Exception as error:  # the boundary of the actor: recorded, raised by `get`
            self._refuse(channel, call.call_id, error)

    async def run_async(self, channel: Channel, call: Invoke, payloads: list[Payload]) -> None:
        """The same, where the method may be an async one: the body of the call's task."""
        try:
            result = self._invoke(call, payloads)
            payloads.clear()  # the arguments are the method's alone
            self._answer(channel, call, await result if inspect.iscoroutine(result) else result)
        except SystemExit as error:
            self.leave(channel, call.call_id, error, call.method)
        except asyncio.CancelledError:
            self._refuse(channel, call.call_id, asyncio.CancelledError("its task was cancelled"))
            raise
        except Exception as error:  # the boundary of the actor, as in `run`
            self._refuse(channel, call.call_id, error)

    def _invoke(self, call: Invoke, payloads: list[Payload]) -> Any:
        if self._error is not None:
            raise self._error
        args, kwargs = self._arguments(payloads)
        return getattr(self._instance, call.method)(*args, **kwargs)

    def _arguments(self, payloads: list[Payload]) -> Any:
        if not self._has_main and any(_names_main(payload) for payload in payloads):
            spawn.prepare(self._start.main)
            self._has_main = True
        arguments = unpack(payloads[0], self._make_handle)
        return arguments if len(payloads) == 1 else fill_slots(arguments, payloads)

    def _make_handle(self, actor_id: int, cls: type) -> ActorHandle[Any]:
        return ActorHandle(self.peers, self.peers.get(actor_id, cls))

    def _answer(self, channel: Channel, call: Invoke, result: Any) -> None:
        channel.send(Result(call.call_id), [self.packer.pack(result)])

    def _refuse(self, channel: Channel, call_id: int, error: BaseException) -> None:
        try:
            payloads = [self.packer.pack(error)]
        except Exception:  # whatever pickle raises: its text goes alone
            payloads = []
        where = "" if error is self._error else "".join(traceback.format_exception(error))
        channel.send(Failure(call_id, f"{type(error).__name__}: {error}", where), payloads)

    def leave(self, channel: Channel, call_id: int, error: SystemExit, method: str) -> None:
        """`sys.exit` in a method or constructor ends the actor."""
        place = f"{self._start.label}.{method}"
        is_constructing = method == "__init__"
        reason = f"{self._start.label} called sys.exit({error.code!r}) in {place}"
        if channel is not self.driver:
            channel.send(Exiting(call_id, reason, is_constructing))
            call_id = NO_CALL
        self.driver.send(Exiting(call_id, reason, is_constructing))
        raise _Left(reason)

    def tidy(self, channels: Sequence[Channel]) -> None:
        """Before a wait: segments and handles that nothing refers to any more are given back."""
        for actor_id in self.peers.take_dropped():
            self.driver.send(HandleGone(actor_id))
        for channel in channels:
            channel.tidy()


class _BlockingLoop:
    """One call after another, from the driver and from those who got a handle."""

    def __init__(self, host: _Host, pool: Pool) -> None:
        self._host = host
        self._pool = pool
        self._channels = [host.driver]

    def run(self) -> None:
        try:
            self._host.construct()
            while self._host.driver in self._channels:
                self._host.tidy(self._channels)
                for channel in self._ready():
                    self._serve(channel, channel.receive())
        except _Left:
            return

    def _ready(self) -> list[Channel]:
        if len(self._channels) == 1:
            return [self._host.driver]  # `receive` waits
        fds = readable(channel.fileno() for channel in self._channels)
        return [channel for channel in self._channels if channel.fileno() in fds]

    def _serve(self, channel: Channel, received: Received | None) -> None:
        if received is None:
            self._channels.remove(channel)
            channel.close()
        elif isinstance(received.message, Invoke):
            self._host.run(channel, received.message, received.payloads)
        elif isinstance(received.message, Accept):
            sock = socket.socket(fileno=received.files[0])
            self._channels.append(Channel(sock, self._pool))
        elif isinstance(received.message, Link):  # a handle is of no use without an event loop
            socket.socket(fileno=received.files[0]).close()


class _AsyncLoop:
    """Every call is a task, so that calls begin in the order in which they came."""

    def __init__(self, host: _Host, pool: Pool) -> None:
        self._host = host
        self._pool = pool
        self._channels: list[Channel] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_ended = asyncio.Event()
        self._host.driver.set_waiting(self._writes(self._host.driver))
        self._host.peers.start(self._add, self._serve_peer)
        try:
            self._host.construct()
        except _Left:
            return
        self._add(self._host.driver, self._serve)
        await self._has_ended.wait()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, LEAVE_S)  # asyncio waits for tasks without a limit

    def _writes(self, channel: Channel) -> Callable[[bool], None]:
        def wants_write(is_wanted: bool) -> None:
            if is_wanted:
                self._loop.add_writer(channel, channel.flush)
            else:
                self._loop.remove_writer(channel)

        return wants_write

    def _add(self, channel: Channel, serve: Callable[[Channel, Received | None], None]) -> None:
        channel.set_waiting(self._writes(channel))
        self._channels.append(channel)
        self._loop.add_reader(channel, self._read, channel, serve)

    def _read(self, channel: Channel, serve: Callable[[Channel, Received | None], None]) -> None:
        try:
            for _ in range(MAX_MESSAGES):
                received = channel.receive()
                if received is None:
                    self._drop(channel)
                serve(channel, received)
                if received is None:
                    break
        except BlockingIOError:
            pass
        except _Left:
            self._has_ended.set()
        self._host.tidy(self._channels)

    def _drop(self, channel: Channel) -> None:
        self._loop.remove_reader(channel)
        self._loop.remove_writer(channel)
        self._channels.remove(channel)
        channel.close()

    def _serve(self, channel: Channel, received: Received | None) -> None:
        """Act on a message of the driver, or of another actor that calls this one."""
        if received is None:
            if channel is self._host.driver:
                self._has_ended.set()
            return
        message = received.message
        if isinstance(message, Invoke):
            task = self._loop.create_task(self._run(channel, message, received.payloads))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, Accept):
            sock = socket.socket(fileno=received.files[0])
            self._add(Channel(sock, self._pool), self._serve)
        elif isinstance(message, Link):
            self._host.peers.link(message, received.files[0])
        elif isinstance(message, Unlink):
            self._host.peers.unlink(message)

    async def _run(self, channel: Channel, call: Invoke, payloads: list[Payload]) -> None:
        try:
            await self._host.run_async(channel, call, payloads)
        except _Left:
            self._has_ended.set()
        else:
            self._loop.call_soon(self._host.tidy, self._channels)

    def _serve_peer(self, channel: Channel, received: Received | None) -> None:
        """Act on the answer of an actor that this one calls."""
        self._host.peers.receive(channel, received)


def _has_async_methods(cls: type) -> bool:
    return any(inspect.iscoroutinefunction(member) for _, member in inspect.getmembers(cls))


def _names_main(payload: Payload) -> bool:
    """Say whether something of the program's main module may be in it."""
    if payload.hold is None:
        assert isinstance(payload.data, bytes)
        return b"__main__" in payload.data
    start, count = payload.data
    return payload.hold.segment.memory.find(b"__main__", start, start + count) >= 0
