"""`RunningEvaluation`: how good the policy is while RL goes on, on held-out and on training tasks.

    step 8: held-out 41.5 % (95 %: 33.2 to 49.8), pass@4 62.0 %; training 58.5 %; the best so far

Every `--evaluation.every` steps, before RL and at its last step, it plays `num_tasks_each` tasks of
both kinds `k` times each. What is sampled at a temperature rises sooner than greedy success, and
pass@k says whether there is anything left to sharpen; training tasks beside held-out ones say
whether they are learnt by heart.

The rollouts are trained on by nobody and seeded by their own ids, so a run that looks computes the
same weights as one that does not. They are played with the weights as the step left them: between
two steps, or beside the next one (evaluation_beside.py). One that is broken off is played anew by
the run that goes on.
Left out: greedy success before and after RL (evaluation_phase.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from nanoinfer.params import SamplingParams
from nanorl.distributed.roles.collector_role import CollectorRole
from nanorl.observability.report.observer import RLEvaluated
from nanorl.observability.report.rl_evaluations import SPLITS, figures, line
from nanorl.run.heldout_success import evaluate
from nanorl.run.state import RunState
from nanorl.task import Task
from nanorl.types import Rollout

TITLE = "evaluation, while RL goes on"


class RunningEvaluation:
    """The evaluations of one run's RL; their figures travel in its cursor."""

    def __init__(self, state: RunState) -> None:
        self._state, self._options = state, state.config.evaluation

    @property
    def is_due(self) -> bool:
        """Say whether the policy is to be evaluated where RL stands now, and has not been."""
        cursor, every, steps = self._state.cursor, self._options.every, self._state.config.rl.steps
        if not every or not steps or any(row["step"] == cursor.step for row in cursor.evaluations):
            return False
        return cursor.step % every == 0 or cursor.step == steps

    async def play(self) -> bool:
        """Evaluate the policy, and tell the observers. True where it is the best so far
        (`is_better`). It may be cancelled: nothing is noted then."""
        state, options, start = self._state, self._options, time.perf_counter()
        played = {split: await self._play_split(split) for split in SPLITS}
        found = {split: figures(pairs, options.k) for split, pairs in played.items()}
        seconds, step = time.perf_counter() - start, state.cursor.step
        about = {"step": step, "k": options.k, "temperature": options.temperature}
        row: dict[str, Any] = {**about, **found, "seconds": seconds}
        is_best = is_better(row, state.cursor.best)
        state.cursor.evaluations.append(row)
        if is_best:
            state.cursor.best = row
        await state.observers.on_rl_evaluation(
            RLEvaluated(
                step=step,
                seconds=seconds,
                samples=options.k,
                temperature=options.temperature,
                figures=found,
                played=played,
            )
        )
        state.live.say(line(row, is_best=is_best))
        return is_best

    async def _play_split(self, split: str) -> list[tuple[Task, Rollout]]:
        state, options = self._state, self._options
        result = await evaluate(
            partial(state.roles.collector.call, CollectorRole.play_task),
            self._tasks(split),
            name=f"rl{state.cursor.step}-{split}",
            samples=options.k,
            sampling=SamplingParams(temperature=options.temperature, seed=options.seed),
            on_rollout=lambda _: state.observers.on_progress(TITLE, {}),
        )
        return result.played

    def _tasks(self, split: str) -> Sequence[Task]:
        """Each once: a short list of training tasks begins again in the middle of a batch."""
        tasks, count = self._state.parts.tasks, self._options.num_tasks_each
        if split == "heldout":
            return tasks.heldout[:count]
        return list({task.task_id: task for task in tasks.train.batch(0, count)}.values())


def is_better(row: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
    """Say whether an evaluation is better on held-out tasks than the best one before, if there is
    one. One of other tasks or at another temperature, as before `--resume` with other options,
    measured something else: the best is looked for anew."""
    if not best or row["temperature"] != best["temperature"]:
        return True
    one, other = row["heldout"], best["heldout"]
    return bool(one["num_tasks"] != other["num_tasks"] or one["success"] > other["success"])
