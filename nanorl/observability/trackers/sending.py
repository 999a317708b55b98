"""Sends what a run measures to trackers, beside the run.

    async with Trackers(config, decode, say=live.say) as trackers:
        trackers.log(step, metrics)

Each tracker has a process of its own, killable: a package that takes seconds to import, blocks on a
network that is gone or leaves threads behind costs the run nothing and cannot keep it from ending.
What is sent waits in line. A tracker that fails is said once; what it did not take is lost to it
(everything is in the run's folder). With no tracker there is no process.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanorl.observability.report.metrics import flatten_numbers
from nanorl.observability.report.observer import (
    WARM_START,
    Evaluated,
    RLEvaluated,
    RunObserver,
    attempts,
)
from nanorl.observability.report.summary import write_atomically
from nanorl.observability.report.trace import Decode
from nanorl.observability.trackers.rollout_rows import RolloutRow, rollout_rows
from nanorl.observability.trackers.services import SERVICES, TrackedRun, TrackerProcess
from nanorl.options.run_config import RunConfig, flatten
from nanorl.task import Task
from nanorl.types import Rollout
from nanosched import ActorHandle, Scheduler, SchedulerError

if TYPE_CHECKING:
    from nanorl.observability.results import StepResult

FINISH_S = 60.0  # a busy machine needs half of it to import a tracker
_MOST_WAITING = 512  # messages to one tracker; more are dropped, and that is a failure too


class Trackers(RunObserver):
    """An async context manager around a run. Its methods return at once and never raise. `decode`
    should leave special tokens out."""

    def __init__(
        self,
        config: RunConfig,
        decode: Decode,
        *,
        say: Callable[[str], None],
        finish_s: float = FINISH_S,
    ) -> None:
        self._config, self._decode = config, decode
        self._say = say
        self._finish_s = finish_s
        self._scheduler: Scheduler | None = None
        self._lines: list[TrackerLine] = []

    async def __aenter__(self) -> Trackers:
        names = [name for name in self._config.log if name in SERVICES]
        if not names:
            return self
        run = TrackedRun(
            project=self._config.log_project,
            name=self._config.run_dir.resolve().name,
            identity=identity_of(self._config.run_dir),
            folder=self._config.run_dir.resolve(),
            options=flatten(self._config.to_json()),
        )
        self._scheduler = Scheduler(backend="local")
        for name in names:
            actor = self._scheduler.actor(TrackerProcess, num_cpus=0).remote(name, run)
            self._lines.append(TrackerLine(name, actor, self._say))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait for what is under way, within the time limit; then the processes go, also where
        somebody will not wait (Ctrl-C)."""
        try:
            for line in self._lines:
                line.send(TrackerProcess.finish)
            await asyncio.gather(*(line.drain(self._finish_s) for line in self._lines))
        finally:
            if self._scheduler is not None:
                self._scheduler.close()

    async def on_warm_step(self, step: int, numbers: Mapping[str, float]) -> None:
        self.log(step, {WARM_START: numbers})

    async def on_step(self, step: StepResult) -> None:
        self.log(step.step, step.metrics)
        # An attempt that failed may be of a later step, where rollouts run ahead of the trainer.
        known = (rollout for rollout in attempts(step) if rollout.task_id in step.tasks)
        self._log_played(step.step, "rl", [(step.tasks[one.task_id], one) for one in known])

    async def on_evaluation(self, evaluated: Evaluated) -> None:
        name, result = evaluated.phase, evaluated.result
        self.log(evaluated.step, {"evaluation": {name: result.to_json()}})
        self._log_played(evaluated.step, name, result.played)

    async def on_rl_evaluation(self, evaluated: RLEvaluated) -> None:
        self.log(evaluated.step, {"evaluation": {"rl": evaluated.figures}})

    def _log_played(self, step: int, part: str, played: Sequence[tuple[Task, Rollout]]) -> None:
        if self._lines:  # reading them takes a while
            most = self._config.log_rollouts
            self.log_rollouts(step, part, rollout_rows(played, self._decode, most=most))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """The finite numbers of `values`; those of nested ones by their path."""
        for line in self._lines:
            line.send(TrackerProcess.log, step, flatten_numbers(values))

    def log_rollouts(self, step: int, part: str, rows: Iterable[RolloutRow]) -> None:
        """Rollouts to read; `part` is rl, or the evaluation that played them."""
        every = list(rows) if self._lines else []
        for line in self._lines if every else ():
            line.send(TrackerProcess.log_rollouts, step, part, every)


class TrackerLine:
    """The messages that wait for a tracker; its process takes one message after the other."""

    def __init__(self, name: str, actor: ActorHandle[Any], say: Callable[[str], None]) -> None:
        self._name, self._actor, self._say = name, actor, say
        self._waiting: set[asyncio.Task[None]] = set()
        self._has_failed = False

    def send(self, method: Callable[..., None], *values: Any) -> None:
        """Start sending and return at once."""
        if len(self._waiting) >= _MOST_WAITING:
            self._fail(f"{_MOST_WAITING} messages wait for it")
            return
        task = asyncio.create_task(self._deliver(method, values))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def drain(self, limit_s: float) -> None:
        """Wait until all has been sent; what has not been by then is given up."""
        if not self._waiting:
            return
        _, late = await asyncio.wait(self._waiting, timeout=limit_s)
        if late:
            self._fail(f"{len(late)} messages were not taken within {limit_s:g} s")
        for task in late:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*late, return_exceptions=True)

    async def _deliver(self, method: Callable[..., None], values: tuple[Any, ...]) -> None:
        try:
            await self._actor.call(method, *values)
        except SchedulerError as error:  # the tracker's own, or its process died
            self._fail(" ".join(str(error).split())[:300])

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._say(
                f"--log {self._name}: not everything reached it ({why}). The run goes on, and "
                "further failures of this tracker are not said"
            )


def identity_of(run_dir: Path) -> str:
    """The name of the run where names must be unique; kept in its folder."""
    file = run_dir / "tracker-id"
    if not file.exists():
        write_atomically(file, uuid.uuid4().hex[:16] + "\n")
    return file.read_text("utf-8").strip()
