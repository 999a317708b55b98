"""What is played, how often, with which seed, and what is counted: evaluation and groups."""

from __future__ import annotations

import asyncio

import pytest

from nanoinfer.params import SamplingParams
from nanorl.agents.collector import RolloutCollector
from nanorl.run.heldout_success import evaluate
from nanorl.task import Task
from nanorl.types import Rollout, Status, TurnSpan

TASKS = [
    Task(task_id=f"t{i}", kind="even" if i % 2 == 0 else "odd", prompt=f"p{i}", answer="1")
    for i in range(5)
]


class Player:
    """Plays from a script: rewards by task, and how often a rollout id fails before it succeeds."""

    def __init__(self, rewards: dict[str, float], failures: dict[str, int] | None = None) -> None:
        self.rewards, self.failures = rewards, dict(failures or {})
        self.calls: list[tuple[str, SamplingParams]] = []

    async def __call__(
        self, task: Task, *, group_id: str, rollout_id: str, sampling: SamplingParams
    ) -> Rollout:
        self.calls.append((rollout_id, sampling))
        await asyncio.sleep(0)
        has_failed = self.failures.get(rollout_id, 0) > 0
        self.failures[rollout_id] = self.failures.get(rollout_id, 0) - 1
        return Rollout(
            task_id=task.task_id,
            group_id=group_id,
            rollout_id=rollout_id,
            tokens=[1, 2, 3],
            loss_mask=[0, 1, 1],
            logps=[0.0, -1.0, -1.0],
            versions=[-1, 0, 0],
            turn_spans=[TurnSpan(action_start=1, action_end=3, observation_end=3)],
            reward=self.rewards.get(task.task_id, 0.0),
            status=Status.FAILED if has_failed else Status.FINISHED,
        )


def test_evaluation_is_greedy_and_counts_whole_points_by_kind() -> None:
    player = Player({"t0": 1.0, "t1": 0.5, "t2": 1.0, "t3": 1.0})
    result = asyncio.run(evaluate(player, TASKS, name="x"))
    assert {params.temperature for _, params in player.calls} == {0.0}
    assert (result.success, result.num_tasks) == (3 / 5, 5)
    assert result.per_kind == {"even": (2, 3), "odd": (1, 2)}
    assert (result.mean_turns, result.mean_action_tokens) == (1.0, 2.0)
    assert [rollout.task_id for _, rollout in result.played] == [task.task_id for task in TASKS]
    assert result.to_json()["per_kind"] == {"even": [2, 3], "odd": [1, 2]}


def test_several_samples_of_a_task_are_one_group_with_seeds_of_their_own() -> None:
    player = Player({"t0": 1.0, "t2": 1.0})
    warm = SamplingParams(temperature=0.7, seed=5)
    result = asyncio.run(evaluate(player, TASKS, name="x", samples=3, sampling=warm))
    assert (result.num_tasks, len(result.played), result.success) == (5, 15, 2 / 5)
    assert result.per_kind == {"even": (6, 9), "odd": (0, 6)}
    assert [rollout_id for rollout_id, _ in player.calls[:4]] == [
        *("eval-x-0-m0", "eval-x-0-m1", "eval-x-0-m2", "eval-x-1-m0")
    ]
    assert {rollout.group_id for _, rollout in result.played[:3]} == {"eval-x-0"}
    assert len({params.seed for _, params in player.calls}) == 15
    assert {params.temperature for _, params in player.calls} == {0.7}


def test_an_evaluation_rollout_may_fail_as_often_as_it_is_retried() -> None:
    seen: list[Rollout] = []
    player = Player({"t0": 1.0}, {"eval-x-0": 2})
    one = asyncio.run(evaluate(player, TASKS[:1], name="x", on_rollout=seen.append, max_retries=2))
    assert (one.success, len(player.calls)) == (1.0, 3)
    assert [rollout.status for rollout in seen] == [Status.FINISHED]
    with pytest.raises(RuntimeError, match=r"1 of 5 evaluation rollouts failed .* t0"):
        asyncio.run(evaluate(Player({}, {"eval-x-0": 3}), TASKS, name="x", max_retries=2))


def test_a_failed_member_is_played_again_with_its_seed_and_told_once() -> None:
    player = Player({}, {"g-m1": 1, "g-m2": 9})
    collector = RolloutCollector(player, run_seed=7, max_retries=2)
    group = asyncio.run(
        collector.run_group(TASKS[0], group_id="g", size=4, sampling=SamplingParams(seed=3))
    )
    assert [rollout.rollout_id for rollout in group] == ["g-m0", "g-m1", "g-m3"]
    seeds = {name: {p.seed for n, p in player.calls if n == name} for name, _ in player.calls}
    assert all(len(each) == 1 for each in seeds.values()), "a retry changes nothing but time"
    assert len(set.union(*seeds.values())) == 4, "members differ"
    assert [name for name, _ in player.calls].count("g-m2") == 3
    failed = sorted(rollout.rollout_id for rollout in collector.take_failed())
    assert failed == ["g-m1-failed0", "g-m2-failed0", "g-m2-failed1", "g-m2-failed2"]
    assert collector.take_failed() == []
