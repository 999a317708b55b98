"""`ShownRollouts`: a few rollouts as text, in the log and in TensorBoard, while a run goes on.

Left out: choosing instructive ones (examples.py does so for the report); these are any.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

from nanorl.observability.report.observer import Evaluated, RunObserver
from nanorl.observability.report.summary import EVALUATIONS
from nanorl.observability.report.tensorboard import TensorBoardFolders
from nanorl.observability.report.trace import Decode
from nanorl.observability.report.transcript import transcript, verdict
from nanorl.task import Task
from nanorl.types import Rollout

if TYPE_CHECKING:
    from nanorl.observability.results import StepResult

NUM_SAMPLES = 5  # rollouts of RL that the log shows


class ShownRollouts(RunObserver):
    """Shows the score of an evaluation with a wrong and a right rollout of it, and now and then a
    rollout of RL."""

    def __init__(
        self,
        board: TensorBoardFolders,
        decode: Decode,
        *,
        num_steps: int,
        say: Callable[[str], None],
    ) -> None:
        self._board, self._decode, self._say = board, decode, say
        self._every = max(1, num_steps // NUM_SAMPLES)

    async def on_evaluation(self, evaluated: Evaluated) -> None:
        title, result = EVALUATIONS[evaluated.phase], evaluated.result
        self._say(f"{title}: {result.success:.1%} of {result.num_tasks} held-out tasks")
        for is_right in (False, True):  # one of each, if there is one
            alike = (pair for pair in result.played if pair[1].is_success == is_right)
            for task, rollout in islice(alike, 1):
                self._show(f"a task of it, {title}", task, rollout, step=evaluated.step)

    async def on_step_kept(self, step: StepResult) -> None:
        rollouts = [rollout for group in step.groups for rollout in group]
        if step.step % self._every == 0 and rollouts:
            rollout = rollouts[step.step % len(rollouts)]  # any: not the best of them
            task = step.tasks[rollout.task_id]
            self._show(f"a rollout of step {step.step}", task, rollout, step=step.step)

    def _show(self, title: str, task: Task, rollout: Rollout, *, step: int) -> None:
        text = transcript(task, rollout, self._decode, title=title)
        self._say(text)
        self._board.write_text("rollouts", step, verdict(rollout), text)
