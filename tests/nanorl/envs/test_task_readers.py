"""Tasks from every kind of data, one error with the place and the field, and lists that end."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanorl.envs.tasks import readers
from nanorl.envs.tasks.readers import read_tasks
from nanorl.envs.tasks.records import TaskFields
from nanorl.envs.tasks.source import MOST_DRAWS, GeneratedTasks, ListTasks
from nanorl.task import Task, split_of

ROWS = [{"question": f"What is {n} + 1?", "solution": n + 1, "level": n % 3} for n in range(20)]
MAPPED = TaskFields.parse(["prompt=question", "answer=solution"])
WANTED = [(f"What is {n} + 1?", str(n + 1), {"level": n % 3}) for n in range(20)]


def contents(tasks: list[Task]) -> list[tuple[Any, Any, dict[str, Any]]]:
    return [(task.prompt, task.answer, task.data) for task in tasks]


def test_one_data_set_is_the_same_tasks_in_every_format(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    (tmp_path / "t.json").write_text(json.dumps(ROWS))
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "t.parquet")
    lines = [f'"{row["question"]}",{row["solution"]},{row["level"]}' for row in ROWS]
    (tmp_path / "t.csv").write_text("\n".join(["question,solution,level", *lines]))
    sources: list[Any] = [tmp_path / f"t.{suffix}" for suffix in ("jsonl", "json", "parquet")]
    for source in [*sources, ROWS, (row for row in ROWS)]:
        tasks = read_tasks(source, MAPPED)
        assert contents(tasks) == WANTED
        assert all(task.split == split_of(str(task.prompt)) for task in tasks)
    texts = [(p, a, {"level": str(d["level"])}) for p, a, d in WANTED]
    assert contents(read_tasks(tmp_path / "t.csv", MAPPED)) == texts, "a CSV knows only texts"


def test_a_saved_data_set_keeps_its_splits_and_one_can_be_chosen(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {"train": ROWS[:15], "test": ROWS[15:]}
    whole = datasets.DatasetDict({n: datasets.Dataset.from_list(r) for n, r in parts.items()})
    whole.save_to_disk(str(tmp_path / "d"))
    tasks = read_tasks(tmp_path / "d", MAPPED)
    assert [task.split for task in tasks] == ["train"] * 15 + ["heldout"] * 5
    assert contents(tasks) == WANTED
    assert contents(read_tasks(f"{tmp_path}/d:test", MAPPED)) == WANTED[15:]
    with pytest.raises(ValueError, match=r"d:dev: it has the splits train, test"):
        read_tasks(f"{tmp_path}/d:dev", MAPPED)
    with pytest.raises(ValueError, match=r"d \[train\]: row 0: field 'prompt' is missing; there"):
        read_tasks(tmp_path / "d")


def test_only_the_named_columns_are_kept_where_some_are_named() -> None:
    fields = TaskFields.parse(["prompt=question", "answer=solution", "data.grade=level"])
    row = ROWS[4] | {"image": b"\xff"}
    assert read_tasks([row], fields)[0].data == {"grade": 1}
    with pytest.raises(ValueError, match=r"task 0: field 'data' is .*not JSON.*images=image"):
        read_tasks([row], MAPPED)
    row = {**ROWS[4], "odd": b"\xff"}
    with pytest.raises(ValueError, match=r"task 0: field 'data' is .*not JSON.*data\.level=level"):
        read_tasks([row], MAPPED)
    # A column of another meaning under a task's name is not taken for the field.
    swapped = {"prompt": "a note", "question": "1 + 1?", "solution": 2, "split": "odd"}
    fields = TaskFields.parse(["prompt=question", "answer=solution", "data.part=split"])
    [task] = read_tasks([swapped], fields)
    assert (task.prompt, task.answer, task.data) == ("1 + 1?", "2", {"part": "odd"})


def test_chats_data_splits_and_ids_are_taken_as_they_are() -> None:
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    record = {
        "prompt": chat, "data": {"mood": 1}, "split": "test", "task_id": "x", "agent": "tool"
    }  # fmt: skip
    [task] = read_tasks([record], TaskFields(needs_answer=False))
    assert task == Task(
        chat, data={"mood": 1}, split="heldout", task_id="x", agent="tool", kind="user"
    )
    given = [Task("a", 1), Task("b", 2, split="heldout")]
    assert read_tasks(given) == given
    listed = [{"prompt": "p", "answer": [1, {"a": 2}]}]
    assert read_tasks(listed, TaskFields(needs_answer=False))[0].answer == [1, {"a": 2}]


@pytest.mark.parametrize("agent", ["mine.py:loop", "os:system", "/tmp/x.py", "no_such_agent"])
def test_a_record_names_no_code_unless_the_user_says_so(agent: str) -> None:
    """An agent that is a file or a module is imported: whoever writes the data would run it."""
    record = {"prompt": "p", "answer": "a", "agent": agent}
    with pytest.raises(ValueError, match=r"code that would be imported.*--task-fields agent=agent"):
        read_tasks([record])
    [task] = read_tasks([record], TaskFields.parse(["prompt=prompt", "agent=agent"]))
    assert task.agent == agent


def test_tasks_with_one_prompt_are_split_by_content() -> None:
    tasks = read_tasks([{"prompt": "First guess?", "answer": n} for n in range(40)])
    assert {task.split for task in tasks} == {"train", "heldout"}
    # Whoever writes two prompts has them split by prompt, whatever the answers.
    tasks = read_tasks([{"prompt": f"{n % 2}", "answer": n} for n in range(40)])
    assert all(task.split == split_of(str(task.prompt)) for task in tasks)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.json", '{"prompt": 1}', r"t\.json: a dict; write a list of objects"),
        ("t.json", '[{"prompt": "a", "answer": 1}, 3]', r"t\.json: entry 1: a int, but a task"),
        ("t.json", "[\n{]", r"t\.json:2: not JSON"),
        ("t.csv", "prompt,answer\na,1\nb,2,3\n", r"t\.csv:3: the row has more or fewer cells"),
        ("t.csv", "prompt,answer\na,1\nb\n", r"t\.csv:3: the row has more or fewer cells"),
        ("t.csv", 'prompt,answer\na,"1\n', r"t\.csv:2: not CSV"),
        ("t.csv", "prompt,answer\na,1\n,2\n", r"t\.csv:3: field 'prompt' is empty"),
        ("t.txt", "a", r"t\.txt: files with tasks end in \.jsonl, \.json, \.csv or \.parquet"),
        ("t.parquet", "no parquet", r"t\.parquet: not a parquet file"),
        (
            "t.jsonl",
            '{"question": "a", "answer": 1}',
            r"t\.jsonl:1: field 'question' is unknown.*example --task-fields prompt=question$",
        ),
        (
            "t.csv",
            "problem,solution\na,1\n",
            r"t\.csv:2: field 'prompt' is missing; there are 'problem', 'solution'; map them, for "
            r"example --task-fields prompt=problem answer=solution",
        ),
        ("t.jsonl", '{"prompt": [], "answer": 1}', r"field 'prompt' is empty"),
        ("t.jsonl", '{"prompt": ["a"], "answer": 1}', r"field 'prompt' has 'a' as message 0"),
        ("t.jsonl", '{"prompt": "a", "answer": 1, "split": "x"}', r"field 'split' is 'x'; use one"),
        ("t.jsonl", '{"prompt": "a", "answer": 1, "data": 3}', r"'data' is 3, a int; an object"),
        (
            "t.jsonl",
            '{"prompt": "a", "answer": 1, "task_id": "i"}\n'
            '{"prompt": "b", "answer": 1, "task_id": "i"}',
            r"two different tasks have the task_id 'i'",
        ),
    ],
)
def test_every_error_says_where_and_what(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_tasks(tmp_path / name)


def test_a_mapping_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="--task-fields prompt: write field=column"):
        TaskFields.parse(["prompt"])
    with pytest.raises(ValueError, match="a task has no field 'promt'; it has prompt, answer"):
        TaskFields.parse(["promt=question"])
    with pytest.raises(
        ValueError, match=r"task 0: there is no column 'q' \(--task-fields prompt=q"
    ):
        read_tasks(ROWS, TaskFields.parse(["prompt=q"]))
    with pytest.raises(ValueError, match=r"task 1: 'b', a str; give nanorl\.Task"):
        read_tasks([Task("a", 1), "b"])  # type: ignore[list-item]


def test_folders_and_names_that_are_no_data_say_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this folder is no data set"):
        read_tasks(tmp_path)
    with pytest.raises(ValueError, match=r"'my/tasks' does not exist; .*write hf:NAME"):
        read_tasks("my/tasks")


def test_an_iterator_that_never_ends_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readers, "MOST_OF_ITERATOR", 50)
    endless = ({"prompt": f"{n}?", "answer": n} for n in itertools.count())
    assert len(read_tasks(itertools.islice(endless, 50))) == 50
    with pytest.raises(ValueError, match=r"after 50 tasks.*draws a task from a"):
        read_tasks(endless)


def draw(most: int) -> Any:
    return {"guess": lambda rng: Task("First guess?", rng.randint(1, most))}


def test_a_generator_of_few_tasks_gives_each_held_out_one_once_and_ends() -> None:
    source = GeneratedTasks(draw(20), seed=0)
    held = source.heldout(50, seed=0)
    everyone = {n for n in range(1, 21) if Task("First guess?", n).split == "heldout"}
    assert {task.answer for task in held} == everyone and len(held) == len(everyone)
    trained = {task.answer for task in source.batch(0, 300)}
    assert trained == set(range(1, 21)) - everyone


def test_a_generator_without_held_out_tasks_is_refused_in_finite_time() -> None:
    number = next(n for n in range(99) if Task("First guess?", n).split == "train")
    calls: Iterator[int] = itertools.count()

    def one(rng: random.Random) -> Task:
        next(calls)
        return Task("First guess?", number)

    with pytest.raises(ValueError, match="guess: none of 1000 tasks that it drew falls into the s"):
        GeneratedTasks({"guess": one}, seed=0).heldout(5, seed=0)
    assert next(calls) == MOST_DRAWS


def test_a_list_may_be_for_evaluation_alone() -> None:
    tasks = [Task("a", 1, split="heldout")]
    assert ListTasks(tasks, 0, splits=("heldout",)).heldout(9, 0) == tasks
    with pytest.raises(ValueError, match="mine: none of its 1 tasks falls into the split 'train'"):
        ListTasks(tasks, 0, name="mine")
