"""The reinforcement-learning loop: one `fit()` for synchronous and asynchronous training.

    producer   lets groups start (`StalenessController`), has the collector play them (collector.py)
               and puts them into the `TransferQueue`
    scorer     has the learner score groups that are complete while others still play, where the
               models that score have devices of their own
    consumer   has a batch assembled (`BatchAssembler`), has the learner (learner.py) make optimizer
               steps of it and publish the weights to the inference engine, logs

Learner and collector are actors (nanosched): the learner an object of this process, whose engine
may be elsewhere (learner.py), the collector here or in another process, where it may die and have a
successor (distributed/roles/actor_role.py): the groups that it was playing are then played again.

With `max_staleness = 0` the rollouts of step s start only when s optimizer steps are done, so
synchronous training is a special case and not another loop; with more, rollouts go on while the
optimizer runs in another thread.

Groups finish in any order and by default are taken by index. So every decision that matters (tasks,
sampling seeds, which groups make a batch) is a function of (seed, step), and a synchronous run that
is killed and resumed from its last checkpoint ends with the same bits. With staleness, time alone
decides under which weights a token is sampled: such a run resumes with the same tasks and seeds,
and no two runs are equal. What was played before a kill is found in the journal, and not again.
Next: flow/ (who may start and what makes a batch), run/ (the order of a whole run, checkpoints),
learner.py, collector.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from nanoinfer.cancellation import to_the_end
from nanorl.agents.collector import RolloutCollector
from nanorl.batch_metrics import batch_metrics
from nanorl.distributed.roles.collector_role import CollectorRole
from nanorl.distributed.roles.role import Role
from nanorl.flow.assembly import BatchAssembler, GroupBatch
from nanorl.flow.curriculum import TaskChooser
from nanorl.flow.group import FinishedGroup
from nanorl.flow.journal import Journal
from nanorl.flow.staleness import StalenessController
from nanorl.flow.transfer_queue import GROUP, Consumer, QueueCursor, TransferQueue
from nanorl.learner import Learner
from nanorl.observability.results import StepResult
from nanorl.options.run_config import RunConfig
from nanorl.scorers.gap_probe import GapProbe
from nanorl.scorers.scored_learner import GroupScores, ScoredLearner
from nanorl.task import Task
from nanorl.types import Rollout
from nanosched import ActorHandle, TaskError

if TYPE_CHECKING:
    from nanorl.flow.replay_groups import ReplayGroups

OnStep = Callable[[StepResult], Awaitable[None]]
Pause = Callable[[], Awaitable[None]]
SCORES = "scores"


@dataclass(kw_only=True)
class _Flow:
    """The parts of one `fit`."""

    staleness: StalenessController
    queue: TransferQueue
    trained: Consumer  # the batches
    scored: Consumer | None  # groups to be scored while others play
    assembler: BatchAssembler
    probe: GapProbe


class Trainer:
    """Owns the RL loop over two actors. The caller decides what to do after each step."""

    def __init__(
        self,
        config: RunConfig,
        *,
        learner: ActorHandle[Learner],
        collector: ActorHandle[RolloutCollector] | Role[CollectorRole],
        tasks: TaskChooser,
        journal: Journal | None = None,
        scores_early: bool = False,
        measures_gap: bool = True,
    ) -> None:
        """`journal` has the groups of this run that an earlier process played. `scores_early`: the
        learner scores groups as they are complete, not only whole batches. `measures_gap`: it looks
        for rollouts to measure the log-prob gap on where a batch has none."""
        self.config = config
        self.learner = learner
        # Scores and probes are given to such a learner alone.
        self._scored = cast("ActorHandle[ScoredLearner]", learner)
        self.collector = collector
        self.tasks = tasks
        self.journal = journal
        self.scores_early = scores_early
        self.measures_gap = measures_gap
        self.sampling = config.rl.sampling()
        self.replay: ReplayGroups | None = None  # set before `fit` where groups are trained again
        self._started: dict[int, str] = {}  # group ids by index, of those that are being played
        self._cut: set[int] = set()
        self._cursor: QueueCursor | None = None  # None: from the first step's first task

    @property
    def state(self) -> dict[str, Any]:
        """The places of tasks and queue after the last step; `load` is the inverse. What `replay`
        keeps is in it, and comes back with a new one."""
        assert self._cursor is not None, "`fit` has begun"
        state = {"queue": self._cursor.to_json(), "curriculum": self.tasks.state()}
        return state if self.replay is None else state | {"replay": self.replay.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Empty: from the first task of the step that `fit` begins with."""
        if state:
            self._cursor = QueueCursor.from_json(state["queue"])
            self.tasks.load(state["curriculum"])

    async def fit(self, first_step: int, on_step: OnStep, pause: Pause | None = None) -> None:
        """Run steps `first_step` .. `rl.steps - 1`; `on_step` sees each one before the next. Then
        `pause` is awaited, which may be cancelled: the step is whole without it."""
        try:
            await self._fit(first_step, on_step, pause)
        except TaskError as error:
            raise error.cause from None  # what the user reads is the actor's own error

    async def _fit(self, first_step: int, on_step: OnStep, pause: Pause | None) -> None:
        flow = self._open_flow(first_step)
        await self.learner.call(Learner.publish, first_step)
        workers = [asyncio.create_task(self._produce(flow))]
        if flow.scored is not None:
            workers.append(asyncio.create_task(self._score(flow, flow.scored)))
        try:
            for step in range(first_step, self.config.rl.steps):
                await self._step(step, flow, workers, on_step)
                if pause is not None:
                    await pause()
                flow.staleness.advance(step + 1)
        finally:
            for worker in workers:
                worker.cancel()
            await self.collector.call(RolloutCollector.stop)
            await asyncio.gather(*workers, return_exceptions=True)

    def _open_flow(self, first_step: int) -> _Flow:
        rl, policy = self.config.rl, self.config.rl.batch
        first = QueueCursor(next_index=first_step * rl.tasks_per_step)
        self._cursor = cursor = first if self._cursor is None else self._cursor
        staleness = StalenessController(
            max_staleness=rl.max_staleness,
            batch=rl.tasks_per_step * rl.group_size,
            version=first_step,
            spare=policy.oversample * rl.group_size,
            total=rl.steps * rl.tasks_per_step * rl.group_size,
        )
        queue = TransferQueue(
            capacity=rl.tasks_per_step * (rl.max_staleness + 1) + policy.oversample,
            journal=self.journal,
        )
        scored = None
        if self.scores_early:
            scored = queue.consumer(order="finish", cursor=cursor)
        needs = (GROUP, SCORES) if self.scores_early else (GROUP,)
        trained = queue.consumer(needs=needs, order=policy.order, cursor=cursor)
        if self.journal is not None:
            queue.restore(played_before(self.journal, cursor, staleness))
        assembler = BatchAssembler(
            policy,
            trained,
            staleness,
            num_groups=rl.tasks_per_step,
            group_size=rl.group_size,
            needs_signal=rl.algorithm.dynamic_sampling,
            earned=rl.algorithm.earned,
        )
        return _Flow(
            staleness=staleness,
            queue=queue,
            trained=trained,
            scored=scored,
            assembler=assembler,
            probe=GapProbe(queue),
        )

    # -- groups --------------------------------------------------------------------------------

    async def _produce(self, flow: _Flow) -> None:
        """Start groups as long as the staleness allows it; it ends with the loop."""
        known = {row.index for row in flow.queue.rows}
        async with asyncio.TaskGroup() as running:
            for index in count(flow.trained.next_index):
                if index in known or flow.trained.has_had(index):
                    continue
                await flow.staleness.admit(self.config.rl.group_size)
                flow.staleness.start(index)
                task = self.tasks.task(index)
                running.create_task(self._play_group(task, index, flow))

    async def _play_group(self, task: Task, index: int, flow: _Flow) -> None:
        rl, clock = self.config.rl, asyncio.get_running_loop().time
        start = clock()
        self._started[index] = f"s{index // rl.tasks_per_step}-g{index}"
        rollouts = await self.collector.call(
            RolloutCollector.run_group,
            task,
            group_id=self._started[index],
            size=rl.group_size,
            sampling=self.sampling,
        )
        del self._started[index]
        flow.probe.note_group(clock() - start)
        flow.staleness.finish(rl.group_size)
        if index in self._cut:
            flow.staleness.leave(index)
            flow.staleness.reject(rl.group_size)
            return
        group = FinishedGroup(index=index, task=task, rollouts=rollouts, size=rl.group_size)
        await flow.queue.put(index, GROUP, group)

    async def _score(self, flow: _Flow, consumer: Consumer) -> None:
        """Have groups scored one by one, as they are complete."""
        while True:
            [row] = await consumer.take(1)
            scores = await self._scored.call(ScoredLearner.score, row.group.rollouts)
            await flow.queue.put(row.index, SCORES, scores)

    async def _cut_leftovers(self, flow: _Flow) -> int:
        """Give up the groups that are still being played; returns how many."""
        cut = dict(self._started)
        self._cut |= cut.keys()
        await self.collector.call(RolloutCollector.cut, set(cut.values()))
        for index in cut:
            flow.trained.skip(index)
            if flow.scored is not None:
                flow.scored.skip(index)
        return len(cut)

    # -- steps ---------------------------------------------------------------------------------

    async def _step(
        self, step: int, flow: _Flow, workers: list[asyncio.Task[None]], on_step: OnStep
    ) -> None:
        clock = asyncio.get_running_loop().time  # a simulation's is virtual (inspection/simulate/)
        start = clock()
        batch = await _first_of(flow.assembler.next_batch(step), workers)
        probe: list[Rollout] = []
        if self.measures_gap and not self.config.rl.is_on_policy:
            playing = bool(self._started)
            wanted = flow.probe.find(step, batch.groups, is_playing=playing)
            probe = await _first_of(wanted, workers)
        metrics = {"wait_s": clock() - start, **batch.metrics}
        if self.config.rl.batch.leftover == "cut":
            metrics["groups_cut"] = float(await self._cut_leftovers(flow))
        # Weights, cursor and records would disagree if it were cut in two.
        await to_the_end(self._finish_step(step, batch, probe, metrics, start, on_step, flow))
        flow.probe.note_step(clock() - start)

    async def _finish_step(
        self,
        step: int,
        batch: GroupBatch,
        probe: list[Rollout],
        metrics: dict[str, Any],
        start: float,
        on_step: OnStep,
        flow: _Flow,
    ) -> None:
        clock = asyncio.get_running_loop().time
        groups = [group.rollouts for group in batch.groups]
        scores = [row.fields.get(SCORES) for row in batch.rows]
        trained = groups if self.replay is None else self.replay.beside(groups, step)
        learnt = await self._train(trained, step + 1, scores, probe)
        stats = await self.learner.call(Learner.take_token_stats)
        if self.replay is not None:
            self.replay.finish(step, groups, learnt, stats)
        left_out = [group.rollouts for group in batch.left_out]
        if left_out:  # what the agent can do is said by all that it played
            every = [one for group in (*groups, *left_out) for one in group]
            learnt |= batch_metrics(every, self.config.rl.algorithm)
        failed = await self.collector.call(RolloutCollector.take_failed)
        metrics["wasted_tokens"] += sum(rollout.num_action_tokens for rollout in failed)
        metrics["rollout_s"] = await self.collector.call(RolloutCollector.take_busy_s)
        metrics["step_s"] = clock() - start
        metrics |= learnt | _idle_shares(metrics | learnt)
        self._cursor = flow.trained.cursor
        played = [*batch.groups, *batch.left_out]
        for group in played:
            self.tasks.observe(group.task, [rollout.reward for rollout in group.rollouts])
        metrics |= self.tasks.metrics()
        await on_step(
            StepResult(
                step=step,
                metrics=metrics,
                groups=groups + left_out,
                failed=failed,
                tasks={group.task.task_id: group.task for group in played},
                token_stats=stats,
                replayed=[] if self.replay is None else self.replay.drawn,
            )
        )

    def _train(
        self,
        groups: Sequence[Sequence[Rollout]],
        version: int,
        scores: list[GroupScores | None],
        probe: list[Rollout],
    ) -> Awaitable[dict[str, Any]]:
        if probe or any(one is not None for one in scores):
            with_more = ScoredLearner.train_and_publish
            return self._scored.call(with_more, groups, version, scores, probe)
        return self.learner.call(Learner.train_and_publish, groups, version)


