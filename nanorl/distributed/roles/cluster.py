"""The roles of a run as processes: on this machine (local) or on the machines of a Ray cluster.

    driver (this process)     tasks, batches, checkpoints' cursor, report; it holds no model
    ├─ trainer, rank 0..n     a WorkerGroup: dies and restarts as one        (trainer_ranks.py)
    ├─ replica-0, -1, ...     an inference engine each                       (replica_set.py)
    ├─ collector              agents, sandboxes, the router to the replicas  (collector_role.py)
    ├─ store                  the rollouts' file                             (store_role.py)
    ├─ reference, critic      where the algorithm has them                   (scoring_roles.py)
    └─ judge-0, judge-1, ...  where rewards ask a model in a folder          (judge_set.py)

All processes are under watch: the scheduler tells of deaths, a heartbeat of hangs. Any but the
trainer and the critic is started again alone, and what it was asked is asked again.
In this file: `Cluster`, which starts them all, finds out how they are, and ends them.

Left out: the loop that trains (trainer.py) and what a death of the trainer means (run.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from nanoengine.build import check_layout
from nanoengine.config import EngineConfig
from nanoengine.heads.scorer import Policy
from nanoengine.parallel.layout import Layout
from nanorl.distributed.roles.actor_role import ActorRole
from nanorl.distributed.roles.base import RunCritic
from nanorl.distributed.roles.collector_role import CollectorRole, collector_role
from nanorl.distributed.roles.device_turns import DeviceTurns, Hosts
from nanorl.distributed.roles.judge_set import JudgeSet
from nanorl.distributed.roles.placement import Places, transport_kind
from nanorl.distributed.roles.policy_role import RankedEngine
from nanorl.distributed.roles.replica_role import Replica
from nanorl.distributed.roles.replica_set import ReplicaSet
from nanorl.distributed.roles.role_starter import RoleStarter
from nanorl.distributed.roles.scoring_roles import ScoringRoles
from nanorl.distributed.roles.servers import check_servers
from nanorl.distributed.roles.store_role import close_store, store_role
from nanorl.distributed.roles.trainer_ranks import TrainerRanks
from nanorl.observability.monitor.board import IdleShares
from nanorl.observability.monitor.monitor_control import RoleKind, RoleStatus
from nanorl.observability.monitor.readings import RoleReadings
from nanorl.observability.store import RolloutStore
from nanorl.options.parts import Parts
from nanorl.options.run_judges import judge_seats
from nanosched import ActorHandle, Scheduler

PRELOAD = (
    "torch",
    "nanorl.distributed.roles.policy_role",
    "nanorl.distributed.roles.replica_role",
    "nanorl.distributed.roles.collector_role",
)
"""Imported once, by the process that all others are forked from."""

ANSWER_S = 1.0
"""So long a step waits for roles to say how long they have worked."""
IDLE_NAMES: Mapping[RoleKind, str] = {
    "policy": "idle_trainer",
    "replica": "idle_replicas",
    "collector": "idle_collector",
    "reference": "idle_reference",
    "critic": "idle_critic",
    "judge": "idle_judge",
}


class Cluster:
    """The processes of a run, from `start` to `close_loop`."""

    def __init__(self, parts: Parts) -> None:
        """`ValueError` for a layout that the model or the number of GPUs does not allow, before any
        process starts."""
        config = parts.config
        self.config = config
        check_layout(config.learner.layout, parts.shape, parts.warm_start_config(), config.learner)
        kind = transport_kind(config, has_gpus=parts.device.type == "cuda")
        if config.rollout.tp > 1:
            check_layout(Layout(tp=config.rollout.tp), parts.shape, EngineConfig())
        if config.rollout.addresses:
            rollout, temperature = config.rollout, config.rl.temperature
            check_servers(rollout.addresses, rollout.api_key_file, temperature)
        self._starter = starter = _open_starter(parts)
        self.optimizer_thread = ThreadPoolExecutor(1, "optimizer")
        hosts = Hosts(
            sleep=lambda: self._replicas.ask_all(Replica.sleep),
            wake=lambda: self._replicas.ask_all(Replica.wake),
            fetch=lambda: self._trainer.fetch(),
            park=lambda: self._trainer.park(),
        )
        turns = DeviceTurns(hosts if config.cluster.placement == "colocated" else None)
        self._trainer = TrainerRanks(starter, turns)
        self._replicas = ReplicaSet(starter, turns, self._trainer, kind)
        self._scoring = ScoringRoles(starter)
        self._judges = JudgeSet(starter, judge_seats(config, parts.kind))
        self.store = store_role(
            starter.scheduler,
            config.store_address,
            start_s=config.cluster.start_s,
            on_restart=starter.say_restart,
        )
        self.collector = collector_role(
            starter.scheduler,
            config,
            parts.folder,
            prepare=self._introduce_all,
            on_restart=starter.say_restart,
        )
        self._replicas.introduce_to(self.collector)
        self._judges.introduce_to(self.collector)
        self._readings = RoleReadings(self, time.monotonic)
        self._idle_shares = IdleShares()

    @property
    def say(self) -> Callable[[str], None]:
        """Tells the user what died and was started again."""
        return self._starter.say

    @say.setter
    def say(self, say: Callable[[str], None]) -> None:
        self._starter.say = say

    @property
    def control(self) -> Cluster:
        return self

    @property
    def engine(self) -> RankedEngine:
        return self._trainer.engine

    @property
    def publisher(self) -> ReplicaSet:
        return self._replicas

    # -- starting and ending -------------------------------------------------------------------

    async def start(self) -> None:
        """Start all roles; those that need nothing of each other at the same time."""
        starter = self._starter
        if (pictures := starter.parts.pictures) is not None:
            pictures.mkdir(parents=True, exist_ok=True)  # roles refuse to start without it
        starter.begin()
        replicas = self._replicas.make(self.config.rollout.replicas)
        await asyncio.gather(
            self._trainer.start(),
            starter.start(self.store, RolloutStore.heartbeat),
            starter.start(self.collector, CollectorRole.heartbeat),
            *(starter.start(replica, Replica.heartbeat) for replica in replicas),
            self._judges.start(),
        )
        for address in self.config.rollout.addresses:
            await self.add_replica(address)

    async def _introduce_all(self, collector: ActorHandle[CollectorRole]) -> None:
        """Name to a new collector whom it asks."""
        await self._replicas.introduce_all(collector)
        await self._judges.introduce_all(collector)

    async def trainer_death(self) -> str:
        """Wait until the trainer dies; returns how. Raises RoleLost if another role is dead and
        cannot be started again."""
        return await self._trainer.death()

    async def restart_trainer(self) -> None:
        self._trainer.end()
        self._replicas.transport.renew_senders()
        await self._trainer.start()

    async def close_loop(self) -> None:
        """End the watches; the processes end with the scheduler."""
        await close_store(self.store)
        self._trainer.close()
        self._scoring.close()
        for role in self._all():
            role.close()
        self._starter.end()

    def close(self) -> None:
        self._starter.scheduler.close()
        self.optimizer_thread.shutdown(wait=False, cancel_futures=True)
        self._replicas.close()

    # -- reference and critic ------------------------------------------------------------------

    async def open_reference(self, folders: Sequence[Path]) -> Policy:
        return await self._scoring.open_reference(folders)

    async def open_critic(self, scratch: Path) -> RunCritic:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.optimizer_thread, self.engine.write_model, scratch)
        return await self._scoring.open_critic(scratch)

    # -- how they are, and how many ------------------------------------------------------------

    def _all(self) -> list[ActorRole[Any]]:
        """The roles that have successors."""
        reference = self._scoring.reference
        scoring = () if reference is None else (reference,)
        return [self.collector, *self._replicas.roles, self.store, *scoring, *self._judges.roles]

    def roles(self) -> list[RoleStatus]:
        """Say how all roles are, as they last said themselves."""
        return [
            *self._trainer.statuses(),
            *(role.status() for role in self._all()),
            *self._scoring.critic_statuses(),
            *self._replicas.server_statuses(),
        ]

    async def idle_shares(self) -> dict[str, float]:
        """The mean of the roles of each kind that answer soon."""
        asks = (*(role.ask() for role in self._all()), self._trainer.ask())
        asked = [asyncio.ensure_future(one) for one in (*asks, self._scoring.ask_critic())]
        _, late = await asyncio.wait(asked, timeout=ANSWER_S)
        for one in late:
            one.cancel()
        roles = self._readings.roles()
        shares = self._idle_shares.since_last(roles)
        by_kind: dict[str, list[float]] = {}
        for role in roles:
            if role.name in shares and role.kind in IDLE_NAMES:
                by_kind.setdefault(IDLE_NAMES[role.kind], []).append(shares[role.name])
        return {name: fmean(values) for name, values in by_kind.items()}

    async def scale(self, replicas: int) -> None:
        """Have so many replicas from now on. One that leaves hands its requests on first."""
        await self._replicas.scale(replicas)

    async def add_replica(self, address: str) -> str:
        """Take in a server that somebody else started, with the current weights; its name."""
        return await self._replicas.add_server(address)

    async def remove_replica(self, name: str) -> None:
        """Take no more requests, hand on those under way, and end."""
        await self._replicas.remove(name)


def _open_starter(parts: Parts) -> RoleStarter:
    """Processes and devices for the roles. `ValueError` where there are too few devices."""
    cluster = parts.config.cluster
    scheduler = Scheduler(
        backend=cluster.backend,
        preload=PRELOAD if cluster.backend == "local" else (),
        address=cluster.address or None,
    )
    try:
        seats = judge_seats(parts.config, parts.kind)
        judges = {seat.name: seat.model.device != "cpu" for seat in seats}
        has_gpus = parts.device.type == "cuda"
        places = Places(scheduler, parts.config, has_gpus=has_gpus, judges=judges)
    except ValueError:
        scheduler.close()
        raise
    return RoleStarter(parts, scheduler, places)
