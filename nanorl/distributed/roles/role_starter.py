"""`RoleStarter`: starts the roles of a cluster in processes of their own and watches over them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from nanorl.distributed.roles.actor_role import ActorRole, getting_ready
from nanorl.distributed.roles.placement import Places
from nanorl.options.parts import Parts
from nanosched import ActorHandle, Scheduler

A = TypeVar("A")


class RoleStarter:
    """Holds what roles of every kind are started with: the run's parts, processes and devices."""

    def __init__(self, parts: Parts, scheduler: Scheduler, places: Places) -> None:
        self.parts, self.config = parts, parts.config
        self.scheduler, self.places = scheduler, places
        self.say: Callable[[str], None] = print
        self._lost: asyncio.Future[None] | None = None  # never has a value, only an error

    def begin(self) -> None:
        """The event loop of the run is there."""
        self._lost = asyncio.get_running_loop().create_future()

    @property
    def lost(self) -> asyncio.Future[None]:
        """Ends with an error when a role is dead and cannot be started again."""
        assert self._lost is not None, "`begin` comes first"
        return self._lost

    async def start(self, role: ActorRole[Any], heartbeat: Callable[..., Any]) -> None:
        """Start it, and watch it from then on: others that start may wait for its answers."""
        await role.handle()
        self.watch(role, heartbeat)

    def watch(self, role: ActorRole[Any], heartbeat: Callable[..., Any]) -> None:
        """From now on the role has a successor as soon as it dies or stops answering."""
        cluster = self.config.cluster
        watch = role.watch(heartbeat, cluster.heartbeat_s, cluster.hang_s)
        watch.add_done_callback(self._note_lost)

    def _note_lost(self, watch: asyncio.Task[None]) -> None:
        """A role without a successor ends the run (`lost`)."""
        error = None if watch.cancelled() else watch.exception()
        if error is not None and not self.lost.done():
            self.lost.set_exception(error)

    def say_restart(self, role: ActorRole[Any], why: str) -> None:
        """Tell the user that a role is started again."""
        self.say(f"{role.name}: {why}; starting it again")

    def getting_ready(
        self, actor: ActorHandle[A], name: str
    ) -> AbstractAsyncContextManager[ActorHandle[A]]:
        """Inside, a new actor gets ready, within the time that a start may take."""
        return getting_ready(self.scheduler, actor, name, self.config.cluster.start_s)

    def end(self) -> None:
        """Nobody waits for a lost role any more."""
        if self._lost is not None:
            self._lost.cancel()
