"""The collector role: agents, environments and sandboxes, and the router to the policy's replicas.

It plays groups for the trainer, single tasks for the evaluation, and a teacher's traces for the
warm start. It keeps no state that a successor would need: what it played is a function of
(seed, task, weights), so a group that was under way when it died is played again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoengine.packing import Sample
from nanoinfer.params import SamplingParams
from nanorl.agents.collector import AgentCollector
from nanorl.agents.concurrency import ConcurrencyLimit
from nanorl.agents.context import Generator
from nanorl.agents.times import RolloutTimes
from nanorl.algorithms.hindsight import HindsightWriter
from nanorl.distributed.roles.actor_role import ActorRole, OnRestart, getting_ready
from nanorl.distributed.roles.router import ReplicaClient, Router
from nanorl.distributed.roles.shared_folder import require_folder
from nanorl.distributed.warm_start import WarmStart
from nanorl.envs.judged import judges_of
from nanorl.observability.monitor.vitals import vitals
from nanorl.options.agent_kit import AgentKit
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import folder_sees, pictures_folder
from nanorl.task import Task
from nanorl.types import Rollout, Status
from nanosched import ActorHandle, Scheduler

if TYPE_CHECKING:
    from nanorl.distributed.roles.judge_routers import JudgeClients, JudgeRouters
    from nanorl.envs.group_judged import Notes


class CollectorRole(AgentCollector):
    """An actor of a run; in other processes it is given the replicas' handles."""

    kit: AgentKit

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        kit: AgentKit | None = None,
        generator: Generator | None = None,
    ) -> None:
        """`folder` is the model's, for its tokenizer. A `kit` and a `generator` are those of this
        process, where there are any; without a generator requests go to the replicas of
        `set_replicas`."""
        require_folder(folder)
        rl = config.rl
        if kit is None and folder_sees(folder):
            require_folder(pictures_folder(config))
        own = AgentKit(config, folder) if kit is None else kit
        self.router = Router()
        self.judges: JudgeRouters | None = None
        if config.cluster.backend != "inline" and judges_of(own.kind):
            from nanorl.distributed.roles.judge_routers import JudgeRouters  # few runs need it

            self.judges = JudgeRouters(own.kind)
        self.notes: list[Notes] = []  # of the groups that a judge compares
        if judges_of(own.kind):
            from nanorl.envs.group_judged import notes_of  # few runs need it

            self.notes = notes_of(own.kind)
        self._unjudged: list[Rollout] = []  # since a judge ranked a group
        if self.notes:
            self.run_group = self._run_judged_group  # type: ignore[method-assign]
        self.writer: HindsightWriter | None = None
        if rl.algorithm.has_hindsight:
            self.writer = HindsightWriter(rl.algorithm, own.tokenizer)
        super().__init__(
            own,
            self.router if generator is None else generator,
            ConcurrencyLimit(rl.concurrency),
            run_seed=config.seed,
            max_retries=rl.max_retries,
            most_lost=2 * rl.tasks_per_step * rl.group_size,  # a bad minute may cost a batch
            hindsight=self.writer,
        )
        if self.writer is not None:
            self.play = self._play_noting
        self._warm_start = WarmStart(config, own)

    async def set_replicas(self, replicas: Mapping[str, ReplicaClient]) -> None:
        """The replicas that take requests from now on, by their names."""
        self.router.set_replicas(replicas)

    async def set_judges(self, judges: JudgeClients) -> None:
        """The judges that take questions from now on, by their models and names."""
        assert self.judges is not None, "it is told of judges where its rewards ask some"
        self.judges.set_judges(judges)

    async def _play_noting(
        self, task: Task, *, group_id: str, rollout_id: str, sampling: SamplingParams
    ) -> Rollout:
        """One rollout of a group, whose opening is noted for who writes its hindsight."""
        assert self.writer is not None, "it is why rollouts are played so"
        return await self.play_task(
            task,
            group_id=group_id,
            rollout_id=rollout_id,
            sampling=sampling,
            openings=self.writer.openings,
        )

    async def _run_judged_group(
        self, task: Task, *, group_id: str, size: int, sampling: SamplingParams
    ) -> list[Rollout]:
        """As `RolloutCollector.run_group`. When all were played, the judge that compares them is
        asked; of a group that it does not rank none is left."""
        with ExitStack() as noted:
            for notes in self.notes:
                noted.enter_context(notes.of(group_id))
            rollouts = await super().run_group(
                task, group_id=group_id, size=size, sampling=sampling
            )
            for notes in self.notes:
                rollouts = await notes.judged(task, group_id, rollouts)
        lost = [one for one in rollouts if one.status == Status.FAILED]
        if rollouts and not lost:
            self._unjudged.clear()
        for one in lost:
            self._failed.append(replace(one, rollout_id=f"{one.rollout_id}-unjudged"))
        if lost:  # members that play well say nothing of a judge that never answers
            self._unjudged += lost
            self._lost = list(self._unjudged)
            self._check_lost()
        return [one for one in rollouts if one.status != Status.FAILED]

    async def teach(self, step: int) -> list[Sample]:
        """The samples of a step of the warm start."""
        return await self._warm_start.samples(step)

    async def take_playing(self) -> dict[str, float]:
        """Say how many rollouts played at a time since the last call, and what the cache forgot."""
        return self.concurrency.take_counts()

    async def take_http_counts(self) -> dict[str, float]:
        """Count what the recording proxy did since the last call; nothing where there is none."""
        return self.kit.take_http_counts()

    async def take_judge_costs(self) -> dict[str, float]:
        """Say what LLM judges cost since the last call; nothing where there are none."""
        return self.kit.take_judge_costs()

    async def take_times(self) -> Mapping[str, list[RolloutTimes]]:
        """When what happened in the rollouts that have ended since the last call."""
        return self.kit.take_times()

    async def heartbeat(self) -> dict[str, Any]:
        """Answers from the loop that plays the rollouts; with the router's counters."""
        return {
            **vitals(),
            "num_running": float(len(self._running)),
            "busy_s": self.total_busy_s(),
            **{
                name if name in ("num_waiting", "num_open") else f"{name}_total": value
                for name, value in self.router.counters().items()
                if not name.startswith("load/")
            },
        }

    async def close(self) -> None:
        await self.stop()
        await self.kit.close_loop()
        self.kit.close()


def collector_role(
    scheduler: Scheduler,
    config: RunConfig,
    folder: Path,
    *,
    kit: AgentKit | None = None,
    generator: Generator | None = None,
    prepare: Callable[[ActorHandle[CollectorRole]], Awaitable[None]] | None = None,
    on_restart: OnRestart | None = None,
) -> ActorRole[CollectorRole]:
    """The collector of a run; `prepare` introduces each new one to the replicas."""

    async def start() -> ActorHandle[CollectorRole]:
        actor = scheduler.actor(CollectorRole, num_cpus=0).remote(
            config, folder, kit=kit, generator=generator
        )
        async with getting_ready(scheduler, actor, "collector", config.cluster.start_s) as handle:
            await handle.call(CollectorRole.heartbeat)
            if prepare is not None:
                await prepare(handle)
        return handle

    return ActorRole("collector", "collector", scheduler, start, on_restart=on_restart)
