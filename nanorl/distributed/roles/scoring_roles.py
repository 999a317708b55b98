"""`ScoringRoles`: reference and critic as processes, where the algorithm has them.

A reference has no state and is started again alone; a critic has learnt from the steps, so its
death is the trainer's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nanoengine.heads.scorer import Policy
from nanorl.distributed.roles.actor_role import ActorRole, Pulse, heard, status_of, until_dead
from nanorl.distributed.roles.base import RunCritic
from nanorl.distributed.roles.give_sight import share_sight
from nanorl.distributed.roles.policy_role import TrainerLost
from nanorl.distributed.roles.role_starter import RoleStarter
from nanorl.distributed.roles.scorers import (
    CriticRole,
    ReferenceRole,
    RemoteCritic,
    RemoteReference,
)
from nanorl.observability.monitor.monitor_control import RoleState, RoleStatus
from nanorl.options.parts import num_threads
from nanosched import ActorHandle, SchedulerLost, WorkerDied


class ScoringRoles:
    """The models of a run that score what the policy has sampled."""

    def __init__(self, starter: RoleStarter) -> None:
        self._starter = starter
        self.reference: ActorRole[ReferenceRole] | None = None
        self._critic: ActorHandle[CriticRole] | None = None
        self._critic_watch: asyncio.Task[None] | None = None
        self._critic_answer: Mapping[str, Any] = {}
        self._num_critics = 0
        parts = starter.parts
        # of the processor that the policy's folder has; a folder that a run writes has none
        self._see = partial(share_sight, folder=parts.folder, pictures=parts.pictures)

    async def open_reference(self, folders: Sequence[Path]) -> Policy:
        """The reference of that Hugging Face folder, or of several."""
        starter, loop = self._starter, asyncio.get_running_loop()
        if self.reference is not None:  # the trainer was restarted, the reference goes on
            return RemoteReference(self.reference, loop)
        threads = num_threads(starter.config)

        async def start() -> ActorHandle[ReferenceRole]:
            place = starter.places.scorers["reference"]
            actor = starter.scheduler.actor(ReferenceRole, **place.of_one).remote(
                starter.config, folders, threads, self._see
            )
            async with starter.getting_ready(actor, "reference") as handle:
                await handle.call(ReferenceRole.heartbeat)
            return handle

        role = ActorRole(
            "reference", "reference", starter.scheduler, start, on_restart=starter.say_restart
        )
        await role.handle()
        self.reference = role
        starter.watch(role, ReferenceRole.heartbeat)
        return RemoteReference(role, loop)

    async def open_critic(self, scratch: Path) -> RunCritic:
        """A critic that starts as a copy of the policy in the folder `scratch`."""
        starter, config = self._starter, self._starter.config
        if self._critic is not None:  # it has learnt from steps that the run went back behind
            starter.scheduler.kill(self._critic)
        place = starter.places.scorers["critic"]
        actor = starter.scheduler.actor(CriticRole, **place.of_one).remote(
            config, starter.parts.critic_config(), scratch, num_threads(config), self._see
        )
        try:
            async with starter.getting_ready(actor, "the critic") as handle:
                await handle.call(CriticRole.heartbeat)
        except WorkerDied as died:
            raise TrainerLost(f"the critic died ({died})") from died
        self._critic, self._critic_answer = handle, {}
        self._num_critics += 1
        cluster = config.cluster
        pulse = Pulse(CriticRole.heartbeat, cluster.heartbeat_s, cluster.hang_s, self._hear)
        self._critic_watch = asyncio.create_task(self._watch(handle, pulse))
        return RemoteCritic(handle, asyncio.get_running_loop())

    async def _watch(self, critic: ActorHandle[CriticRole], pulse: Pulse) -> None:
        with suppress(SchedulerLost):  # whoever asks the critic hears it
            await until_dead(self._starter.scheduler, critic, pulse)

    def _hear(self, answer: Mapping[str, Any]) -> None:
        self._critic_answer = answer

    async def ask_critic(self) -> None:
        """Have the critic say now how it is, if there is one."""
        if self._critic is None:
            return
        answer = await heard(self._critic.call(CriticRole.heartbeat))
        if isinstance(answer, Mapping):
            self._hear(answer)

    def critic_statuses(self) -> list[RoleStatus]:
        """The status of the critic, as it last said itself; nothing where there is none."""
        if self._critic is None:
            return []
        state: RoleState = "ready" if self._critic_answer else "starting"
        return [status_of("critic", "critic", state, self._num_critics - 1, self._critic_answer)]

    def close(self) -> None:
        """End the watch of the critic."""
        if self._critic_watch is not None:
            self._critic_watch.cancel()
