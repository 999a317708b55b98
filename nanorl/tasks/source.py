"""The task of each step: a pure function of integers, so resuming needs only a cursor.

`TaskSource` draws from generated families, `FileTasks` from a user's own file. Neither holds state:
`batch(step, n)` gives the same tasks in every process. A file has one JSON object a line, with
`prompt`, `answer` and, where they are wanted, `files` and `kind`:

    {"prompt": "What is 12 * 34?", "answer": 408}
    {"prompt": "Sum the numbers in a.txt.", "answer": "6", "files": {"a.txt": "1 2 3"}}

A quarter of all prompts, chosen by their hash, is held out.
Left out: any filtering by difficulty, which belongs to the trainer, where the outcomes are; and
solutions to a user's tasks, so no teacher can show how to solve them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from nanorl.tasks.problem import Family, Problem
from nanorl.types import HELDOUT_ONE_IN, Task, content_id, split_of

Split = Literal["train", "heldout"]

FIELDS: dict[str, tuple[type, ...]] = {
    "prompt": (str,),
    "answer": (str, int, float),
    "files": (dict,),
    "kind": (str,),
}
EXPECTED = {
    "prompt": "a text",
    "answer": "a text or a number",
    "files": "an object of name: text",
    "kind": "a text",
}
REQUIRED = ("prompt", "answer")


class TaskSource:
    """Generated tasks of one split; kinds take turns in shuffled rounds, so none is neglected."""

    fingerprint = ""  # they follow from the options

    def __init__(self, families: Sequence[Family], seed: int, split: Split = "train") -> None:
        if split not in ("train", "heldout"):
            raise ValueError(f"split={split!r} is unknown; use 'train' or 'heldout'")
        self.generators = {
            f"{family.name}/{kind}": generator
            for family in families
            for kind, generator in family.generators.items()
        }
        if not self.generators:
            raise ValueError("families is empty; name at least one, for example 'smollm2'")
        self.seed = seed
        self.split: Split = split

    def batch(self, step: int, n: int) -> list[Problem]:
        """The `n` tasks of a step, the same ones in every call and process."""
        return [self._draw(self.seed, self.split, step * n + i) for i in range(n)]

    def heldout(self, n: int, seed: int) -> list[Problem]:
        """`n` tasks whose texts never occur in training, all different, every kind alike often."""
        found: dict[str, Problem] = {}
        index = 0
        while len(found) < n:
            problem = self._draw(seed, "heldout", index)
            found.setdefault(problem.prompt, problem)
            index += 1
        return list(found.values())

    def _draw(self, seed: int, split: Split, index: int) -> Problem:
        kinds = sorted(self.generators)
        turn, place = divmod(index, len(kinds))
        random.Random(f"kinds {seed} {split} {turn}").shuffle(kinds)
        rng = random.Random(f"task {seed} {split} {index}")
        while True:
            problem = self.generators[kinds[place]](rng)
            if problem.split == split:
                return problem


class FileTasks:
    """Tasks from a file with the interface of `TaskSource`; every epoch is shuffled anew."""

    def __init__(self, path: Path | str, seed: int, split: str = "train") -> None:
        self.path = Path(path)
        self.seed = seed
        tasks = read_tasks(self.path)
        self.fingerprint = fingerprint(tasks)
        self.tasks = [task for task in tasks if task.split == split]
        self.heldout_tasks = [task for task in tasks if task.split == "heldout"]
        for name, found in ((split, self.tasks), ("heldout", self.heldout_tasks)):
            if not found:
                raise ValueError(
                    f"{self.path}: none of its {len(tasks)} tasks falls into the split {name!r}, "
                    f"which is chosen by the hash of the prompt (1 in {HELDOUT_ONE_IN} is held "
                    "out); add more tasks"
                )

    def batch(self, step: int, n: int) -> list[Task]:
        """The `n` tasks of a step, the same ones in every call and process."""
        return [self._at(step * n + i) for i in range(n)]

    def heldout(self, n: int, seed: int) -> list[Task]:
        """Draw up to `n` different held-out tasks, no more than the file has."""
        tasks = list(self.heldout_tasks)
        random.Random(f"heldout {seed}").shuffle(tasks)
        return tasks[:n]

    def _at(self, index: int) -> Task:
        epoch, place = divmod(index, len(self.tasks))
        order = list(range(len(self.tasks)))
        random.Random(f"epoch {self.seed} {epoch}").shuffle(order)
        return self.tasks[order[place]]


def fingerprint(tasks: Sequence[Task]) -> str:
    """A hash of the tasks' content and order, which decide what each step trains on.

    The spelling of the file does not count. A resumed run must find the same hash.
    """
    return hashlib.sha256("\n".join(task.task_id for task in tasks).encode()).hexdigest()


def read_tasks(path: Path) -> list[Task]:
    """All tasks of the file. ValueError names the file, the line and the field that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"task file {str(path)!r} does not exist; check the path") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    tasks: dict[str, Task] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            task = read_task(line, f"{path}:{number}")
            tasks.setdefault(task.task_id, task)
    if not tasks:
        raise ValueError(f"{path}: holds no task; write one JSON object on each line")
    return list(tasks.values())


def read_task(line: str, where: str) -> Task:
    """The task of one line; `where` goes into the error message."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON at column {error.colno} ({error.msg}); "
            'write one object on each line, like {"prompt": "...", "answer": "..."}'
        ) from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a {type(record).__name__}, but a task is a JSON object")
    check_fields(record, where)
    prompt, answer, kind = record["prompt"], str(record["answer"]).strip(), record.get("kind")
    files = record.get("files") or {}
    return Task(
        task_id=content_id(kind or "user", prompt, answer, files),
        kind=kind or "user",
        prompt=prompt,
        answer=answer,
        files=files,
        split=split_of(prompt),
    )


def check_fields(record: dict[str, Any], where: str) -> None:
    for name in REQUIRED:
        if name not in record:
            raise ValueError(f"{where}: field {name!r} is missing; {REQUIRED} are required")
    for name, value in record.items():
        if name not in FIELDS:
            raise ValueError(f"{where}: field {name!r} is unknown; use {tuple(FIELDS)}")
        optional_null = value is None and name not in REQUIRED
        if not optional_null and (isinstance(value, bool) or not isinstance(value, FIELDS[name])):
            raise ValueError(
                f"{where}: field {name!r} is {value!r}, a {type(value).__name__}; "
                f"{EXPECTED[name]} is expected"
            )
    for name in REQUIRED:
        if not str(record[name]).strip():
            raise ValueError(f"{where}: field {name!r} is empty; every task needs one")
    for file_name, text in (record.get("files") or {}).items():
        if not isinstance(text, str):
            raise ValueError(
                f"{where}: field 'files' holds {text!r} under {file_name!r}; file contents are text"
            )
        if not file_name or file_name != Path(file_name).name or file_name in (".", ".."):
            raise ValueError(
                f"{where}: field 'files' names {file_name!r}; use plain names without a folder"
            )
