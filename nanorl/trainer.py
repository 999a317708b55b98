"""The reinforcement-learning loop: one `fit()` for synchronous and asynchronous training.

    producer   admits groups (`StalenessController`), has the collector play them (collector.py) and
               puts them into the queue (`TransferQueue`)
    consumer   takes a batch of groups in task order, has the learner (learner.py) make an
               optimizer step of it and publish the weights to the inference engine, logs

Learner and collector are actors (nanosched): the learner an object of this process, whose engine
may be elsewhere (learner.py), the collector here or in another process, where it may die and have a
successor (roles/role.py): the groups that it was playing are then played again.

Admission: a group may start while `accepted + running + group <= (max_staleness + version + 1) *
batch`, all counted in rollouts (AReaL, arXiv 2505.24298, section 4). With `max_staleness = 0` the
rollouts of step s start only when s optimizer steps are done, so synchronous training is a special
case and not another loop; with more, rollouts go on while the optimizer runs in another thread.

Hand-over: groups finish in any order and are taken by index. So every decision that matters (tasks,
sampling seeds, which groups make a batch) is a function of (seed, step), and a synchronous run that
is killed and resumed from its last checkpoint ends with the same bits. With staleness, time alone
decides under which weights a token is sampled: such a run resumes with the same tasks and seeds,
and no two runs are equal.
Next: run.py (the order of a whole run, checkpoints), learner.py, collector.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanoinfer.cancellation import to_the_end
from nanoinfer.params import SamplingParams
from nanorl.collector import RolloutCollector
from nanorl.config import RunConfig
from nanorl.learner import Learner
from nanorl.roles.collector import CollectorRole
from nanorl.roles.role import Role
from nanorl.types import Rollout, Task, TokenStats
from nanosched import ActorHandle, TaskError

Group = list[Rollout]
TaskBatch = Callable[[int], Sequence[Task]]
OnStep = Callable[["StepResult"], Awaitable[None]]


@dataclass(kw_only=True)
class StepResult:
    """Holds what one optimizer batch gave: its metrics and the rollouts it was made of.

    StepResult(step=3, metrics={"reward": 0.6, "grad_norm": 1.2}, groups=[[...], [...]], failed=[],
               token_stats={})
    """

    step: int
    metrics: dict[str, Any]
    groups: list[Group]
    failed: list[Rollout]  # attempts that the machine spoilt; they were repeated
    token_stats: dict[str, TokenStats]  # by rollout_id, of those that were scored


class Trainer:
    """Owns the RL loop over two actors. The caller decides what to do after each step."""

    def __init__(
        self,
        config: RunConfig,
        *,
        learner: ActorHandle[Learner],
        collector: ActorHandle[RolloutCollector] | Role[CollectorRole],
        task_batch: TaskBatch,
    ) -> None:
        self.config = config
        self.learner = learner
        self.collector = collector
        self.task_batch = task_batch
        self.sampling = SamplingParams(temperature=config.rl.temperature)

    async def fit(self, first_step: int, on_step: OnStep) -> None:
        """Run steps `first_step` .. `rl.steps - 1`; `on_step` sees each one before the next."""
        try:
            await self._fit(first_step, on_step)
        except TaskError as error:
            raise error.cause from None  # what the user reads is the actor's own error

    async def _fit(self, first_step: int, on_step: OnStep) -> None:
        rl = self.config.rl
        staleness = StalenessController(
            max_staleness=rl.max_staleness,
            batch=rl.tasks_per_step * rl.group_size,
            version=first_step,
        )
        queue = TransferQueue(
            capacity=rl.tasks_per_step * (rl.max_staleness + 1),
            first_index=first_step * rl.tasks_per_step,
        )
        await self.learner.call(Learner.publish, first_step)
        producer = asyncio.create_task(self._produce(first_step, staleness, queue))
        try:
            await self._consume(first_step, staleness, queue, producer, on_step)
        finally:
            producer.cancel()
            await self.collector.call(RolloutCollector.stop)
            await asyncio.gather(producer, return_exceptions=True)

    async def _produce(
        self, first_step: int, staleness: StalenessController, queue: TransferQueue
    ) -> None:
        rl = self.config.rl
        async with asyncio.TaskGroup() as running:
            for step in range(first_step, rl.steps):
                for offset, task in enumerate(self.task_batch(step)):
                    await staleness.admit(rl.group_size)
                    index = step * rl.tasks_per_step + offset
                    running.create_task(self._play_group(task, step, index, staleness, queue))

    async def _play_group(
        self,
        task: Task,
        step: int,
        index: int,
        staleness: StalenessController,
        queue: TransferQueue,
    ) -> None:
        size = self.config.rl.group_size
        group = await self.collector.call(
            RolloutCollector.run_group,
            task,
            group_id=f"s{step}-g{index}",
            size=size,
            sampling=self.sampling,
        )
        staleness.finish(size)
        await queue.put(index, group)

    async def _consume(
        self,
        first_step: int,
        staleness: StalenessController,
        queue: TransferQueue,
        producer: asyncio.Task[None],
        on_step: OnStep,
    ) -> None:
        loop = asyncio.get_running_loop()
        for step in range(first_step, self.config.rl.steps):
            start = loop.time()
            groups = await _first_of(queue.take(self.config.rl.tasks_per_step), producer)
            # Weights, cursor and records would disagree if it were cut in two.
            await to_the_end(self._finish_step(step, groups, start, on_step))
            staleness.advance(step + 1)

    async def _finish_step(
        self,
        step: int,
        groups: list[Group],
        start: float,
        on_step: OnStep,
    ) -> None:
        loop = asyncio.get_running_loop()  # its clock: a simulation's (simulate/) is virtual
        wait_s = loop.time() - start
        metrics = await self.learner.call(Learner.train_and_publish, groups, step + 1)
        metrics["wait_s"] = wait_s
        metrics["rollout_s"] = await self.collector.call(RolloutCollector.take_busy_s)
        metrics["step_s"] = loop.time() - start
        failed = await self.collector.call(RolloutCollector.take_failed)
        stats = await self.learner.call(Learner.take_token_stats)
        await on_step(
            StepResult(step=step, metrics=metrics, groups=groups, failed=failed, token_stats=stats)
        )


async def _first_of(wanted: Any, producer: asyncio.Task[None]) -> Any:
    """Await `wanted`, but raise at once what the producer died of."""
    task = asyncio.ensure_future(wanted)
    try:
        done, _ = await asyncio.wait({task, producer}, return_when=asyncio.FIRST_COMPLETED)
        if task not in done and producer in done and producer.exception() is not None:
            raise _root_cause(producer.exception())
        return await task
    finally:  # also where the step is given up: `wait` does not cancel what it waits for
        task.cancel()


def _root_cause(error: BaseException | None) -> BaseException:
    """The first error of a task group, so that a caller can name it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert error is not None, "the producer failed with an exception"
    return error


