"""Teachers: traces are real, wrong about as often as configured, and end in an answer."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from local_runner import PlayedTrace, play_trace

from nanorl.envs.actions import COMPACT, MARKDOWN, ActionFormat
from nanorl.envs.tasks.family import Family, generators_of
from nanorl.envs.tasks.smollm2 import smollm2_family
from nanorl.envs.tasks.source import GeneratedTasks
from nanorl.envs.tasks.teachers import (
    SloppyTeacher,
    TeacherConfig,
    miscopy,
    slip,
    smollm2_teacher,
    tiny_teacher,
    wild_guess,
)
from nanorl.envs.tasks.tiny import tiny_family
from nanorl.task import Task

PRESETS = [(smollm2_family(), MARKDOWN), (tiny_family(), COMPACT)]
EVERY = pytest.mark.parametrize(("family", "form"), PRESETS, ids=["smollm2", "tiny"])
NEVER = {"right": 0.0, "habit": 0.0, "slip": 0.0, "guess": 0.0, "miscopy": 0.0}


def play(
    family: Family, form: ActionFormat, folder: Path, n: int, config: TeacherConfig | None = None
) -> list[PlayedTrace]:
    teacher = SloppyTeacher(form, config)
    return [
        play_trace(task, form, teacher, folder, random.Random(i))
        for i, task in enumerate(GeneratedTasks(generators_of([family]), seed=0).batch(0, n))
    ]


@EVERY
def test_a_teacher_that_is_always_right_is_always_right(
    family: Family, form: ActionFormat, tmp_path: Path
) -> None:
    traces = play(family, form, tmp_path, 200, TeacherConfig(**NEVER | {"right": 1.0}))
    assert all(trace.is_correct for trace in traces)
    turns = Counter(len(t.actions) for t in traces)
    assert turns[1] == 0  # nobody answers without running
    assert turns[3] > 10


@EVERY
@pytest.mark.parametrize("manner", ["guess", "miscopy"])
def test_guesses_and_miscopied_values_are_never_right(
    family: Family, form: ActionFormat, manner: str, tmp_path: Path
) -> None:
    traces = play(family, form, tmp_path, 200, TeacherConfig(**NEVER | {manner: 1.0}))
    assert not any(trace.is_correct for trace in traces)
    assert all(trace.answer for trace in traces)


@EVERY
def test_the_teachers_of_the_presets_are_right_about_as_often_as_they_say(
    family: Family, form: ActionFormat, tmp_path: Path
) -> None:
    config = tiny_teacher() if family.name == "tiny" else smollm2_teacher()
    traces = play(family, form, tmp_path, 760, config)
    success = sum(t.is_correct for t in traces) / len(traces)
    assert (0.42 < success < 0.59) if family.name == "tiny" else success == 1.0
    assert all(t.answer is not None and len(t.actions) <= 5 for t in traces)
    assert all(len(t.observations) == len(t.actions) - 1 for t in traces)
    assert len({t.manner for t in traces}) == (4 if family.name == "tiny" else 1)
    for kind in family.generators if family.name == "tiny" else ():
        outcomes = {t.is_correct for t in traces if t.task.kind == kind}
        assert outcomes == {True, False}, kind


@EVERY
def test_stubborn_kinds_fail_mostly_and_the_others_do_not(
    family: Family, form: ActionFormat, tmp_path: Path
) -> None:
    stubborn = frozenset(sorted(family.generators)[::2])
    config = TeacherConfig(right=1.0, stubborn=stubborn, stubborn_habit=2.0, persistence=0.1)
    traces = play(family, form, tmp_path, 700, config)
    right = {
        is_in: [t.is_correct for t in traces if (t.task.kind in stubborn) == is_in]
        for is_in in (True, False)
    }
    assert sum(right[True]) / len(right[True]) < 0.5 < sum(right[False]) / len(right[False])


@EVERY
def test_the_same_rng_plays_the_same_trace(
    family: Family, form: ActionFormat, tmp_path: Path
) -> None:
    first, again = play(family, form, tmp_path, 40), play(family, form, tmp_path, 40)
    assert [t.actions for t in first] == [t.actions for t in again]


def test_a_failed_program_may_be_mended(tmp_path: Path) -> None:
    config = TeacherConfig(**NEVER | {"slip": 1.0, "persistence": 1.0})
    traces = play(*PRESETS[0], tmp_path, 300, config)
    mended = [t for t in traces if t.task.kind == "arithmetic" and len(t.actions) == 4]
    assert mended
    assert all(t.is_correct for t in mended)


def test_a_task_without_solutions_has_no_teacher() -> None:
    task = Task(task_id="mine", kind="user", prompt="?", answer="1")
    with pytest.raises(ValueError, match="'mine' holds no solutions"):
        SloppyTeacher(MARKDOWN).trace(task, random.Random(0))


def test_bad_teacher_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="slip=-1 is negative"):
        TeacherConfig(slip=-1)
    with pytest.raises(ValueError, match="persistence=2 must lie between"):
        TeacherConfig(persistence=2)


def test_slips_change_the_program_and_values() -> None:
    rng = random.Random(0)
    code = "nums = [12, 34, 56]\nprint(sum(nums) * 7)"
    slips = {slip(code, rng) for _ in range(200)}
    assert code not in slips
    assert "nums = [12, 34]\nprint(sum(nums) * 7)" in slips  # a dropped item
    assert "nums = [12, 34, 56]\nsum(nums) * 7" in slips  # a forgotten print
    assert "nums = [12, 34, 56]\nprint(sum(nums) * 8)" in slips  # off by one
    assert "nums = [12, 34, 56]\nprint(sum(nums) + 7)" in slips  # a wrong operator
    assert slip("pass", rng) == "pass"
    for value in ("1234", "abc", "ABC", "7", "-5", "?"):
        assert miscopy(value, rng) != value
        assert wild_guess(value, rng) != value
