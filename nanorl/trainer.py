"""The reinforcement-learning loop: one `fit()` for synchronous and asynchronous training.

    producer   admits groups (staleness.py), plays them (collector.py), puts them into the queue
    consumer   takes a batch of groups in task order, makes samples (batching.py), steps the
               optimizer, copies the weights into the inference engine, logs

With `max_staleness = 0` the producer waits until the weights are in place, so training is
synchronous; with more, rollouts go on while the optimizer runs in another thread.

Every decision that matters is a function of (seed, step): tasks, sampling seeds, batch membership.
So a run that is killed and resumed from its last checkpoint ends with the same bits.
Next: run.py (the order of a whole run, checkpoints), batching.py, collector.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from nanoengine.engine import Engine
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.sampling import SamplingParams
from nanorl.batching import build_batch, logp_gap, per_action_token
from nanorl.collector import RolloutCollector
from nanorl.config import RunConfig
from nanorl.data.transfer_queue import TransferQueue
from nanorl.staleness import StalenessController
from nanorl.types import Rollout, Task
from nanorl.weight_sync import sync_weights

TaskBatch = Callable[[int], Sequence[Task]]
OnStep = Callable[["StepResult"], None]


@dataclass(kw_only=True)
class StepResult:
    """What one optimizer batch gave: its metrics and the rollouts it was made of."""

    step: int
    metrics: dict[str, Any]
    groups: list[list[Rollout]]
    failed: list[Rollout]  # attempts that the machine spoilt; they were repeated


class Trainer:
    """Owns the RL loop over an engine pair. The caller decides what to do after each step."""

    def __init__(
        self,
        config: RunConfig,
        *,
        trainer_engine: Engine,
        generator: AsyncEngine,
        collector: RolloutCollector,
        task_batch: TaskBatch,
        thread: Executor,
    ) -> None:
        self.config = config
        self.engine = trainer_engine
        self.generator = generator
        self.collector = collector
        self.task_batch = task_batch
        self.thread = thread  # where the optimizer runs, so that rollouts may go on
        self.sampling = SamplingParams(temperature=config.rl.temperature)

    async def fit(self, first_step: int, on_step: OnStep) -> None:
        """Run steps `first_step` .. `rl.steps - 1`; `on_step` sees each one before the next."""
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
        await sync_weights(self.engine, self.generator, first_step)
        producer = asyncio.create_task(self._produce(first_step, staleness, queue))
        try:
            await self._consume(first_step, staleness, queue, producer, on_step)
        finally:
            producer.cancel()
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
        group = await self.collector.run_group(
            task, group_id=f"s{step}-g{index}", size=size, sampling=self.sampling
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
        for step in range(first_step, self.config.rl.steps):
            start = time.perf_counter()
            groups = await _first_of(queue.take(self.config.rl.tasks_per_step), producer)
            await to_the_end(self._finish_step(step, groups, start, on_step))
            staleness.advance(step + 1)

    async def _finish_step(
        self,
        step: int,
        groups: list[list[Rollout]],
        start: float,
        on_step: OnStep,
    ) -> None:
        rollout_s = time.perf_counter() - start
        loop = asyncio.get_running_loop()
        metrics = await loop.run_in_executor(self.thread, self.train_on, groups)
        metrics["sync_s"] = await sync_weights(self.engine, self.generator, step + 1)
        metrics["rollout_s"] = rollout_s
        metrics["step_s"] = time.perf_counter() - start
        failed = self.collector.take_failed()
        on_step(StepResult(step=step, metrics=metrics, groups=groups, failed=failed))

    def train_on(self, groups: list[list[Rollout]]) -> dict[str, Any]:
        """One optimizer batch (`rl.epochs` steps over it); returns the metrics of the batch."""
        rl = self.config.rl
        start = time.perf_counter()
        batch = build_batch(groups, rl.algorithm, max_tokens=self.config.agent.max_context_tokens)
        metrics: dict[str, Any] = dict(batch.metrics)
        if batch.samples and (rl.epochs > 1 or rl.max_staleness > 0):
            logps = self.engine.forward_logprobs(batch.samples, temperature=rl.temperature)
            batch.set_field("old_logp", logps)
        if not batch.samples:
            logps = (
                self.engine.forward_logprobs(batch.probe, temperature=rl.temperature)
                if batch.probe
                else []
            )
            metrics.update(logp_gap(batch.probe, logps))
        for epoch in range(rl.epochs if batch.samples else 0):
            result = self.engine.train_step(
                batch.samples,
                batch.loss_fn,
                temperature=rl.temperature,
                entropy=rl.algorithm.entropy_coef != 0,
            )
            metrics.update(per_action_token(result))
            if epoch == 0:
                metrics.update(logp_gap(batch.samples, self.engine.last_logps))
        metrics["train_s"] = time.perf_counter() - start
        if self.config.deterministic and metrics.get("logp_gap_max", 0.0) != 0.0:
            raise RuntimeError(
                f"--deterministic: rollout and training log-probs differ by "
                f"{metrics['logp_gap_max']:.3g} nats; they must be equal bit for bit. "
                "This is a defect of the engines on this CPU, not of your task: please report it"
            )
        return metrics


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`; a cancellation is obeyed after it is complete, so that weights, cursor and
    records never disagree."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


async def _first_of(wanted: Any, producer: asyncio.Task[None]) -> Any:
    """Await `wanted`, but raise at once what the producer died of."""
    task = asyncio.ensure_future(wanted)
    done, _ = await asyncio.wait({task, producer}, return_when=asyncio.FIRST_COMPLETED)
    if task not in done and producer in done and producer.exception() is not None:
        task.cancel()
        raise _root_cause(producer.exception())
    return await task


def _root_cause(error: BaseException | None) -> BaseException:
    """The first error of a task group, so that a caller can name it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert error is not None, "the producer failed with an exception"
    return error
