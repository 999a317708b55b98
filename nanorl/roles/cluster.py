"""The roles of a run as processes: on this machine (local) or on the machines of a Ray cluster.

    driver (this process)     tasks, batches, checkpoints' cursor, report; it holds no model
    ├─ trainer, rank 0..n     a WorkerGroup: dies and restarts as one        (policy.py)
    ├─ replica-0, -1, ...     an inference engine each                       (replica.py)
    ├─ collector              agents, sandboxes, the router to the replicas  (collector.py)
    ├─ store                  the rollouts' file                             (store.py)
    └─ reference, critic      where the algorithm has them                   (scorers.py)

All processes are under watch: the scheduler tells of deaths, a heartbeat of hangs. Any but the
trainer and the critic is started again alone, and what it was asked is asked again. A replica that
starts late, or again, takes the current weights before its first request.

Left out: the loop that trains (trainer.py) and what a death of the trainer means (run.py).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from nanoengine.build import check_layout
from nanoengine.config import EngineConfig
from nanoengine.dtypes import DTYPES
from nanoengine.parallel.layout import Layout
from nanoengine.parallel.rendezvous import open_store
from nanoengine.scoring import Policy
from nanorl.monitor.board import IdleShares
from nanorl.monitor.control import RoleKind, RoleState, RoleStatus
from nanorl.monitor.readings import RoleReadings
from nanorl.roles.actor_role import (
    ActorRole,
    Attempts,
    Pulse,
    getting_ready,
    heard,
    limited_start,
    status_of,
    until_dead,
)
from nanorl.roles.base import RunCritic
from nanorl.roles.clients import ActorClient, ReplicaClient
from nanorl.roles.collector import CollectorRole, collector_role
from nanorl.roles.http_replica import HttpReplica
from nanorl.roles.placement import Places, transport_kind
from nanorl.roles.policy import (
    PolicyRank,
    PolicyRecipe,
    RankedEngine,
    TrainerLost,
    settled,
    start_trainer,
)
from nanorl.roles.replica import Replica, ReplicaRecipe, Seat
from nanorl.roles.role import RoleLost
from nanorl.roles.scorers import CriticRole, ReferenceRole, RemoteCritic, RemoteReference
from nanorl.roles.servers import check_servers, server_at
from nanorl.roles.store import close_store, store_role
from nanorl.roles.turns import DeviceTurns, Hosts
from nanorl.run.parts import Parts, num_threads
from nanorl.store import RolloutStore
from nanorl.weights.offer import Offer, WeightReceiver, WeightsRefused
from nanorl.weights.transport import Load, Transport, open_transport, weight_bytes
from nanosched import (
    ActorHandle,
    Scheduler,
    SchedulerLost,
    WorkerDied,
    WorkerGroup,
    meeting_address,
    node_address,
)

A = TypeVar("A")
MOST_PUBLICATIONS = 3
"""Attempts at one version. Where all meet at once (dist), a replica that hangs spoils it for all,
until its watch has found out: the first attempt takes half that time."""
PRELOAD = ("torch", "nanorl.roles.policy", "nanorl.roles.replica", "nanorl.roles.collector")
"""Imported once, by the process that all others are forked from."""

ANSWER_S = 1.0
"""So long a step waits for roles to say how long they have worked."""
IDLE_NAMES: Mapping[RoleKind, str] = {
    "policy": "idle_trainer",
    "replica": "idle_replicas",
    "collector": "idle_collector",
    "reference": "idle_reference",
    "critic": "idle_critic",
}


class Cluster:
    """The processes of a run, from `start` to `close_loop`."""

    def __init__(self, parts: Parts) -> None:
        """`ValueError` for a layout that the model or the number of GPUs does not allow, before any
        process starts."""
        config = parts.config
        self.parts, self.config = parts, config
        self.say: Callable[[str], None] = print
        self.layout = config.learner.layout
        check_layout(self.layout, parts.shape, parts.warm_start_config(), config.learner)
        self._transport_kind = transport_kind(config, has_gpus=parts.device.type == "cuda")
        if config.rollout.tp > 1:
            check_layout(Layout(tp=config.rollout.tp), parts.shape, EngineConfig())
        if config.rollout.addresses:
            rollout, temperature = config.rollout, config.rl.temperature
            check_servers(rollout.addresses, rollout.api_key_file, temperature)
        self._scheduler = Scheduler(
            backend=config.cluster.backend,
            preload=PRELOAD if config.cluster.backend == "local" else (),
            address=config.cluster.address or None,
        )
        try:
            has_gpus = parts.device.type == "cuda"
            self._places = Places(self._scheduler, config, has_gpus=has_gpus)
        except ValueError:
            self._scheduler.close()
            raise
        self.optimizer_thread = ThreadPoolExecutor(1, "optimizer")
        self.store = store_role(
            self._scheduler,
            config.store_address,
            start_s=config.cluster.start_s,
            on_restart=self._restarted,
        )
        self.collector = collector_role(
            self._scheduler,
            config,
            parts.folder,
            prepare=self._introduce_all,
            on_restart=self._restarted,
        )
        self._replicas: dict[str, ActorRole[Replica]] = {}
        self._serving: dict[str, ActorHandle[Replica]] = {}  # with the current weights
        self._reference: ActorRole[ReferenceRole] | None = None
        self._outside: dict[str, HttpReplica] = {}
        self._critic: ActorHandle[CriticRole] | None = None
        self._critic_watch: asyncio.Task[None] | None = None
        self._critic_answer: Mapping[str, Any] = {}
        self._num_critics = 0
        # Of replicas over several processes: all of them, and the store where they meet.
        self._split_replicas: dict[str, tuple[WorkerGroup[Replica], Any]] = {}
        self._group: WorkerGroup[PolicyRank] | None = None
        self._trainer_restarts = 0
        self._trainer_watch: asyncio.Task[None] | None = None
        self._trainer_answers: list[Mapping[str, Any]] = []
        self._engine: RankedEngine | None = None
        self._transport: Transport | None = None
        self._num_started = 0
        hosts = Hosts(
            sleep=partial(self._ask_all, Replica.sleep),
            wake=partial(self._ask_all, Replica.wake),
            fetch=self._fetch,
            park=self._park,
        )
        self._turns = DeviceTurns(hosts if config.cluster.placement == "colocated" else None)
        self._is_parked = False  # the trainer's optimizer
        self._readings = RoleReadings(self, time.monotonic)
        self._idle_shares = IdleShares()
        self._publishing = asyncio.Lock()
        self._has_weights = False
        self._steps_published = 0  # the trainer's `num_steps_begun` at the last publication
        self._joining: dict[str, ActorHandle[Replica]] = {}  # serve from the next one on
        self._role_lost: asyncio.Future[None] | None = None  # never has a value, only an error

    @property
    def control(self) -> Cluster:
        return self

    # -- starting and ending -------------------------------------------------------------------

    async def start(self) -> None:
        """Start all roles; those that need nothing of each other at the same time."""
        self._role_lost = asyncio.get_running_loop().create_future()
        replicas = [self._new_replica() for _ in range(self.config.rollout.replicas)]
        await asyncio.gather(
            self._start_trainer(),
            self._start_role(self.store, RolloutStore.heartbeat),
            self._start_role(self.collector, CollectorRole.heartbeat),
            *(self._start_role(replica, Replica.heartbeat) for replica in replicas),
        )
        for address in self.config.rollout.addresses:
            await self.add_replica(address)

    async def _start_role(self, role: ActorRole[Any], heartbeat: Callable[..., Any]) -> None:
        """Start it, and watch it from then on: others that start may wait for its answers."""
        await role.handle()
        self._watch(role, heartbeat)

    def _watch(self, role: ActorRole[Any], heartbeat: Callable[..., Any]) -> None:
        cluster = self.config.cluster
        watch = role.watch(heartbeat, cluster.heartbeat_s, cluster.hang_s)
        watch.add_done_callback(self._note_lost)

    def _note_lost(self, watch: asyncio.Task[None]) -> None:
        """A role without a successor ends the run (`trainer_death`)."""
        error = None if watch.cancelled() else watch.exception()
        assert self._role_lost is not None, "`start` comes first"
        if error is not None and not self._role_lost.done():
            self._role_lost.set_exception(error)

    def _restarted(self, role: ActorRole[Any], why: str) -> None:
        self.say(f"{role.name}: {why}; starting it again")
        self._joining.pop(role.name, None)
        if role.name in self._serving:
            del self._serving[role.name]
            self.transport.remove(role.name)

    async def close_loop(self) -> None:
        """End the watches; the processes end with the scheduler."""
        await close_store(self.store)
        for watch in (self._trainer_watch, self._critic_watch):
            if watch is not None:
                watch.cancel()
        for role in self._all():
            role.close()
        if self._role_lost is not None:
            self._role_lost.cancel()

    def close(self) -> None:
        self._scheduler.close()
        self.optimizer_thread.shutdown(wait=False, cancel_futures=True)
        if self._transport is not None:
            self._transport.close()

    def _all(self) -> list[ActorRole[Any]]:
        reference = () if self._reference is None else (self._reference,)
        return [self.collector, *self._replicas.values(), self.store, *reference]

    def roles(self) -> list[RoleStatus]:
        """As they last said themselves."""
        others = [role.status() for role in self._all()]
        return [*self._trainer_statuses(), *others, *self._critic_status(), *self._servers()]

    async def idle_shares(self) -> dict[str, float]:
        """The mean of the roles of each kind that answer soon."""
        asked = [asyncio.ensure_future(role.ask()) for role in self._all()]
        if self._group is not None:
            asked.append(asyncio.ensure_future(self._ask_trainer()))
        if self._critic is not None:
            asked.append(asyncio.ensure_future(self._ask_critic(self._critic)))
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

    async def _ask_trainer(self) -> None:
        assert self._group is not None, "whoever asks has looked"
        answers = [heard(one) for one in self._group.call(PolicyRank.heartbeat)]
        for rank, answer in enumerate(await asyncio.gather(*answers)):
            if isinstance(answer, Mapping):
                self._trainer_answers[rank] = answer

    async def _ask_critic(self, critic: ActorHandle[CriticRole]) -> None:
        answer = await heard(critic.call(CriticRole.heartbeat))
        if isinstance(answer, Mapping):
            self._hear_critic(answer)

    def _servers(self) -> list[RoleStatus]:
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

    def _critic_status(self) -> list[RoleStatus]:
        if self._critic is None:
            return []
        state: RoleState = "ready" if self._critic_answer else "starting"
        answer = self._critic_answer
        return [status_of("critic", "critic", state, self._num_critics - 1, answer)]

    def _trainer_statuses(self) -> list[RoleStatus]:
        is_alive = self._group is not None and not self._group.death.is_done()
        state: RoleState = "ready" if is_alive else "starting"
        return [
            status_of(f"trainer-{rank}", "policy", state, self._trainer_restarts, answer)
            for rank, answer in enumerate(self._trainer_answers)
        ]

    # -- the trainer ---------------------------------------------------------------------------

    @property
    def engine(self) -> RankedEngine:
        assert self._engine is not None, "`start` comes first"
        return self._engine

    async def trainer_death(self) -> str:
        """Wait until the trainer dies; returns how. Raises RoleLost if another role is dead and
        cannot be started again."""
        assert self._group is not None and self._role_lost is not None, "`start` comes first"
        death = asyncio.ensure_future(heard(self._group.death))
        try:
            await asyncio.wait({death, self._role_lost}, return_when=asyncio.FIRST_COMPLETED)
            if self._role_lost.done():
                self._role_lost.result()  # raises
            return str(death.result())
        finally:
            death.cancel()

    async def restart_trainer(self) -> None:
        self._trainer_restarts += 1
        if self._trainer_watch is not None:
            self._trainer_watch.cancel()
        if self._group is not None:
            self._group.kill()
        self.transport.renew_senders()
        await self._start_trainer()

    async def _start_trainer(self) -> None:
        """In its turn: what replicas on the same devices take is measured by what it leaves."""
        self._is_parked = False
        async with self._turns.of_trainer():
            await self._start_trainer_again_and_again()

    async def _start_trainer_again_and_again(self) -> None:
        attempts = Attempts(self._scheduler)
        while True:
            try:
                await self._start_trainer_once()
                return
            except TrainerLost as lost:
                if not attempts.fail():
                    raise RoleLost(
                        f"{lost}, {attempts} while it started. Look at the messages "
                        "above (memory?), then go on with --resume"
                    ) from lost
                self._trainer_restarts += 1
                self.say(f"{lost} while it started; starting it again")

    async def _start_trainer_once(self) -> None:
        config, world = self.config, self.layout.world
        recipe = PolicyRecipe(
            folder=self.parts.folder,
            config=self.parts.warm_start_config(),
            layout=self.layout,
            split=config.learner,
            device=config.device,
            threads=config.learner.threads or max(1, num_threads(config) // world),
        )
        ranks = [((recipe, rank), dict[str, Any]()) for rank in range(world)]
        group = self._scheduler.group(PolicyRank, ranks, **self._places.trainer.of_all)
        try:
            async with limited_start("the trainer", config.cluster.start_s):
                await start_trainer(group)
        except WorkerDied as died:
            group.kill()
            raise TrainerLost(f"the trainer died ({died})") from died
        except BaseException:
            group.kill()
            raise
        self._group = group
        self._engine = RankedEngine(
            group, recipe, asyncio.get_running_loop(), turn=self._turns.of_trainer
        )
        self._trainer_watch = asyncio.create_task(self._watch_trainer(group), name="watch trainer")

    async def _watch_trainer(self, group: WorkerGroup[PolicyRank]) -> None:
        """Watch all ranks; if one does not answer, whoever waits for the trainer hears of that."""
        cluster = self.config.cluster
        self._trainer_answers = [{} for _ in group.handles]

        async def watch(rank: int, handle: ActorHandle[PolicyRank]) -> None:
            pulse = Pulse(
                PolicyRank.heartbeat,
                cluster.heartbeat_s,
                cluster.hang_s,
                partial(self._trainer_answers.__setitem__, rank),
            )
            self.say(f"trainer-{rank}: {await until_dead(self._scheduler, handle, pulse)}")
            group.kill()

        with suppress(SchedulerLost):  # whoever waits for the trainer hears it
            await asyncio.gather(*(watch(*one) for one in enumerate(group.handles)))

    # -- weights -------------------------------------------------------------------------------

    @property
    def publisher(self) -> Cluster:
        return self

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            self._transport = self._open_transport()
        return self._transport

    def _open_transport(self) -> Transport:
        kind = self._transport_kind
        return open_transport(
            kind,
            num_bytes=weight_bytes(self.parts.shape, DTYPES[self.config.dtype]),
            folder=self.config.run_dir / "weights" if kind == "disk" else None,
            num_senders=self.layout.world,
            is_delta=self.config.cluster.delta,
            timeout_s=self.config.cluster.hang_s,
            meeting_place=(self._lasting_address, self.parts.device.type),
        )

    @property
    def _lasting_address(self) -> str:
        """Where machines that join the cluster later find the driver; nobody joins our own."""
        return node_address() if self.config.cluster.address else meeting_address()

    async def publish(self, version: int) -> float:
        """Bring the trainer's weights to all replicas; one that does not take them is replaced by
        another that does. Returns seconds. RoleLost if it fails again and again."""
        for _ in range(MOST_PUBLICATIONS - 1):
            try:
                return await self._publish_once(version)
            except WeightsRefused as refused:
                self.say(f"version {version} was not published ({refused}); once more")
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
                name: partial(self._load, one) for name, one in self._serving.items()
            }
            loads |= {name: partial(self._load, one) for name, one in self._joining.items()}
            loads |= {name: one.load_weights for name, one in self._outside.items()}
            self._has_weights = False  # if the trainer dies now, the next publication brings them
            report = await self.transport.publish(partial(self._send, version), loads, version)
            self._has_weights = True
            self._steps_published = self.engine.num_steps_begun
            has_newcomers = bool(self._joining)
            self._serving |= self._joining  # one that refused is killed below, as any other
            self._joining.clear()
        if has_newcomers:
            await self.collector.call(CollectorRole.set_replicas, self._clients())
        for name, why in (report.refused | dict.fromkeys(report.late, "no answer")).items():
            self.say(f"{name} did not take version {version} ({why})")
            if name in self._serving:
                self._scheduler.kill(self._serving[name])
        for name in self._outside.keys() & (report.refused.keys() | report.dead.keys()):
            await self._let_go(name)
        return report.seconds

    async def _send(self, version: int) -> Offer:
        """All ranks hand their weights over together; the first says what they are."""
        group, transport = self._group, self.transport
        assert group is not None, "`start` comes first"
        args = [(transport.sender(rank), version) for rank in range(len(group))]
        offers = await settled(group, group.call_each(PolicyRank.send_weights, args))
        return offers[0]

    async def _load(
        self, handle: ActorHandle[Replica], receiver: WeightReceiver, offer: Offer
    ) -> float:
        return await handle.call(Replica.load_weights, receiver, offer)

    def lent(self) -> AbstractAsyncContextManager[None]:
        """Colocated: the replicas sleep, so that the trainer may use their memory."""
        return self._turns.of_trainer()

    async def _fetch(self) -> None:
        if self._is_parked and self._group is not None:
            await settled(self._group, self._group.call(PolicyRank.reload))
        self._is_parked = False

    async def _park(self) -> None:
        """On GPUs. Of a trainer that died, who needs it next hears."""
        if self.parts.device.type != "cuda" or self._group is None:
            return
        with suppress(TrainerLost):
            await settled(self._group, self._group.call(PolicyRank.offload))
            self._is_parked = True

    async def _ask_all(self, method: Callable[..., Any]) -> None:
        """What a dead replica does not hear its successor need not know."""
        asked = [handle.call(method) for handle in self._serving.values()]
        await asyncio.gather(*(_ended(one) for one in asked))

    # -- replicas ------------------------------------------------------------------------------

    def _new_replica(self) -> ActorRole[Replica]:
        name = f"replica-{self._num_started}"
        self._places.replica(name)  # first: there may be no room for it
        self._num_started += 1
        role = ActorRole(
            name,
            "replica",
            self._scheduler,
            partial(self._start_replica, name),
            on_restart=self._restarted,
        )
        self._replicas[name] = role
        return role

    async def _start_replica(self, name: str) -> ActorHandle[Replica]:
        async with self._turns.of_replica():
            return await self._start_replica_now(name)

    async def _start_replica_now(self, name: str) -> ActorHandle[Replica]:
        config = self.config
        num_processes = max(1, config.rollout.replicas) * config.rollout.tp
        threads = config.rollout.threads or max(1, num_threads(config) // num_processes)
        recipe = ReplicaRecipe(
            folder=self.parts.folder,
            dtype=DTYPES[config.dtype],
            device=config.device,
            threads=threads,
            infer=self.parts.infer_config(),
        )
        seated = self._seat_replica(name, recipe)
        async with self._getting_ready(seated, name) as handle:
            await handle.call(Replica.heartbeat)
            async with self._publishing:  # nobody may publish between the two lines
                if self._has_weights and not self._can_catch_up:
                    self._joining[name] = handle
                    return handle
                if self._has_weights:
                    await self._catch_up(name, handle)
                self._serving[name] = handle
        if (collector := self.collector.current) is not None:
            await _ended(collector.call(CollectorRole.set_replicas, self._clients()))
        return handle

    @property
    def _can_catch_up(self) -> bool:
        """False while a newcomer has to wait for the next publication: `dist` sends from the
        trainer's own weights, which have moved on since the last one."""
        return (
            self._transport_kind != "dist" or self._steps_published == self.engine.num_steps_begun
        )

    async def _catch_up(self, name: str, handle: ActorHandle[Replica]) -> None:
        """The current weights for a new replica. WorkerDied if it does not get them from a trainer
        that lives: another attempt may."""
        try:
            await self.transport.catch_up(name, partial(self._load, handle))
        except TrainerLost:
            self._has_weights = False  # it publishes when it is back, before the next request
        except WeightsRefused as refused:
            raise WorkerDied(f"{name} did not take the weights ({refused})") from refused

    def _seat_replica(self, name: str, recipe: ReplicaRecipe) -> ActorHandle[Replica]:
        """The actor that answers for a replica, of one process or of several that end together."""
        tp, place = self.config.rollout.tp, self._places.replica(name)
        if tp == 1:
            return self._scheduler.actor(Replica, **place.of_one).remote(recipe)
        store, meeting = open_store(meeting_address())
        epoch = f"{name}/{uuid.uuid4().hex}"
        seats = [Seat(rank=rank, tp=tp, meeting=meeting, name=epoch) for rank in range(tp)]
        group = self._scheduler.group(
            Replica, [((recipe,), {"seat": seat}) for seat in seats], **place.of_all
        )
        self._split_replicas[name] = group, store
        for follower in group.handles[1:]:
            follower.call(Replica.follow)
        return group.handles[0]

    def _clients(self) -> dict[str, ReplicaClient]:
        ours = {name: ActorClient(handle) for name, handle in self._serving.items()}
        return {**ours, **self._outside}

    async def _introduce_all(self, collector: ActorHandle[CollectorRole]) -> None:
        """A new collector's predecessor waits for nothing any more."""
        await asyncio.gather(*(_ended(one.call(Replica.abort)) for one in self._serving.values()))
        known = None
        while known != self._serving:  # until nobody has come or gone meanwhile
            known = dict(self._serving)
            await collector.call(CollectorRole.set_replicas, self._clients())

    def _getting_ready(
        self, actor: ActorHandle[A], name: str
    ) -> AbstractAsyncContextManager[ActorHandle[A]]:
        return getting_ready(self._scheduler, actor, name, self.config.cluster.start_s)

    # -- elastic -------------------------------------------------------------------------------

    async def scale(self, replicas: int) -> None:
        """So many replicas from now on. One that leaves hands its requests on first."""
        if replicas < 1:
            raise ValueError(f"replicas={replicas}: at least one has to play the rollouts")
        while len(self._replicas) > replicas:
            await self.remove_replica(next(reversed(self._replicas)))
        new = self._new_replicas(replicas - len(self._replicas))
        await asyncio.gather(*(self._start_role(role, Replica.heartbeat) for role in new))

    def _new_replicas(self, count: int) -> list[ActorRole[Replica]]:
        """All of them, or none where there is no room for all."""
        new: list[ActorRole[Replica]] = []
        try:
            for _ in range(count):
                new.append(self._new_replica())
        except ValueError:
            for role in new:
                del self._replicas[role.name]
                self._places.free(role.name)
            raise
        return new

    async def remove_replica(self, name: str) -> None:
        """Take no more requests, hand on those under way, and end."""
        if name in self._outside:
            await self._let_go(name)
            return
        if name not in self._replicas:
            known = ", ".join((*self._replicas, *self._outside))
            raise ValueError(f"{name}: no replica of this run; there are {known}")
        if len(self._replicas) == 1:
            raise ValueError(f"{name} is the last replica: nobody would play the rollouts")
        role = self._replicas.pop(name)
        role.close()
        handle = self._serving.pop(name, None) or self._joining.pop(name, None)
        if handle is not None:
            await self.collector.call(CollectorRole.set_replicas, self._clients())
            await _ended(handle.call(Replica.drain))
            async with self._publishing:  # others may be in the middle of taking weights with it
                self._scheduler.kill(handle)
                self.transport.remove(name)
        self._split_replicas.pop(name, None)
        self._places.free(name)

    async def add_replica(self, address: str) -> str:
        """A server that somebody else started, as one more replica, with the current weights."""
        if self._transport_kind != "disk":
            raise ValueError(
                f"{address}: a server reads weights from files; start the run with "
                "--cluster.transport disk to use servers"
            )
        self.config.check_address(address)
        replica = server_at(address, self.config.rollout.api_key_file)
        await replica.ready(self.config.rl.temperature)
        name = f"server-{self._num_started}"
        self._num_started += 1
        async with self._publishing:
            if self._has_weights:
                await self.transport.catch_up(name, replica.load_weights)
            self._outside[name] = replica
        if replica.note:
            self.say(f"{name} is {replica.engine} at {replica.url}: {replica.note}")
        await self.collector.call(CollectorRole.set_replicas, self._clients())
        return name

    async def _let_go(self, name: str) -> None:
        """A server that is not used any more goes on running: it is somebody else's."""
        del self._outside[name]
        self.transport.remove(name)
        await self.collector.call(CollectorRole.set_replicas, self._clients())
        self.say(f"{name} is not used any more")
        if not (self._replicas or self._outside):
            raise RoleLost(f"{name} was the last replica; the messages above say why it left")

    # -- reference and critic ------------------------------------------------------------------

    async def open_reference(self, folders: Sequence[Path]) -> Policy:
        loop = asyncio.get_running_loop()
        if self._reference is not None:  # the trainer was restarted, the reference goes on
            return RemoteReference(self._reference, loop)
        threads = num_threads(self.config)

        async def start() -> ActorHandle[ReferenceRole]:
            place = self._places.scorers["reference"]
            actor = self._scheduler.actor(ReferenceRole, **place.of_one).remote(
                self.config, folders, threads
            )
            async with self._getting_ready(actor, "reference") as handle:
                await handle.call(ReferenceRole.heartbeat)
            return handle

        role = ActorRole(
            "reference", "reference", self._scheduler, start, on_restart=self._restarted
        )
        await role.handle()
        self._reference = role
        self._watch(role, ReferenceRole.heartbeat)
        return RemoteReference(role, loop)

    async def open_critic(self, scratch: Path) -> RunCritic:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.optimizer_thread, self.engine.write_model, scratch)
        if self._critic is not None:  # it has learnt from steps that the run went back behind
            self._scheduler.kill(self._critic)
        place = self._places.scorers["critic"]
        actor = self._scheduler.actor(CriticRole, **place.of_one).remote(
            self.config, self.parts.critic_config(), scratch, num_threads(self.config)
        )
        cluster = self.config.cluster
        try:
            async with self._getting_ready(actor, "the critic") as handle:
                await handle.call(CriticRole.heartbeat)
        except WorkerDied as died:
            raise TrainerLost(f"the critic died ({died})") from died
        self._critic, self._critic_answer = handle, {}
        self._num_critics += 1
        pulse = Pulse(CriticRole.heartbeat, cluster.heartbeat_s, cluster.hang_s, self._hear_critic)
        self._critic_watch = asyncio.create_task(self._watch_critic(handle, pulse))
        return RemoteCritic(handle, loop)

    async def _watch_critic(self, critic: ActorHandle[CriticRole], pulse: Pulse) -> None:
        with suppress(SchedulerLost):  # whoever asks the critic hears it
            await until_dead(self._scheduler, critic, pulse)

    def _hear_critic(self, answer: Mapping[str, Any]) -> None:
        self._critic_answer = answer


async def _ended(call: Any) -> None:
    """Wait for a call whose actor may be dead; its successor, if any, is told anyhow."""
    with suppress(WorkerDied):
        await call
