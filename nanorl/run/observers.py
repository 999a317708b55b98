"""Who looks on at a run: the table of its observers, and `Observers`, which tells them all.

The order of the table is the order of effects, which going on after a kill depends on:

    the view, the monitor      first, because the monitor may refuse before anything is started
    evaluations and rollouts   stored before a step's row says in metrics.jsonl that it was
    metrics.jsonl              before TensorBoard, trackers and spans, whose copies may be lost
    weights' fingerprints      last of what is recorded; then the cursor moves (rl_phase.py), and a
                               checkpoint is made where one is due
    alarms, rollouts to read   shown after the line of the step (`on_step_kept`)

A new observer is a class of its own wing, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from nanorl.distributed.roles.base import Roles
from nanorl.distributed.roles.collector_role import CollectorRole
from nanorl.observability.alarms.alarms import RunAlarms
from nanorl.observability.monitor.monitor import RunMonitor
from nanorl.observability.report.chat_decode import ChatDecode
from nanorl.observability.report.live import LiveView
from nanorl.observability.report.metrics import MetricsWriter
from nanorl.observability.report.observer import (
    Evaluated,
    PhaseBegun,
    RLEvaluated,
    RunObserver,
)
from nanorl.observability.report.shown_rollouts import ShownRollouts
from nanorl.observability.report.tensorboard import TensorBoardFolders
from nanorl.observability.report.ways import TaughtWays
from nanorl.observability.trackers.run_spans import RunSpans
from nanorl.observability.trackers.sending import Trackers
from nanorl.options.parts import Parts
from nanorl.run.kept_records import KeptEvaluations, KeptRLEvaluations, KeptRollouts, KeptWeights
from nanorl.run.missing_records import METRICS

if TYPE_CHECKING:
    from nanoengine.packing import Sample
    from nanorl.observability.results import StepResult

TENSORBOARD = "tensorboard"


def make_observers(
    parts: Parts, roles: Roles, live: LiveView, goes_on: Callable[[BaseException], bool]
) -> list[RunObserver]:
    """The observers of a run with these options, in the order in which they are told."""
    config, folder = parts.config, parts.config.run_dir
    decode, board = ChatDecode(parts.tokenizer), TensorBoardFolders(folder / TENSORBOARD)
    take_times = partial(roles.collector.call, CollectorRole.take_times)
    return [
        live,
        RunMonitor(config.monitor, folder, live, roles.control, goes_on=goes_on),
        KeptEvaluations(config),
        KeptRLEvaluations(config),
        KeptRollouts(config, roles.store),
        MetricsWriter(folder / METRICS, tensorboard_dir=folder / TENSORBOARD),
        board,
        Trackers(config, decode, say=live.say),
        RunSpans(config, parts.folder, say=live.say, take_times=take_times),
        KeptWeights(roles),
        *([TaughtWays(folder, decode, config.warm_start.num_drills)] * parts.kind.has_tools),
        RunAlarms(config, parts.tokenizer, has_tools=parts.kind.has_tools, say=live.say),
        ShownRollouts(board, decode, num_steps=config.rl.steps, say=live.say),
    ]


class Observers(RunObserver):
    """Tells each observer of every event, one after the other. They begin in their order and end in
    the opposite one, those that have begun also where another refuses."""

    def __init__(self, observers: Sequence[RunObserver]) -> None:
        self._observers = tuple(observers)
        self._begun = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as begun:
            for one in self._observers:
                await begun.enter_async_context(one)
            self._begun = begun.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._begun.__aexit__(kind, error, trace)

    async def on_restore(self, first_step: int) -> None:
        for one in self._observers:
            await one.on_restore(first_step)

    async def on_phase(self, phase: PhaseBegun) -> None:
        for one in self._observers:
            await one.on_phase(phase)

    def on_progress(self, title: str, metrics: Mapping[str, float]) -> None:
        for one in self._observers:
            one.on_progress(title, metrics)

    async def on_warm_step(self, step: int, numbers: Mapping[str, float]) -> None:
        for one in self._observers:
            await one.on_warm_step(step, numbers)

    async def on_warm_batch(self, step: int, batch: Sequence[Sample]) -> None:
        for one in self._observers:
            await one.on_warm_batch(step, batch)

    async def on_evaluation(self, evaluated: Evaluated) -> None:
        for one in self._observers:
            await one.on_evaluation(evaluated)

    async def on_rl_evaluation(self, evaluated: RLEvaluated) -> None:
        for one in self._observers:
            await one.on_rl_evaluation(evaluated)

    async def on_step(self, step: StepResult) -> None:
        for one in self._observers:
            await one.on_step(step)

    async def on_step_kept(self, step: StepResult) -> None:
        for one in self._observers:
            await one.on_step_kept(step)

    async def on_phase_end(self, title: str, *, is_whole: bool) -> None:
        for one in self._observers:
            await one.on_phase_end(title, is_whole=is_whole)
