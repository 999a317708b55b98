"""Evaluation on held-out tasks: success overall and per task type.

Every task is played through the same agent, environment and sandbox as in training, once at
temperature 0 or several times at another. With the tool off the agent still may answer; it gets a
fixed notice instead of output.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from nanoinfer.params import SamplingParams
from nanorl.agents.collector import PlayRollout, RolloutsFailed
from nanorl.observability.results import EvaluationResult
from nanorl.task import Task, derive_seed
from nanorl.types import Rollout, Status

GREEDY = SamplingParams(temperature=0.0)


def too_few(tasks: Sequence[Task], wanted: int) -> str:
    """Tell somebody who wanted more held-out tasks than there are; "" where there are as many."""
    if len(tasks) >= wanted:
        return ""
    return (
        f"held-out tasks: {len(tasks)}, not {wanted}: the environment has no more that training "
        "never sees"
    )


async def evaluate(
    play: PlayRollout,
    tasks: Sequence[Task],
    *,
    name: str,
    samples: int = 1,
    sampling: SamplingParams = GREEDY,
    on_rollout: Callable[[Rollout], None] | None = None,
    max_retries: int = 2,
) -> EvaluationResult:
    """Play every task `samples` times; `name` goes into the rollout ids, which seed the samples."""

    async def play_one(group_id: str, rollout_id: str, task: Task) -> Rollout:
        params = replace(sampling, seed=derive_seed(sampling.seed, rollout_id))
        for _ in range(max_retries + 1):
            rollout = await play(task, group_id=group_id, rollout_id=rollout_id, sampling=params)
            if rollout.status != Status.FAILED:
                break
        if on_rollout is not None:
            on_rollout(rollout)
        return rollout

    members = [""] if samples == 1 else [f"-m{member}" for member in range(samples)]
    places = [
        (f"eval-{name}-{i}", member, task) for i, task in enumerate(tasks) for member in members
    ]
    rollouts = await asyncio.gather(
        *(play_one(group, group + member, task) for group, member, task in places)
    )
    return summarise([task for _, _, task in places], rollouts)


def summarise(tasks: Sequence[Task], rollouts: Sequence[Rollout]) -> EvaluationResult:
    """Count successes; `tasks` has the task of each rollout.

    RolloutsFailed, with what the last one died of, if the infrastructure failed on a task for good.
    """
    failed = [rollout for rollout in rollouts if rollout.status == Status.FAILED]
    if failed:
        raise RolloutsFailed(
            f"{len(failed)} of {len(rollouts)} evaluation rollouts failed again and again (first "
            f"task: {failed[0].task_id}), the last one of: {failed[-1].error or 'an unknown cause'}"
        )
    per_kind: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for task, rollout in zip(tasks, rollouts, strict=True):
        per_kind[task.kind][0] += rollout.is_success
        per_kind[task.kind][1] += 1
    count = len(rollouts)
    return EvaluationResult(
        success=sum(r.is_success for r in rollouts) / count,
        num_tasks=len({task.task_id for task in tasks}),
        per_kind={kind: (solved, played) for kind, (solved, played) in per_kind.items()},
        mean_turns=sum(r.num_turns for r in rollouts) / count,
        mean_action_tokens=sum(r.num_action_tokens for r in rollouts) / count,
        played=list(zip(tasks, rollouts, strict=True)),
    )
