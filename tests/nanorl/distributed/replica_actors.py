"""Actors for test_router_processes.py, which must be importable by their processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nanoinfer.params import Output, SamplingParams
from nanorl.distributed.roles.replica_clients import ActorClient
from nanorl.distributed.roles.replica_role import Replica
from nanorl.distributed.roles.router import Router
from nanosched import ActorHandle


class MortalReplica(Replica):
    """A replica that says whom to kill, and that stays in the middle of its requests."""

    def pid(self) -> int:
        return os.getpid()

    def hold(self, num_sampled: int, until: Path | None = None) -> None:
        """Sample no more than about so many tokens, until that file is there; None: for good."""
        engine = self._generator.engine
        step = engine.step

        def held() -> list[tuple[int, Output]]:
            is_free = until is not None and until.exists()
            if is_free or engine.metrics()["sampled_tokens"] < num_sampled:
                return step()
            time.sleep(0.01)
            return []

        engine.step = held  # type: ignore[method-assign]


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
