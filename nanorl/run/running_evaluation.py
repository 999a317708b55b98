"""`RunningEvaluation`: how good the policy is while RL goes on, on held-out and on training tasks.

    step 8: held-out 41.5 % (95 %: 33.2 to 49.8), pass@4 62.0 %; training 58.5 %; the best so far

Every `--evaluation.every` steps, before RL and at its last step, it plays `num_tasks_each` tasks of
both kinds `k` times each. What is sampled at a temperature rises sooner than greedy success, and
pass@k says whether there is anything left to sharpen; training tasks beside held-out ones say
whether they are learnt by heart.

The rollouts are trained on by nobody and seeded by their own ids, so a run that looks computes the
same weights as one that does not. They are played between two steps, with the weights as the step
left them: a trainer in another process waits meanwhile.
Left out: greedy success before and after RL (evaluation_phase.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from nanoinfer.params import SamplingParams
from nanorl.distributed.roles.collector_role import CollectorRole
from nanorl.observability.report.evaluation import Evaluation, percent
from nanorl.observability.report.observer import RLEvaluated
from nanorl.observability.report.statistics import Measured
from nanorl.run.heldout_success import evaluate
from nanorl.run.state import RunState
from nanorl.task import Task
from nanorl.types import Rollout

SPLITS = ("heldout", "train")


class RunningEvaluation:
    """The evaluations of one run's RL; their figures travel in its cursor."""

    def __init__(self, state: RunState) -> None:
        self._state, self._options = state, state.config.evaluation

    def is_due(self, num_steps: int) -> bool:
        """Say whether the policy after so many steps of RL is to be evaluated."""
        every, last = self._options.every, self._state.config.rl.steps
        return every > 0 and (num_steps % every == 0 or num_steps == last)

    async def play(self, num_steps: int) -> bool:
        """Evaluate the policy after so many steps, and tell the observers. True where none before
        was better on held-out tasks."""
        state, options, start = self._state, self._options, time.perf_counter()
        played = {split: await self._play_split(split, num_steps) for split in SPLITS}
        found = {split: figures(pairs, options.k) for split, pairs in played.items()}
        seconds = time.perf_counter() - start
        row: dict[str, Any] = {"step": num_steps, **found, "seconds": seconds}
        best = state.cursor.best
        is_best = not best or row["heldout"]["success"] > best["heldout"]["success"]
        state.cursor.evaluations.append(row)
        if is_best:
            state.cursor.best = row
        await state.observers.on_rl_evaluation(
            RLEvaluated(
                step=num_steps,
                seconds=seconds,
                samples=options.k,
                temperature=options.temperature,
                figures=found,
                played=played,
                is_best=is_best,
            )
        )
        state.live.say(line(row, options.k, is_best=is_best))
        return is_best

    async def _play_split(self, split: str, num_steps: int) -> list[tuple[Task, Rollout]]:
        options = self._options
        result = await evaluate(
            partial(self._state.roles.collector.call, CollectorRole.play_task),
            self._tasks(split),
            name=f"rl{num_steps}-{split}",
            samples=options.k,
            sampling=SamplingParams(temperature=options.temperature, seed=options.seed),
        )
        return result.played

    def _tasks(self, split: str) -> Sequence[Task]:
        tasks, count = self._state.parts.tasks, self._options.num_tasks_each
        return tasks.heldout[:count] if split == "heldout" else tasks.train.batch(0, count)


def figures(played: Sequence[tuple[Task, Rollout]], k: int) -> dict[str, float]:
    """The numbers that a curve shows, with the interval of 95 % of the success."""
    found = Evaluation.of(played, title="", about={}, seconds=0.0)
    success = found.success
    return {
        "success": success.value,
        "success_low": success.low,
        "success_high": success.high,
        "pass_at_k": found.pass_at(k).value,
        "mean_reward": found.mean_reward.value,
        "num_tasks": len(found.scores),
    }


def line(row: Mapping[str, Any], k: int, *, is_best: bool) -> str:
    """A row of the curve in words."""
    one, other = row["heldout"], row["train"]
    success = Measured(one["success"], one["success_low"], one["success_high"])
    among = f", pass@{k} {one['pass_at_k']:.1%}" if k > 1 else ""
    return (
        f"step {row['step']}: held-out {percent(success)}{among}; training tasks "
        f"{other['success']:.1%}{'; the best so far' if is_best else ''}"
    )
