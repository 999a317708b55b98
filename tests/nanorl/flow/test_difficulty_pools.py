"""Tasks by how often they are solved: which pool a task is of, and what is played of each."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nanorl.flow.curriculum import TaskChooser, load_curriculum
from nanorl.flow.difficulty_pools import MOST_TASKS, DifficultyPools
from nanorl.options.presets import tiny
from nanorl.options.run_curriculum import run_curriculum
from nanorl.options.trust import remember, unknown
from nanorl.task import Task

TASKS = [Task(f"task {i}", answer=i) for i in range(60)]


class Cycle:
    """The sixty tasks, again and again."""

    def batch(self, step: int, n: int) -> list[Task]:
        return [TASKS[(step * n + i) % 60] for i in range(n)]


def sorted_pools(**options: Any) -> DifficultyPools:
    """Of every three tasks the first is solved always, the second never, the third sometimes."""
    pools = DifficultyPools(**options)
    for i, task in enumerate(TASKS):
        pools.observe(task, ([1.0, 1.0], [0.0, 0.0], [1.0, 0.0])[i % 3])
    return pools


def test_the_running_success_and_the_pools_by_hand() -> None:
    pools, task = DifficultyPools(), TASKS[0]
    seen = []
    for rewards in ([1.0, 1.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]):
        pools.observe(task, rewards)
        seen.append((pools.state()["running"][task.task_id], pools.pool_of(task.task_id)))
    assert seen == [
        (1.0, "easy"),
        (0.75, "normal"),
        (0.875, "normal"),
        (0.4375, "normal"),
        (0.21875, "normal"),
    ]
    pools.observe(TASKS[1], [0.0, 0.0])
    assert pools.pool_of(TASKS[1].task_id) == "hard"
    assert pools.pool_of(TASKS[2].task_id) == "normal", "it was not played yet"
    pools.observe(TASKS[1], [])
    assert pools.pool_of(TASKS[1].task_id) == "hard", "no rollout says nothing"
    assert pools.metrics() == {"pool_easy": 0.0, "pool_normal": 1.0, "pool_hard": 1.0}


def test_the_running_success_against_a_float64_reference_for_200_random_histories() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        easy_from, hard_to = rng.uniform(0.6, 1.0), rng.uniform(-0.2, 0.4)
        pools = DifficultyPools(easy_from=float(easy_from), hard_to=float(hard_to))
        groups = rng.uniform(-0.5, 1.2, size=(rng.integers(1, 9), rng.integers(1, 6)))
        if rng.random() < 0.5:
            groups = (groups > 0.4).astype(np.float64)
        for rewards in groups:
            pools.observe(TASKS[0], rewards.tolist())
        means = groups.mean(axis=1, dtype=np.float64)
        # By its closed form: weight 1/2 for each later group, the first takes what is left.
        weights = 0.5 ** np.arange(len(means), 0, -1)
        weights[0] *= 2
        running = float(means @ weights)
        assert pools.state()["running"][TASKS[0].task_id] == pytest.approx(running, abs=1e-12)
        if min(abs(running - easy_from), abs(running - hard_to)) > 1e-9:
            expected = "easy" if running >= easy_from else "normal"
            expected = "hard" if running <= hard_to else expected
            assert pools.pool_of(TASKS[0].task_id) == expected


@pytest.mark.parametrize(("easy", "hard"), [(0.1, 0.3), (0.0, 0.0), (0.0, 1.0), (0.5, 0.5)])
def test_each_pool_has_its_share_of_what_is_played(easy: float, hard: float) -> None:
    pools = sorted_pools(easy=easy, hard=hard)
    chooser = TaskChooser(Cycle(), pools, seed=0)
    played = [chooser.task(number) for number in range(3000)]
    counts = Counter(pools.pool_of(task.task_id) for task in played)
    found = [counts[pool] / 3000 for pool in ("easy", "normal", "hard")]
    assert found == pytest.approx([easy, 1 - easy - hard, hard], abs=0.03)


def test_normal_tasks_take_the_places_of_a_pool_that_is_empty() -> None:
    pools = DifficultyPools(easy=0.5, hard=0.5)
    pools.observe(TASKS[0], [1.0])
    pools.observe(TASKS[1], [1.0])
    rng = random.Random(0)
    assert {pools.choose(TASKS[:3], rng).answer for _ in range(40)} == {0, 2}
    assert {pools.choose(TASKS[:2], rng).answer for _ in range(40)} == {0}, "something is played"
    assert {pools.choose(TASKS[3:9], rng).answer for _ in range(40)} == {3}, "the first of a pool"


def test_a_choice_is_a_function_of_seed_number_and_what_was_learnt() -> None:
    here, there = (TaskChooser(Cycle(), sorted_pools(), seed=4) for _ in range(2))
    there.load(json.loads(json.dumps(there.state())))
    assert there.state() == here.state()
    numbers = random.Random(0).sample(range(200), 50)
    assert [here.task(n) for n in numbers] == [there.task(n) for n in numbers]
    other = TaskChooser(Cycle(), sorted_pools(), seed=5)
    assert [here.task(n) for n in numbers] != [other.task(n) for n in numbers]
    fresh = TaskChooser(Cycle(), DifficultyPools(), seed=4)
    fresh.load({})
    assert fresh.state() == {"running": {}}, "a run that had no pools before"
    assert TaskChooser(Cycle(), load_curriculum("in_order"), seed=4).metrics() == {}


def test_tasks_of_long_ago_are_forgotten() -> None:
    pools = DifficultyPools()
    pools.load({"running": {str(i): 1.0 for i in range(MOST_TASKS)}})
    pools.observe(replace(TASKS[0], task_id="0"), [1.0])
    pools.observe(TASKS[1], [1.0])
    running = pools.state()["running"]
    assert len(running) == MOST_TASKS and "1" not in running and {"0", "2"} <= running.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("easy=0.7", "hard=0.6"), "at most 1 together"),
        (("easy=-0.1",), "easy=-0.1: must be 0 or more"),
        (("hard=1.5",), "hard=1.5: must be at most 1"),
        (("easy_from=0.2", "hard_to=0.3"), "would be of both pools"),
        (("candidates=0",), "candidates=0: must be 1 or more"),
        (("esay=0.1",), "pools does not take them.*it takes .*easy"),
        (("easy",), "--rl.curriculum-args easy: write name=value"),
    ],
)
def test_what_does_not_fit_is_said(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_curriculum(with_curriculum("pools", *arguments))


def with_curriculum(name: str, *arguments: str) -> Any:
    return replace(tiny(), rl=replace(tiny().rl, curriculum=name, curriculum_args=arguments))


def test_arguments_are_the_curriculums(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert run_curriculum(with_curriculum("pools", "candidates=3")).num_candidates == 3
    with pytest.raises(ValueError, match="in_order does not take them"):
        run_curriculum(with_curriculum("in_order", "easy=0.1"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert unknown(with_curriculum("pools", "easy=0.3").to_json()) == []
    own = with_curriculum("mine.py:Mine").to_json()
    assert unknown(own) == ["--rl.curriculum mine.py:Mine"]
    remember(own)
    assert unknown(own) == []
    assert unknown(with_curriculum("mine.py:Mine", "a=1").to_json()) != []
