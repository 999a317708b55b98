"""Which task is played next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanorl.flow.curriculum import InOrder, Learnable, TaskChooser, load_curriculum
from nanorl.task import Task

KINDS = ("easy", "even", "hard", "new")


class Kinds:
    """Task i is of kind i mod 4."""

    def batch(self, step: int, n: int) -> list[Task]:
        numbers = range(step * n, step * n + n)
        return [Task(f"task {i}", answer=str(i), kind=KINDS[i % 4]) for i in numbers]


def chooser(curriculum: InOrder | Learnable, seed: int = 0) -> TaskChooser:
    return TaskChooser(Kinds(), curriculum, seed=seed)


def taught() -> Learnable:
    """Easy and new tasks are solved always, even ones half of the time, hard ones never."""
    curriculum = Learnable()
    lessons = {"easy": [1.0], "even": [1.0, 0.0], "hard": [0.0], "new": [1.0]}
    for kind, rewards in lessons.items():
        for _ in range(40):
            curriculum.observe(Task("?", kind=kind), rewards)
    return curriculum


def test_in_order_every_task_is_played_once() -> None:
    tasks = [chooser(InOrder()).task(number) for number in range(9)]
    assert [task.answer for task in tasks] == [str(number) for number in range(9)]


def test_the_first_choice_is_by_the_variance_of_rewards() -> None:
    """By hand: p is (solved + 1) / (count + 2), 1/2 for an unknown kind; of equals the first."""
    curriculum = taught()
    curriculum.chance = 0.0
    assert {chooser(curriculum).task(number).kind for number in range(20)} == {"even"}
    fresh = Learnable()
    fresh.chance = 0.0
    assert {chooser(fresh).task(number).kind for number in range(20)} == {"easy"}
    fresh.observe(Task("?", kind="easy"), [1.0])  # (1+1)/(1+2): 2/9 < 1/4
    assert chooser(fresh).task(0).kind == "even"


def test_graded_rewards_count_by_how_much_they_vary() -> None:
    """By hand: after rewards r the variance is of r, 0 and 1 together."""
    curriculum = Learnable()
    curriculum.decay = 1.0
    for kind, rewards in {"easy": [0.9, 0.9], "even": [0.2, 0.8], "hard": [0.1, 0.1]}.items():
        curriculum.observe(Task("?", kind=kind), rewards)
    found = {kind: curriculum._variance(kind) for kind in ("easy", "even", "hard")}
    expected = {"easy": 0.165, "even": 0.17, "hard": 0.165}
    assert found == pytest.approx(expected)


def test_one_choice_in_five_is_left_to_chance_and_repeats_by_its_seed() -> None:
    kinds = [chooser(taught()).task(number).kind for number in range(2000)]
    others = sum(kind != "even" for kind in kinds)
    assert others == pytest.approx(2000 * 0.2 * 3 / 4, rel=0.2)
    assert [chooser(taught()).task(number).kind for number in range(2000)] == kinds
    assert [chooser(taught(), seed=1).task(number).kind for number in range(2000)] != kinds


def test_what_it_has_learnt_survives_a_checkpoint() -> None:
    there = chooser(taught())
    here = chooser(Learnable())
    here.load(json.loads(json.dumps(there.state())))
    assert here.state() == there.state()
    assert [here.task(i) for i in range(50)] == [there.task(i) for i in range(50)]


def test_what_an_older_run_has_learnt_is_taken_over() -> None:
    """It kept successes and rollouts: p(1 - p) of (3 + 1) / (4 + 2)."""
    curriculum = Learnable()
    curriculum.load({"seen": {"easy": [3.0, 4.0]}})
    assert curriculum._variance("easy") == pytest.approx(2 / 3 * 1 / 3)


def test_what_was_long_ago_is_forgotten() -> None:
    curriculum = taught()
    curriculum.chance = 0.0
    for _ in range(200):
        curriculum.observe(Task("?", kind="even"), [1.0])
        curriculum.observe(Task("?", kind="new"), [1.0])
        curriculum.observe(Task("?", kind="hard"), [1.0, 0.0])
    assert chooser(curriculum).task(0).kind == "hard"


OWN = """
class Longest:
    num_candidates = 3
    def choose(self, candidates, rng): return max(candidates, key=lambda task: len(task.prompt))
    def observe(self, task, rewards): pass
    def state(self): return {}
    def load(self, state): pass

class Half:
    def choose(self, candidates, rng): return candidates[0]
"""


def test_a_curriculum_of_ones_own_chooses(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    own = TaskChooser(Kinds(), load_curriculum(f"{file}:Longest"), seed=0)
    assert own.task(3).prompt == "task 10"  # of 9, 10, 11 the first of the longest
    with pytest.raises(ValueError, match=r"rl.curriculum .*Half: .* is none"):
        load_curriculum(f"{file}:Half")
    with pytest.raises(ValueError, match=r"--rl.curriculum hardest: .* in_order, learnable"):
        load_curriculum("hardest")
