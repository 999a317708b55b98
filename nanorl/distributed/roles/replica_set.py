"""`ReplicaSet`: the inference engines of a run, and how the trainer's weights reach them.

    serving    has the current weights and takes requests
    joining    is ready and waits for the next publication, which brings it what it has missed
    outside    a server that somebody else started: it is used and let go, never ended

A replica that starts late, or again, takes the current weights before its first request.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from nanoengine.optim import DTYPES
from nanoengine.parallel.rendezvous import open_store
from nanoengine.plan.footprint import weight_bytes
from nanorl.distributed.roles.actor_role import ActorRole, ended
from nanorl.distributed.roles.collector_role import CollectorRole
from nanorl.distributed.roles.device_turns import DeviceTurns
from nanorl.distributed.roles.http_replica import HttpReplica
from nanorl.distributed.roles.policy_role import TrainerLost
from nanorl.distributed.roles.replica_clients import ActorClient, ReplicaClient
from nanorl.distributed.roles.replica_role import Replica, ReplicaRecipe, Seat
from nanorl.distributed.roles.role import RoleLost
from nanorl.distributed.roles.role_starter import RoleStarter
from nanorl.distributed.roles.servers import server_at
from nanorl.distributed.roles.trainer_ranks import TrainerRanks
from nanorl.distributed.weights.offer import Offer, WeightReceiver, WeightsRefused
from nanorl.distributed.weights.transport import Kind, Load, Transport, open_transport
from nanorl.observability.monitor.monitor_control import RoleStatus
from nanorl.options.parts import num_threads
from nanosched import ActorHandle, WorkerDied, WorkerGroup, meeting_address, node_address

MOST_PUBLICATIONS = 3
"""Attempts at one version. Where all meet at once (dist), a replica that hangs spoils it for all,
until its watch has found out: the first attempt takes half that time."""


class ReplicaSet:
    """All replicas of a run; it publishes weights (nanorl/learner.py, `Publisher`)."""

    def __init__(
        self,
        starter: RoleStarter,
        turns: DeviceTurns,
        trainer: TrainerRanks,
        transport_kind: Kind,
    ) -> None:
        self._starter, self._turns, self._trainer = starter, turns, trainer
        self._collector: ActorRole[CollectorRole] | None = None
        self._transport_kind = transport_kind
        self._transport: Transport | None = None
        self._roles: dict[str, ActorRole[Replica]] = {}
        self.serving: dict[str, ActorHandle[Replica]] = {}  # with the current weights
        self._joining: dict[str, ActorHandle[Replica]] = {}  # serve from the next one on
        self._outside: dict[str, HttpReplica] = {}
        # Of replicas over several processes: all of them, and the store where they meet.
        self._split: dict[str, tuple[WorkerGroup[Replica], Any]] = {}
        self._num_started = 0
        self._publishing = asyncio.Lock()
        self._has_weights = False
        self._steps_published = 0  # the trainer's `num_steps_begun` at the last publication

    @property
    def roles(self) -> list[ActorRole[Replica]]:
        """Those that the scheduler starts."""
        return [*self._roles.values()]

    def introduce_to(self, collector: ActorRole[CollectorRole]) -> None:
        """Name the collector, whose requests the replicas take."""
        self._collector = collector

    @property
    def collector(self) -> ActorRole[CollectorRole]:
        assert self._collector is not None, "`introduce_to` comes first"
        return self._collector

    # -- weights -------------------------------------------------------------------------------

    @property
    def transport(self) -> Transport:
        """The way that weights take from trainer to replicas."""
        if self._transport is None:
            self._transport = self._open_transport()
        return self._transport

    def _open_transport(self) -> Transport:
        kind, parts, config = self._transport_kind, self._starter.parts, self._starter.config
        return open_transport(
            kind,
            num_bytes=weight_bytes(parts.shape, DTYPES[config.dtype]),
            folder=config.run_dir / "weights" if kind == "disk" else None,
            num_senders=config.learner.layout.world,
            is_delta=config.cluster.delta,
            timeout_s=config.cluster.hang_s,
            meeting_place=(self._lasting_address, parts.device.type),
        )

    @property
    def _lasting_address(self) -> str:
        """The driver's address for machines that join the cluster later; nobody joins our own."""
        return node_address() if self._starter.config.cluster.address else meeting_address()

    def lent(self) -> AbstractAsyncContextManager[None]:
        """Colocated: the replicas sleep, so that the trainer may use their memory."""
        return self._turns.of_trainer()

    async def publish(self, version: int) -> float:
        """Bring the trainer's weights to all replicas; one that does not take them is replaced by
        another that does. Returns seconds. RoleLost if it fails again and again."""
        for _ in range(MOST_PUBLICATIONS - 1):
            try:
                return await self._publish_once(version)
            except WeightsRefused as refused:
                self._starter.say(f"version {version} was not published ({refused}); once more")
        try:
            return await self._publish_once(version)
        except WeightsRefused as refused:
            raise RoleLost(
                f"version {version} could not be published ({refused}), {MOST_PUBLICATIONS} times. "
                "Look at the messages above, then go on with --resume"
            ) from refused

    async def _publish_once(self, version: int) -> float:
        async with self._publishing:
            loads: dict[str, Load] = {
                name: partial(self._load, one) for name, one in self.serving.items()
            }
            loads |= {name: partial(self._load, one) for name, one in self._joining.items()}
            loads |= {name: one.load_weights for name, one in self._outside.items()}
            self._has_weights = False  # if the trainer dies now, the next publication brings them
            send = partial(self._trainer.send_weights, self.transport, version)
            report = await self.transport.publish(send, loads, version)
            self._has_weights = True
            self._steps_published = self._trainer.engine.num_steps_begun
            has_newcomers = bool(self._joining)
            self.serving |= self._joining  # one that refused is killed below, as any other
            self._joining.clear()
        if has_newcomers:
            await self._tell_collector()
        for name, why in (report.refused | dict.fromkeys(report.late, "no answer")).items():
            self._starter.say(f"{name} did not take version {version} ({why})")
            if name in self.serving:
                self._starter.scheduler.kill(self.serving[name])
        for name in self._outside.keys() & (report.refused.keys() | report.dead.keys()):
            await self._let_go(name)
        return report.seconds

    async def _load(
        self, handle: ActorHandle[Replica], receiver: WeightReceiver, offer: Offer
    ) -> float:
        return await handle.call(Replica.load_weights, receiver, offer)

    @property
    def _can_catch_up(self) -> bool:
        """False while a newcomer has to wait for the next publication: `dist` sends from the
        trainer's own weights, which have moved on since the last one."""
        return (
            self._transport_kind != "dist"
            or self._steps_published == self._trainer.engine.num_steps_begun
        )

    async def _catch_up(self, name: str, handle: ActorHandle[Replica]) -> None:
        """Give a new replica the current weights. WorkerDied if it does not get them from a trainer
        that lives: another attempt may."""
        try:
            await self.transport.catch_up(name, partial(self._load, handle))
        except TrainerLost:
            self._has_weights = False  # it publishes when it is back, before the next request
        except WeightsRefused as refused:
            raise WorkerDied(f"{name} did not take the weights ({refused})") from refused

    # -- starting ------------------------------------------------------------------------------

    def make(self, count: int) -> list[ActorRole[Replica]]:
        """Make so many replicas more, or none where there is no room for all. They start with their
        first call."""
        new: list[ActorRole[Replica]] = []
        try:
            for _ in range(count):
                new.append(self._make_one())
        except ValueError:
            for role in new:
                del self._roles[role.name]
                self._starter.places.free(role.name)
            raise
        return new

    def _make_one(self) -> ActorRole[Replica]:
        name = f"replica-{self._num_started}"
        self._starter.places.replica(name)  # first: there may be no room for it
        self._num_started += 1
        role = ActorRole(
            name,
            "replica",
            self._starter.scheduler,
            partial(self._start, name),
            on_restart=self._restarted,
        )
        self._roles[name] = role
        return role

    def _restarted(self, role: ActorRole[Any], why: str) -> None:
        self._starter.say_restart(role, why)
        self._joining.pop(role.name, None)
        if role.name in self.serving:
            del self.serving[role.name]
            self.transport.remove(role.name)

    async def _start(self, name: str) -> ActorHandle[Replica]:
        async with self._turns.of_replica():
            return await self._start_now(name)

    async def _start_now(self, name: str) -> ActorHandle[Replica]:
        seated = self._seat(name, self._recipe())
        async with self._starter.getting_ready(seated, name) as handle:
            await handle.call(Replica.heartbeat)
            async with self._publishing:  # nobody may publish between the two lines
                if self._has_weights and not self._can_catch_up:
                    self._joining[name] = handle
                    return handle
                if self._has_weights:
                    await self._catch_up(name, handle)
                self.serving[name] = handle
        if (collector := self.collector.current) is not None:
            await ended(collector.call(CollectorRole.set_replicas, self._clients()))
        return handle

    def _recipe(self) -> ReplicaRecipe:
        config, parts = self._starter.config, self._starter.parts
        num_processes = max(1, config.rollout.replicas) * config.rollout.tp
        return ReplicaRecipe(
            folder=parts.folder,
            dtype=DTYPES[config.dtype],
            device=config.device,
            threads=config.rollout.threads or max(1, num_threads(config) // num_processes),
            infer=parts.infer_config(),
            pictures=parts.pictures,
        )

    def _seat(self, name: str, recipe: ReplicaRecipe) -> ActorHandle[Replica]:
        """The actor that answers for a replica, of one process or of several that end together."""
        starter = self._starter
        tp, place = starter.config.rollout.tp, starter.places.replica(name)
        if tp == 1:
            return starter.scheduler.actor(Replica, **place.of_one).remote(recipe)
        store, meeting = open_store(meeting_address())
        epoch = f"{name}/{uuid.uuid4().hex}"
        seats = [Seat(rank=rank, tp=tp, meeting=meeting, name=epoch) for rank in range(tp)]
        group = starter.scheduler.group(
            Replica, [((recipe,), {"seat": seat}) for seat in seats], **place.of_all
        )
        self._split[name] = group, store
        for follower in group.handles[1:]:
            follower.call(Replica.follow)
        return group.handles[0]

    # -- coming and going ----------------------------------------------------------------------

    async def scale(self, replicas: int) -> None:
        """Have so many replicas from now on. One that leaves hands its requests on first."""
        if replicas < 1:
            raise ValueError(f"replicas={replicas}: at least one has to play the rollouts")
        while len(self._roles) > replicas:
            await self.remove(next(reversed(self._roles)))
        new = self.make(replicas - len(self._roles))
        await asyncio.gather(*(self._starter.start(role, Replica.heartbeat) for role in new))

    async def remove(self, name: str) -> None:
        """Take no more requests, hand on those under way, and end."""
        if name in self._outside:
            await self._let_go(name)
            return
        if name not in self._roles:
            known = ", ".join((*self._roles, *self._outside))
            raise ValueError(f"{name}: no replica of this run; there are {known}")
        if len(self._roles) == 1:
            raise ValueError(f"{name} is the last replica: nobody would play the rollouts")
        role = self._roles.pop(name)
        role.close()
        handle = self.serving.pop(name, None) or self._joining.pop(name, None)
        if handle is not None:
            await self._tell_collector()
            await ended(handle.call(Replica.drain))
            async with self._publishing:  # others may be in the middle of taking weights with it
                self._starter.scheduler.kill(handle)
                self.transport.remove(name)
        self._split.pop(name, None)
        self._starter.places.free(name)

    async def add_server(self, address: str) -> str:
        """Take in a server that somebody else started, with the current weights; its name."""
        if self._transport_kind != "disk":
            raise ValueError(
                f"{address}: a server reads weights from files; start the run with "
                "--cluster.transport disk to use servers"
            )
        config = self._starter.config
        config.check_address(address)
        replica = server_at(address, config.rollout.api_key_file)
        await replica.ready(config.rl.temperature)
        name = f"server-{self._num_started}"
        self._num_started += 1
        async with self._publishing:
            if self._has_weights:
                await self.transport.catch_up(name, replica.load_weights)
            self._outside[name] = replica
        if replica.note:
            self._starter.say(f"{name} is {replica.engine} at {replica.url}: {replica.note}")
        await self._tell_collector()
        return name

    async def _let_go(self, name: str) -> None:
        """A server that is not used any more goes on running: it is somebody else's."""
        del self._outside[name]
        self.transport.remove(name)
        await self._tell_collector()
        self._starter.say(f"{name} is not used any more")
        if not (self._roles or self._outside):
            raise RoleLost(f"{name} was the last replica; the messages above say why it left")

    def server_statuses(self) -> list[RoleStatus]:
        """The servers, of whose processes nothing is known."""
        return [
            RoleStatus(
                name=name,
                kind="replica",
                state="ready",
                restarts=0,
                pid=None,
                host=server.host,
                metrics={},
            )
            for name, server in self._outside.items()
        ]

    # -- others --------------------------------------------------------------------------------

    def _clients(self) -> dict[str, ReplicaClient]:
        ours = {name: ActorClient(handle) for name, handle in self.serving.items()}
        return {**ours, **self._outside}

    async def _tell_collector(self) -> None:
        await self.collector.call(CollectorRole.set_replicas, self._clients())

    async def introduce_all(self, collector: ActorHandle[CollectorRole]) -> None:
        """Name all replicas to a new collector, whose predecessor waits for nothing any more."""
        await self.ask_all(Replica.abort)
        known = None
        while known != self.serving:  # until nobody has come or gone meanwhile
            known = dict(self.serving)
            await collector.call(CollectorRole.set_replicas, self._clients())

    async def ask_all(self, method: Callable[..., Any]) -> None:
        """Ask all that serve; what a dead one does not hear its successor need not know."""
        asked = [handle.call(method) for handle in self.serving.values()]
        await asyncio.gather(*(ended(one) for one in asked))

    def close(self) -> None:
        """Close the transport, if there is one."""
        if self._transport is not None:
            self._transport.close()