def played_before(
    journal: Journal, cursor: QueueCursor, staleness: StalenessController
) -> list[FinishedGroup]:
    """The journal's groups that no checkpoint has learnt from. Groups sampled by a policy that was
    lost with the steps after the checkpoint are forgotten, and played again."""
    groups, lost = [], []
    for group in journal.groups():
        is_of_now = group.newest_version <= staleness.version and not cursor.has_had(group.index)
        if is_of_now and staleness.can_admit(group.size):
            staleness.restore(group.index, group.size, group.oldest_version)
            groups.append(group)
        else:
            lost.append(group.index)
    journal.forget(lost)
    return groups


def _idle_shares(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The shares of a step in which nothing was trained on, and in which nobody played."""
    whole_s = max(metrics["step_s"], 1e-9)
    trained_s = metrics["train_s"] + metrics["sync_s"]
    return {
        "idle_trainer": max(0.0, 1 - trained_s / whole_s),
        "idle_collector": max(0.0, 1 - metrics["rollout_s"] / whole_s),
    }


async def _first_of(wanted: Any, workers: list[asyncio.Task[None]]) -> Any:
    """Await `wanted`, but raise at once what a worker died of."""
    task = asyncio.ensure_future(wanted)
    try:
        done, _ = await asyncio.wait({task, *workers}, return_when=asyncio.FIRST_COMPLETED)
        for worker in workers:
            if task not in done and worker in done and worker.exception() is not None:
                raise _root_cause(worker.exception())
        return await task
    finally:  # also where the step is given up: `wait` does not cancel what it waits for
        task.cancel()


def _root_cause(error: BaseException | None) -> BaseException:
    """The first error of a task group, so that a caller can name it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert error is not None, "the worker failed with an exception"
    return error