class StalenessController:
    """Decides which rollouts may start: counts them and holds back the producer. One event loop
    only."""

    def __init__(self, *, max_staleness: int, batch: int, version: int = 0) -> None:
        if max_staleness < 0 or batch < 1:
            raise ValueError(
                f"max_staleness={max_staleness}, batch={batch}: need max_staleness >= 0, batch >= 1"
            )
        self.max_staleness = max_staleness
        self.batch = batch
        self.version = version
        self.accepted = version * batch
        self.running = 0
        self._changed = asyncio.Event()

    def can_admit(self, count: int) -> bool:
        """Say whether `count` more rollouts would stay within the staleness that is allowed."""
        limit = (self.max_staleness + self.version + 1) * self.batch
        return self.accepted + self.running + count <= limit

    async def admit(self, count: int) -> None:
        """Wait until `count` more rollouts may run, then count them as running."""
        while not self.can_admit(count):
            self._changed.clear()
            await self._changed.wait()
        self.running += count

    def finish(self, count: int) -> None:
        """`count` running rollouts are complete and will be trained on."""
        assert self.running >= count, f"{count} rollouts finished, {self.running} running"
        self.running -= count
        self.accepted += count
        self._changed.set()

    def advance(self, version: int) -> None:
        """The optimizer has produced `version`."""
        self.version = version
        self._changed.set()


class TransferQueue:
    """Hands complete groups from the producer to the consumer in task order, with back-pressure.

    `put` waits while its group lies `capacity` or more groups ahead of what has been taken; the
    group that the consumer waits for is always admitted, so the two sides cannot deadlock. One
    event loop only.
    """

    def __init__(self, *, capacity: int, first_index: int = 0) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: must be at least 1")
        self.capacity = capacity
        self.next_index = first_index
        self._groups: dict[int, Group] = {}
        self._changed = asyncio.Condition()

    async def put(self, index: int, group: Group) -> None:
        """Hand over the group of task number `index`, counted over the whole run."""
        async with self._changed:
            if index < self.next_index or index in self._groups:
                raise ValueError(f"group {index} was put twice (next to take: {self.next_index})")
            await self._changed.wait_for(lambda: index < self.next_index + self.capacity)
            self._groups[index] = group
            self._changed.notify_all()

    async def take(self, count: int) -> list[Group]:
        """The next `count` groups by index; waits until all of them are there."""
        wanted = range(self.next_index, self.next_index + count)
        async with self._changed:
            await self._changed.wait_for(lambda: all(i in self._groups for i in wanted))
            taken = [self._groups.pop(i) for i in wanted]
            self.next_index += count
            self._changed.notify_all()
        return taken
