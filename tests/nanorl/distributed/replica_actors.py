"""Actors for test_router_processes.py, which must be importable by their processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nanoinfer.params import Output, SamplingParams
from nanorl.distributed.roles.replica_clients import ActorClient
from nanorl.distributed.roles.replica_role import Replica, ReplicaRecipe, Seat
from nanorl.distributed.roles.router import Router
from nanosched import ActorHandle


class MortalReplica(Replica):
    """A replica that says whom to kill. Once it has sampled so many tokens it samples no more, so
    that its requests stay for whoever strikes it while it has some, however late; 0: it goes on."""

    def __init__(
        self, recipe: ReplicaRecipe, *, seat: Seat | None = None, pauses_at: int = 0
    ) -> None:
        super().__init__(recipe, seat=seat)
        self._pauses_at = pauses_at
        self._pausing: asyncio.Task[None] | None = None

    def pid(self) -> int:
        return os.getpid()

    async def generate(self, *given: Any, **options: Any) -> Output:
        if self._pauses_at and self._pausing is None:
            self._pausing = asyncio.create_task(self._pause())
        return await super().generate(*given, **options)

    async def _pause(self) -> None:
        """The steps are driven by this loop, too: none or one goes by unseen."""
        while self.metrics()["sampled_tokens"] < self._pauses_at:
            await asyncio.sleep(0)
        await self._generator.pause()


class Asker:
    """Holds a router in a process of its own, as a collector does."""

    def __init__(self) -> None:
        self._router = Router(gate=1, wait_s=100)

    def set_replicas(self, handles: Mapping[str, ActorHandle[MortalReplica]]) -> None:
        self._router.set_replicas({name: ActorClient(handle) for name, handle in handles.items()})

    async def ask(self, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Output]:
        torch.set_num_threads(1)
        return await asyncio.gather(*(self._router.generate(*request) for request in requests))

    async def ask_and_go(self, ids: list[int], params: SamplingParams, wait_s: float) -> bool:
        """A caller that loses patience; True if it was cancelled."""
        try:
            await asyncio.wait_for(self._router.generate(ids, params), wait_s)
        except TimeoutError:
            return True
        return False

    def counters(self) -> dict[str, float]:
        return self._router.counters()
