"""A task as a user writes it: what follows from its content, and what is no task."""

from __future__ import annotations

import dataclasses

import pytest

from nanorl.task import Task


def test_a_task_is_a_prompt_and_an_answer_and_its_id_follows_from_both() -> None:
    task = Task("What is 17 + 25?", 42)
    assert task == Task("What is 17 + 25?", answer=42) and task.kind == "task"
    assert task.task_id.startswith("task-") and task.split in ("train", "heldout")
    assert task.task_id == Task("What is 17 + 25?", answer="42").task_id, "7 and '7' are one answer"
    chat = [{"role": "user", "content": "What is 17 + 25?"}]
    others = [
        Task("What is 17 + 25?"),
        Task("What is 17 + 25?", 43),
        Task("What is 17 + 25?", 42, kind="sum"),
        Task("What is 17 + 25?", 42, files={"a": "b"}),
        Task("What is 17 + 25?", 42, data={"a": "b"}),
        Task("What is 17 + 25?", 42, data={"a": "c"}),
        Task("What is 17 + 25?", 42, agent="tool"),
        Task(chat, 42),
    ]
    assert len({task.task_id, *(other.task_id for other in others)}) == len(others) + 1
    assert Task("p", data={"a": 1, "b": 2}).task_id == Task("p", data={"b": 2, "a": 1}).task_id


def test_one_task_in_four_is_held_out_even_where_all_prompts_are_alike() -> None:
    held = [Task("First guess?", n).split == "heldout" for n in range(1000)]
    assert 200 < sum(held) < 300


def test_an_id_and_a_split_that_are_given_stay() -> None:
    task = Task("p", task_id="mine", split="heldout")
    assert (task.task_id, task.split) == ("mine", "heldout")
    assert dataclasses.replace(task, answer=1).task_id == "mine"
    assert Task("p", task_id="mine").task_id == "mine" and Task("p", split="x").split == "x"


def test_prompts_and_answers_have_a_text_for_people() -> None:
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    assert Task("Hi").messages() == [{"role": "user", "content": "Hi"}]
    assert Task(chat).messages() == chat
    assert Task(chat).prompt_text == "system: Be short.\nuser: Hi"
    answers = [None, "x", 7, 0.5, ["a", 1]]
    assert [Task("p", a).answer_text for a in answers] == ["", "x", "7", "0.5", '["a", 1]']


def test_what_is_not_json_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"field 'answer' is \{1\}, which is not JSON"):
        Task("p", {1})
    with pytest.raises(ValueError, match=r"field 'data' is .*which is not JSON"):
        Task("p", data={"when": object()})
