"""Trainer and replicas of a colocated run take turns on their devices.

    async with turns.of_trainer():     # the replicas sleep: the KV caches' memory is free
        ...
    async with turns.of_replica():     # one more is started: the trainer does not work meanwhile
        ...

On GPUs the trainer parks its optimizer's state in host memory while the replicas have their turn;
its weights stay. Left out: separate runs, where nobody waits for anybody (`DeviceTurns(None)`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

Ask = Callable[[], Awaitable[object]]


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The calls by which those are asked that share the devices."""

    sleep: Ask
    """All replicas; their requests wait."""
    wake: Ask
    fetch: Ask
    """The trainer: its optimizer's state comes back."""
    park: Ask


class DeviceTurns:
    """Decides who works now: the trainer, alone, or the replicas."""

    def __init__(self, hosts: Hosts | None) -> None:
        self._hosts = hosts
        self._is_trainers = False
        self._num_starting = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def of_trainer(self) -> AsyncIterator[None]:
        """The trainer has the devices. Not to be nested."""
        if self._hosts is None:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_trainers and not self._num_starting)
            self._is_trainers = True
        try:
            await self._hosts.sleep()
            await self._hosts.fetch()
            try:
                yield
            finally:
                await self._hosts.park()
        finally:
            await self._hosts.wake()
            async with self._changed:
                self._is_trainers = False
                self._changed.notify_all()

    @asynccontextmanager
    async def of_replica(self) -> AsyncIterator[None]:
        """Inside, a replica takes memory of its own. Several may do it at a time."""
        if self._hosts is None:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_trainers)
            self._num_starting += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_starting -= 1
                self._changed.notify_all()
