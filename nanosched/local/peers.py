"""The other actors whose handles this actor was given: it calls them without the driver between.

The driver makes the connection, and a new one when the other actor was restarted; until then calls
wait. Only an actor with async methods can call, because results need an event loop to arrive in.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nanosched.errors import SchedulerError, WorkerDied
from nanosched.local.actor_messages import Exiting, Failure, Link, Result, Unlink
from nanosched.local.calls import (
    Connection,
    LocalFuture,
    first_error,
    pack_arguments,
    payloads_of,
)
from nanosched.local.channel import Channel, Received
from nanosched.local.payload import Packer, Payload
from nanosched.local.shared_segments import Pool

Serve = Callable[[Channel, Received | None], None]


@dataclass(eq=False)
class PeerActor:
    """Another actor; without a connection it is being restarted, or dead if it has a reason."""

    actor_id: int
    cls: type = object  # until a handle says it
    connection: Connection | None = None
    reason: str | None = None
    waiting: deque[tuple[str, list[Payload], LocalFuture[Any]]] = field(default_factory=deque)

    @property
    def label(self) -> str:
        return self.cls.__name__


class Peers:
    """The caller that handles in an actor's process have."""

    def __init__(self, pool: Pool, packer: Packer) -> None:
        self._pool = pool
        self._packer = packer
        self._actors: dict[int, PeerActor] = {}
        self._dropped: deque[int] = deque()
        self._add: Callable[[Channel, Serve], None] | None = None
        self._serve: Serve | None = None

    def start(self, add: Callable[[Channel, Serve], None], serve: Serve) -> None:
        """From now on there is an event loop: `add` lets it watch a channel."""
        self._add, self._serve = add, serve

    def get(self, actor_id: int, cls: type) -> PeerActor:
        """For a handle that arrived; the driver has sent the link before."""
        actor = self._actors.setdefault(actor_id, PeerActor(actor_id))
        actor.cls = cls
        return actor

    def link(self, link: Link, file: int) -> None:
        """A way to the actor, the first one or one to its next life."""
        assert self._add is not None and self._serve is not None
        actor = self._actors.setdefault(link.actor_id, PeerActor(link.actor_id))
        channel = Channel(socket.socket(fileno=file), self._pool)
        self._end(actor, f"{actor.label} was restarted")
        actor.connection = Connection(channel)
        self._add(channel, self._serve)
        while actor.waiting:
            actor.connection.call(*actor.waiting.popleft())

    def unlink(self, unlink: Unlink) -> None:
        """The actor is dead for good."""
        actor = self._actors.setdefault(unlink.actor_id, PeerActor(unlink.actor_id))
        actor.reason = unlink.reason
        self._end(actor, unlink.reason)
        for _, _, future in actor.waiting:
            future.settle(error=WorkerDied(unlink.reason))
        actor.waiting.clear()

    def _end(self, actor: PeerActor, reason: str) -> None:
        """The process behind the connection is dead. What it answered before that may still be on
        its way: an actor that was asked to finish, and then killed, has finished."""
        if actor.connection is None:
            return
        channel = actor.connection.channel
        with suppress(BlockingIOError):
            while not channel.is_closed and (received := channel.receive()) is not None:
                self.receive(channel, received)
        actor.connection.fail(WorkerDied(reason))

    def receive(self, channel: Channel, received: Received | None) -> None:
        """An answer, or the end of a connection."""
        connected = (one for one in self._actors.values() if one.connection is not None)
        actor = next((one for one in connected if one.connection.channel is channel), None)  # type: ignore[union-attr]
        if actor is None or actor.connection is None:
            return  # there is a new connection by now
        if received is None:
            actor.connection.fail(WorkerDied(f"{actor.label} died"))
            actor.connection = None
        elif isinstance(received.message, Result | Failure | Exiting):
            actor.connection.settle(received.message, received.payloads)

    def submit(
        self, actor: PeerActor, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LocalFuture[Any]:
        """As `Caller.submit`. Futures among the arguments have to be done."""
        if self._add is None:
            raise SchedulerError(
                f"{actor.label}.{method} called by an actor without async methods, where no result "
                "could arrive; make the method that calls it async"
            )
        future: LocalFuture[Any] = LocalFuture(f"{actor.label}.{method}")
        payload, inputs = pack_arguments(self._packer, future.label, args, kwargs)
        if any(not one.is_done() for one in inputs):
            raise ValueError(f"{future.label}: await the futures among the arguments first")
        error = first_error(inputs)
        if actor.reason is not None:
            error = WorkerDied(actor.reason)
        if error is not None:
            future.settle(error=error)
            return future
        payloads = [payload, *payloads_of(self._packer, inputs)]
        if actor.connection is None:
            actor.waiting.append((method, payloads, future))
        else:
            actor.connection.call(method, payloads, future)
        return future

    def release(self, actor: PeerActor) -> None:
        self._dropped.append(actor.actor_id)  # and no more: handles may end anywhere

    def take_dropped(self) -> list[int]:
        """The actors of handles that have gone; those with calls under way stay until the next
        time, because the driver ends an actor that nobody refers to."""
        ready = []
        for _ in range(len(self._dropped)):
            actor_id = self._dropped.popleft()
            if self._is_busy(actor_id):
                self._dropped.append(actor_id)
            else:
                ready.append(actor_id)
        return ready

    def _is_busy(self, actor_id: int) -> bool:
        actor = self._actors[actor_id]
        return bool(actor.waiting) or (actor.connection is not None and len(actor.connection) > 0)

    def reduce_handle(self, actor: PeerActor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        raise TypeError(f"a handle of {actor.label} travels from the driver to actors only")
