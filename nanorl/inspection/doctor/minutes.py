"""How long a run will take, from what a few rollouts and one forward pass took here.

    rollouts     sampled tokens of all steps / sampled tokens a second in the check
    training     tokens of all steps, and of the warm start · BACKWARD / tokens a second forward
    evaluations  sampled tokens of all held-out tasks that are played, as the rollouts

An estimate: real batches are larger and so faster, trained models write longer or shorter.
Left out: the sandbox, if it is what everybody waits for, and checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanorl.observability.alarms.finding import Finding, Severity
from nanorl.observability.report.summary import HIDING
from nanorl.options.run_config import RunConfig
from nanorl.types import Rollout

BACKWARD = 3.5
"""A forward and a backward pass over a forward pass: three times the multiplications, and the
log-probs of every token."""
LONG_H = 12.0


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The measured speeds, in tokens a second."""

    sampled: float
    forward: float


@dataclass(frozen=True, kw_only=True)
class Minutes:
    """The minutes that the parts of a run take."""

    rollouts: float
    training: float
    evaluations: float

    @property
    def total(self) -> float:
        return self.rollouts + self.training + self.evaluations

    def text(self) -> str:
        return (
            f"the run will take about {_duration(self.total)} here, or less: rollouts "
            f"{_duration(self.rollouts)}, training {_duration(self.training)}, evaluations "
            f"{_duration(self.evaluations)}"
        )


def expected_minutes(
    config: RunConfig, rollouts: Sequence[Rollout], speed: Speed, num_heldout: int
) -> Minutes:
    """`rollouts` are the sample, not empty; `num_heldout` tasks there are."""
    rl, warm, evaluation = config.rl, config.warm_start, config.evaluation
    sampled = sum(one.num_action_tokens for one in rollouts) / len(rollouts)
    whole = sum(one.num_tokens for one in rollouts) / len(rollouts)
    num_rollouts = rl.steps * rl.tasks_per_step * rl.group_size
    counts = [
        evaluation.num_tasks_untrained,
        evaluation.num_tasks,
        evaluation.num_tasks,
        evaluation.num_tasks_no_tool,
    ]
    if any(one.images for one in rollouts):
        counts += [evaluation.num_tasks_hidden] * len(HIDING)
    num_evaluated = sum(min(count, num_heldout) for count in counts)
    if evaluation.every and rl.steps:  # before RL, at every multiple, and at the last step
        times = len({*range(0, rl.steps, evaluation.every), rl.steps})
        num_each = evaluation.num_tasks_each
        num_evaluated += times * evaluation.k * (min(num_each, num_heldout) + num_each)
    num_traces = warm.steps * warm.traces_per_step
    num_trained = rl.steps * rl.groups_per_step * rl.group_size
    trained = whole * (num_trained * rl.epochs + num_traces)
    return Minutes(
        rollouts=num_rollouts * sampled / speed.sampled / 60,
        training=trained * BACKWARD / speed.forward / 60,
        evaluations=num_evaluated * sampled / speed.sampled / 60,
    )


def minutes_finding(minutes: Minutes) -> Finding | None:
    """A run that nobody waits for."""
    if minutes.total < LONG_H * 60:
        return None
    return Finding(
        name="minutes",
        severity=Severity.WARNING,
        seen=minutes.text(),
        why="that is long for a first try",
        remedy="lower --rl.steps or --rl.tasks-per-step, evaluate less (--evaluation.num-tasks, "
        "--evaluation.every), take a smaller --model, or a GPU",
    )


def _duration(minutes: float) -> str:
    if minutes >= 90:
        return f"{minutes / 60:.1f} h"
    return f"{minutes:.0f} min" if minutes >= 1 else f"{60 * minutes:.0f} s"
