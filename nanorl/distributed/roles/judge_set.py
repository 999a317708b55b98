"""`JudgeSet`: the judges of a run as processes, where rewards ask models that lie in folders.

A judge has no state. One that died is started again alone and named to the collector again, whose
questions waited (judge_routers.py); a collector that died is told of all judges anew.
Left out: a judge that is split over several GPUs; one that is served elsewhere has an address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from nanoengine.optim import DTYPES
from nanorl.distributed.roles.actor_role import ActorRole, ended
from nanorl.distributed.roles.collector_role import CollectorRole
from nanorl.distributed.roles.judge_role import JudgeRole
from nanorl.distributed.roles.judge_routers import JudgeClients
from nanorl.distributed.roles.replica_clients import ActorClient, ReplicaClient
from nanorl.distributed.roles.replica_role import ReplicaRecipe
from nanorl.distributed.roles.role_starter import RoleStarter
from nanorl.envs.rewards.judge_models import JudgeModel
from nanorl.options.parts import num_threads
from nanorl.options.run_judges import JudgeSeat
from nanosched import ActorHandle


class JudgeSet:
    """The judges of a run; none, where its rewards ask none."""

    def __init__(self, starter: RoleStarter, seats: Sequence[JudgeSeat]) -> None:
        self._starter = starter
        self._seats = {seat.name: seat for seat in seats}
        self._serving: dict[str, ActorHandle[Any]] = {}
        self._collector: ActorRole[CollectorRole] | None = None
        self.roles: list[ActorRole[Any]] = [
            ActorRole(
                name,
                "judge",
                starter.scheduler,
                partial(self._start, name),
                on_restart=self._restarted,
            )
            for name in self._seats
        ]

    def introduce_to(self, collector: ActorRole[CollectorRole]) -> None:
        """Name the collector, whose questions the judges take."""
        self._collector = collector

    async def start(self) -> None:
        """Start all, and watch them from then on."""
        await asyncio.gather(
            *(self._starter.start(role, JudgeRole.heartbeat) for role in self.roles)
        )

    async def introduce_all(self, collector: ActorHandle[CollectorRole]) -> None:
        """Name all judges to a new collector, whose predecessor waits for nothing any more."""
        if not self._seats:
            return
        asked = [handle.call(JudgeRole.abort) for handle in self._serving.values()]
        await asyncio.gather(*(ended(one) for one in asked))
        known = None
        while known != self._serving:  # until nobody has come or gone meanwhile
            known = dict(self._serving)
            await collector.call(CollectorRole.set_judges, self._clients())

    async def _start(self, name: str) -> ActorHandle[JudgeRole]:
        starter, seat = self._starter, self._seats[name]
        place = starter.places.judges[name]
        actor = starter.scheduler.actor(JudgeRole, **place.of_one).remote(
            self._recipe(seat, is_on_gpu=place.num_gpus > 0), timeout_s=seat.timeout_s
        )
        async with starter.getting_ready(actor, name) as handle:
            await handle.call(JudgeRole.heartbeat)
        self._serving[name] = handle
        if self._collector is not None and (collector := self._collector.current) is not None:
            await ended(collector.call(CollectorRole.set_judges, self._clients()))
        return handle

    def _recipe(self, seat: JudgeSeat, *, is_on_gpu: bool) -> ReplicaRecipe:
        """The same engine as one process makes (judge_models.py)."""
        return ReplicaRecipe(
            folder=seat.model.folder,
            dtype=DTYPES[seat.model.dtype],
            device="cuda" if is_on_gpu else "cpu",
            threads=max(1, num_threads(self._starter.config) // len(self._seats)),
        )

    def _restarted(self, role: ActorRole[Any], why: str) -> None:
        self._starter.say_restart(role, why)
        self._serving.pop(role.name, None)

    def _clients(self) -> JudgeClients:
        clients: dict[JudgeModel, dict[str, ReplicaClient]] = {}
        for name, handle in self._serving.items():
            clients.setdefault(self._seats[name].model, {})[name] = ActorClient(handle)
        return clients
