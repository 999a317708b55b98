"""`RunSpans`: the run as OpenTelemetry spans, sent while it goes on (`--log otel`).

    run                              to the end of this process
      reinforcement learning         a phase; also warm start and the evaluations
        step 3                       a step, with its metrics
          rollouts, train, sync      what it spent its time with
            invoke_agent tool        a rollout below `rollouts`, its turns and calls below it

    await spans.on_phase(phase)
    spans.rl_step(3, metrics)
    await spans.on_phase_end(phase.title, is_whole=True)

A span is sent when it has ended, so what is under way is not to be seen yet. Everything waits in
the line of a process of its own (sending.py): a collector that is slow or away costs the run
nothing. Without `--log otel` nothing is done.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanorl.agents.times import RolloutTimes
from nanorl.observability.report.metrics import flatten_numbers
from nanorl.observability.report.observer import (
    Evaluated,
    PhaseBegun,
    RLEvaluated,
    RunObserver,
    attempts,
)
from nanorl.observability.telemetry import nanoseconds, new_span_id, own
from nanorl.observability.trackers.sending import FINISH_S, TrackerLine, identity_of
from nanorl.observability.trackers.span_record import (
    Attribute,
    PlayedRollouts,
    SpannedRun,
    SpanRecord,
)
from nanorl.options.run_config import RunConfig
from nanorl.types import Rollout
from nanosched import Scheduler

if TYPE_CHECKING:
    from nanorl.observability.results import StepResult

_PARTS = (("rollouts", "wait_s"), ("train", "train_s"), ("sync", "sync_s"))
Times = Mapping[str, Sequence[RolloutTimes]]


async def no_times() -> Times:
    """The times of rollouts where nobody measures them."""
    return {}


class RunSpans(RunObserver):
    """An async context manager around a run. Its methods return at once and never raise."""

    def __init__(
        self,
        config: RunConfig,
        model_folder: Path,
        *,
        say: Callable[[str], None],
        finish_s: float = FINISH_S,
        take_times: Callable[[], Awaitable[Times]] = no_times,
    ) -> None:
        """`take_times` gives the times of the rollouts that were played since it was last asked, by
        their ids."""
        self.is_on = "otel" in config.log
        self._config, self._folder, self._say = config, model_folder, say
        self._finish_s, self._take_times = finish_s, take_times
        self._scheduler: Scheduler | None = None
        self._line: TrackerLine | None = None
        self._times: dict[str, Sequence[RolloutTimes]] = {}
        self._root = new_span_id()
        self._phase = self._root
        self._start_ns = time.time_ns()
        self._phase_start_ns = self._start_ns

    async def __aenter__(self) -> RunSpans:
        if self.is_on:
            from nanorl.observability.trackers.span_process import SpanProcess  # few runs need it

            identity = identity_of(self._config.run_dir)
            run = SpannedRun(identity=identity, config=self._config, model_folder=self._folder)
            self._scheduler = Scheduler(backend="local")
            actor = self._scheduler.actor(SpanProcess, num_cpus=0).remote(run)
            self._line = TrackerLine("otel", actor, self._say)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Send the run's own span; wait for what is under way, within the time limit. The process
        goes also where somebody will not wait (Ctrl-C)."""
        if self._line is None or self._scheduler is None:
            return
        # Here: few runs need it, and it imports an extra.
        from nanorl.observability.trackers.span_process import SpanProcess

        about: dict[str, Attribute] = {
            own("preset"): self._config.preset,
            own("run"): str(self._config.run_dir),
        }
        self._send(
            "run", (self._root, 0), (self._start_ns, time.time_ns()), about, error=_why(error)
        )
        self._line.send(SpanProcess.finish)
        try:
            await self._line.drain(self._finish_s)
        finally:
            self._scheduler.close()

    async def on_phase(self, phase: PhaseBegun) -> None:
        self._phase, self._phase_start_ns = new_span_id(), time.time_ns()

    async def on_phase_end(self, title: str, *, is_whole: bool) -> None:
        place, between = (self._phase, self._root), (self._phase_start_ns, time.time_ns())
        why = "" if is_whole else "it did not come to its end"
        self._send(title, place, between, {own("phase"): title}, error=why)

    async def on_warm_step(self, step: int, numbers: Mapping[str, float]) -> None:
        self.step(f"step {step}", numbers)

    async def on_step(self, step: StepResult) -> None:
        parent = self.rl_step(step.step, step.metrics)
        if self.is_on:
            times = await self._take_times()
            self.rollouts(attempts(step), times, step=step.step, phase="rl", parent=parent)

    async def on_evaluation(self, evaluated: Evaluated) -> None:
        if self.is_on:
            rollouts = [rollout for _, rollout in evaluated.result.played]
            self.rollouts(rollouts, await self._take_times(), step=0, phase=evaluated.phase)

    async def on_rl_evaluation(self, evaluated: RLEvaluated) -> None:
        if self.is_on:
            rollouts = [one for played in evaluated.played.values() for _, one in played]
            times = await self._take_times()
            self.rollouts(rollouts, times, step=evaluated.step, phase="rl_evaluation")

    def step(
        self, name: str, metrics: Mapping[str, Any], parts: Sequence[tuple[str, str]] = ()
    ) -> int:
        """A step of the phase that has just ended, and its parts, one after the other, from the
        metrics that hold their seconds. Returns the first part's id, or else the step's."""
        numbers = flatten_numbers(metrics)
        end_ns = time.time_ns()
        seconds = sum(numbers.get(key, 0.0) for _, key in parts)
        start_ns = end_ns - nanoseconds(max(numbers.get("step_s", 0.0), seconds))
        step = first = new_span_id()
        about: dict[str, Attribute] = {own(key): one for key, one in numbers.items()}
        at = start_ns
        for place, (part, key) in enumerate(parts):
            span_id, until = new_span_id(), at + nanoseconds(numbers.get(key, 0.0))
            first = first if place else span_id
            self._send(part, (span_id, step), (at, until), {})
            at = until
        self._send(name, (step, self._phase), (start_ns, end_ns), about)
        return first

    def rl_step(self, step: int, metrics: Mapping[str, Any]) -> int:
        """A step of RL. Returns the id of the part in which its rollouts were played."""
        return self.step(f"step {step}", metrics, _PARTS)

    def rollouts(
        self, rollouts: Sequence[Rollout], times: Times, *, step: int, phase: str, parent: int = 0
    ) -> None:
        """Rollouts with their times, below the span `parent`, or else the last phase. Times of
        rollouts that have not come yet are kept until they do."""
        if self._line is None:
            return
        # Here: few runs need it, and it imports an extra.
        from nanorl.observability.trackers.span_process import SpanProcess

        self._times |= times
        found = {}
        for rollout in rollouts:
            name, _, attempt = rollout.rollout_id.partition("-failed")
            attempts = self._times.get(name, ())
            if attempts:
                found[rollout.rollout_id] = attempts[min(int(attempt or -1), len(attempts) - 1)]
        for rollout in rollouts:
            self._times.pop(rollout.rollout_id.partition("-failed")[0], None)
        played = PlayedRollouts(
            parent_id=parent or self._phase, step=step, phase=phase, rollouts=rollouts, times=found
        )
        self._line.send(SpanProcess.send_rollouts, played)

    def _send(
        self,
        name: str,
        place: tuple[int, int],
        between: tuple[int, int],
        attributes: Mapping[str, Attribute],
        error: str = "",
    ) -> None:
        if self._line is None:
            return
        # Here: few runs need it, and it imports an extra.
        from nanorl.observability.trackers.span_process import SpanProcess

        record = SpanRecord(
            name=name, span_id=place[0], parent_id=place[1],
            start_ns=between[0], end_ns=between[1], attributes=attributes, error=error,
        )  # fmt: skip
        self._line.send(SpanProcess.send, [record])


def _why(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"
