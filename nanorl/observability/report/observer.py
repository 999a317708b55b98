"""`RunObserver`: whoever looks on while a run goes on and writes, sends or shows what happens.

A run tells its observers of every event, one after the other, in the order of the table in
nanorl/run/observers.py. Each method does nothing unless an observer overrides it:

    __aenter__          before the run's roles start; may refuse, with a ValueError
    on_restore          the run went back to a checkpoint: what lies behind it will come again
    on_phase            a part of the run begins
    on_progress         a task of an evaluation or a supervised step is done
    on_warm_step        the numbers of a supervised step
    on_warm_batch       what it was trained on
    on_evaluation       a finished evaluation
    on_step             a finished step of RL, before the cursor moves and a checkpoint is made
    on_step_kept        the same step, after both
    on_rl_evaluation    a finished evaluation between two steps of RL, after all of the first
    on_phase_end        a part of the run has ended, well or not
    __aexit__           the run ends, also with an error

What is *recorded* belongs into `on_step`: a step that a checkpoint has learnt from is on the disk.
What is only *shown* belongs into `on_step_kept`. An error that a method raises ends the run, so an
observer whose failure must not (a tracker, the monitor) catches its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from nanorl.task import Task
from nanorl.types import Rollout

if TYPE_CHECKING:
    from nanoengine.packing import Sample
    from nanorl.observability.results import EvaluationResult, Phase, StepResult

WARM_START = "warm_start"
"""The part of a run whose steps are counted by themselves."""


@dataclass(frozen=True, kw_only=True)
class PhaseBegun:
    """A part of a run that begins, or goes on after a checkpoint.

    PhaseBegun(phase="rl", title="reinforcement learning", total=30, num_done=4, num_lines=30)
    """

    phase: Phase
    title: str
    total: int  # units of work: tasks or steps
    num_done: int = 0  # of them, by an earlier process
    num_lines: int = 10  # that a log gets about it


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A finished evaluation. `step` counts the steps of RL that were done by then."""

    phase: Phase
    step: int
    seconds: float
    result: EvaluationResult


@dataclass(frozen=True, kw_only=True)
class RLEvaluated:
    """A finished evaluation while RL goes on, after `step` steps of it.

    `figures` are its numbers by split, `heldout` and `train`, as the curves show them; `played` has
    the samples of a task beside each other.
    """

    step: int
    seconds: float
    samples: int
    temperature: float
    figures: Mapping[str, Mapping[str, float]]
    played: Mapping[str, Sequence[tuple[Task, Rollout]]]


def attempts(step: StepResult) -> list[Rollout]:
    """All rollouts of a step, those that the machine spoilt among them."""
    return [*(rollout for group in step.groups for rollout in group), *step.failed]


class RunObserver:
    """An async context manager around a run, whose methods do nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    async def on_restore(self, first_step: int) -> None:
        """RL goes on with step `first_step`; records of it and of later steps are to go."""

    async def on_phase(self, phase: PhaseBegun) -> None:
        """A part of the run begins."""

    def on_progress(self, title: str, metrics: Mapping[str, float]) -> None:
        """A unit of work other than a step of RL is done, in the phase of that title. Called in the
        middle of others' work, so it cannot wait."""

    async def on_warm_step(self, step: int, numbers: Mapping[str, float]) -> None:
        """A supervised step is finished; `step` counts those of the warm start."""

    async def on_warm_batch(self, step: int, batch: Sequence[Sample]) -> None:
        """The same step was trained on these traces of a teacher, or drills."""

    async def on_evaluation(self, evaluated: Evaluated) -> None:
        """An evaluation is finished, and its phase has ended."""

    async def on_rl_evaluation(self, evaluated: RLEvaluated) -> None:
        """An evaluation while RL goes on is finished; its rollouts are trained on by nobody."""

    async def on_step(self, step: StepResult) -> None:
        """A step of RL is finished: write it down."""

    async def on_step_kept(self, step: StepResult) -> None:
        """The same step is written down, and in a checkpoint where one was due: show it."""

    async def on_phase_end(self, title: str, *, is_whole: bool) -> None:
        """The phase of that title has ended: at its end, or because the run does."""
