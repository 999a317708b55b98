"""A record, from whatever file, as a task: which fields it may have, and where a column belongs.

    {"prompt": "What is 12 * 34?", "answer": 408}
    {"prompt": "Sum the numbers in a.txt.", "answer": "6", "files": {"a.txt": "1 2 3"}}
    {"prompt": [{"role": "user", "content": "Hi"}], "data": {"mood": "calm"}, "split": "heldout"}
    {"prompt": ["Which side?", {"type": "image", "image": "dots/3.png"}], "answer": "left"}

Fields are taken by these exact names; a data set of somebody else is mapped (`TaskFields`).
A field that is not known is an error in a file that was written for this program, where it is a
slip; the further columns of a table, or of a mapped file, go into `Task.data`.
Pictures are nanoengine/vision/picture_chats.py's: paths begin where the file of the tasks lies.
Left out: guessing which column is meant. An error names the columns there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

from nanorl.envs.images import Image, pictures_in
from nanorl.plugins import LOOPS
from nanorl.task import Task

SHOWN_CHAT = "nanoengine.vision.picture_chats:shown_chat"
NAMED_BY_HASH = "nanoengine.vision.picture_chats:named_by_hash"
FIELDS: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        "prompt": ((str, list), "a text or a list of chat messages"),
        "answer": ((str, int, float), "a text or a number"),
        "images": ((str, list, dict, bytes), "a picture or a list of pictures"),
        "files": ((dict,), "an object of name: text"),
        "kind": ((str,), "a text"),
        "data": ((dict,), "an object"),
        "agent": ((str,), "a text"),
        "split": ((str,), "a text"),
        "task_id": ((str,), "a text"),
    }
)
"""What a field may be, and how an error says so."""

SPLITS: Mapping[str, str] = MappingProxyType(
    {"train": "train", "heldout": "heldout", "test": "heldout", "validation": "heldout"}
)
"""A data set's own parts: what is not for training is held out."""

USUAL_NAMES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "prompt": ("question", "problem", "input", "instruction", "messages", "query", "text"),
        "images": ("image", "pictures", "picture"),
        "answer": ("solution", "target", "output", "label", "expected", "final_answer"),
    }
)
"""What others call it: only for the example in an error."""


@dataclass(frozen=True, kw_only=True)
class TaskFields:
    """The column of a record that is each field of a task, and the treatment of the other columns.

        TaskFields.parse(["prompt=question", "answer=solution", "data.level=difficulty"])

    columns        field -> column; `data.NAME` fills one entry of `Task.data`, and then no other
                   column goes there
    needs_answer   every task has an answer that is a text or a number, for it will be compared
    keeps_columns  further columns go into `Task.data`; else they are an error
    folder         of the paths of pictures; None: records open no files
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    needs_answer: bool = True
    keeps_columns: bool = False
    folder: Path | None = Path()

    def __post_init__(self) -> None:
        for name in self.columns:
            if name not in FIELDS and not name.startswith("data."):
                raise ValueError(
                    f"--task-fields {name}={self.columns[name]}: a task has no field {name!r}; "
                    f"it has {', '.join(FIELDS)}, and data.NAME for an entry of `data`"
                )

    @classmethod
    def parse(cls, options: Sequence[str], *, needs_answer: bool = True) -> TaskFields:
        """From `field=column` texts. ValueError names one that is not."""
        columns = {}
        for option in options:
            name, sign, column = option.partition("=")
            if not (name and sign and column):
                raise ValueError(
                    f"--task-fields {option}: write field=column, for example prompt=question"
                )
            columns[name] = column
        return cls(columns=columns, needs_answer=needs_answer, keeps_columns=bool(columns))

    def of_table(self) -> TaskFields:
        """The same for a table, whose columns are not the user's to choose."""
        return replace(self, keeps_columns=True)


def task_of(record: Mapping[str, Any], where: str, fields: TaskFields) -> tuple[Task, bool]:
    """The task of one record, and whether the record says its split; else it is by content.

    ValueError begins with `where` and names the field.
    """
    values = _renamed(record, where, fields)
    _check(values, record, where, fields)
    given = {name: value for name, value in values.items() if value not in (None, {}, "")}
    prompt, answer, images = (given.pop(name, None) for name in ("prompt", "answer", "images"))
    if "split" in given:
        given["split"] = _split(given["split"], where)
    if fields.needs_answer:
        answer = str(answer).strip()
    try:
        if images is not None or not (isinstance(prompt, str) or _is_chat_of_texts(prompt)):
            prompt = resolve_name(SHOWN_CHAT)(prompt, images, partial(Image, folder=fields.folder))
        task = Task(prompt, answer, **{"kind": "user"} | given)
        for part in [] if isinstance(task.prompt, str) else pictures_in(task.prompt):
            if part["sha256"] not in task.pictures:
                raise resolve_name(NAMED_BY_HASH)(part["sha256"])
        return task, "split" in given
    except ValueError as error:
        said = str(error).removeprefix("Task: ")
        raise ValueError(f"{where}: {said}{_hint(record, said)}") from None


def _hint(record: Mapping[str, Any], error: str) -> str:
    """Tell how to name the columns of a record that has others than a task can hold."""
    if "field 'data'" not in error:
        return ""
    shown = next((name for name in USUAL_NAMES["images"] if name in record), "")
    if shown:
        return f"; name the column of pictures, --task-fields images={shown}"
    return (
        "; or name the columns that the tasks need, for example --task-fields data.level=level: "
        "then others are left out"
    )


def _renamed(record: Mapping[str, Any], where: str, fields: TaskFields) -> dict[str, Any]:
    """The record by the names of a task's fields, further columns in `data`."""
    columns = fields.columns
    for name, column in columns.items():
        if column not in record:
            raise ValueError(
                f"{where}: there is no column {column!r} (--task-fields {name}={column}); "
                f"there are {_listed(record)}"
            )
    mapped = {name: record[column] for name, column in columns.items()}
    left = {name: value for name, value in record.items() if name not in columns.values()}
    values = {name: left.pop(name) for name in FIELDS if name in left and name not in columns}
    if left and not fields.keeps_columns:
        raise ValueError(
            f"{where}: field {next(iter(left))!r} is unknown; use {tuple(FIELDS)}, put what the "
            'environment needs into "data": {...}, or say which is which with --task-fields'
            + _mapping_example(record)
        )
    picked = {n.removeprefix("data."): v for n, v in mapped.items() if n.startswith("data.")}
    values |= {name: value for name, value in mapped.items() if not name.startswith("data.")}
    if (extra := picked or left) and isinstance(values.get("data"), dict | None):
        values["data"] = (values.get("data") or {}) | extra
    return values


def _check(
    values: Mapping[str, Any], record: Mapping[str, Any], where: str, fields: TaskFields
) -> None:
    required = ("prompt", "answer") if fields.needs_answer else ("prompt",)
    for name in required:
        if name not in values:
            raise ValueError(
                f"{where}: field {name!r} is missing; there are {_listed(record)}"
                + (_mapping_example(record) or f"; every task needs {' and '.join(required)}")
            )
    for name, value in values.items():
        _check_value(name, value, where, is_required=name in required, fields=fields)
    if isinstance(values["prompt"], list) and not _is_said(values["prompt"]):
        _check_messages(values["prompt"], where)
    for name, text in (values.get("files") or {}).items():
        _check_file(name, text, where)
    if values.get("agent") and "agent" not in fields.columns:
        check_agent(values["agent"], where, "--task-fields agent=agent")


def check_agent(name: str, where: str, permission: str) -> None:
    """ValueError for an agent that is none of ours: to load it is to run somebody's code, which
    data does not decide."""
    if name not in LOOPS:
        raise ValueError(
            f"{where}: field 'agent' is {name!r:.200}, code that would be imported; data may name "
            f"{', '.join(LOOPS)}. If you trust it: {permission}"
        )


def _check_value(
    name: str, value: Any, where: str, *, is_required: bool, fields: TaskFields
) -> None:
    kinds, expected = FIELDS[name]
    if value is None and not is_required:
        return
    if name == "answer" and not fields.needs_answer:
        return  # whatever the reward reads
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(
            f"{where}: field {name!r} is {value!r:.200}, a {type(value).__name__}; "
            f"{expected} is expected"
        )
    if is_required and not (value if isinstance(value, list) else str(value).strip()):
        raise ValueError(f"{where}: field {name!r} is empty; every task needs one")


def _is_chat_of_texts(messages: Sequence[Mapping[str, Any]]) -> bool:
    return not any(
        isinstance(one, str) or "role" not in one or isinstance(one.get("content"), list)
        for one in messages
    )


def _is_said(prompt: Sequence[Any]) -> bool:
    """Say whether a list is the texts and pictures that a user says, and no chat."""
    parts = [one for one in prompt if not isinstance(one, str)]
    return bool(parts) and all(
        isinstance(one, dict) and "type" in one and "role" not in one for one in parts
    )


def _check_messages(messages: Sequence[Any], where: str) -> None:
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{where}: field 'prompt' has {message!r:.200} as message {i}; a message is an "
                'object like {"role": "user", "content": "..."}'
            )


def _check_file(name: str, text: Any, where: str) -> None:
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: field 'files' holds {text!r:.200} under {name!r}; file contents are text"
        )
    if not name or name != Path(name).name or name in (".", ".."):
        raise ValueError(f"{where}: field 'files' names {name!r}; use plain names without a folder")


def _split(name: str, where: str) -> str:
    if name not in SPLITS:
        raise ValueError(f"{where}: field 'split' is {name!r}; use one of {', '.join(SPLITS)}")
    return SPLITS[name]


def _listed(record: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, record)) or "no fields at all"


def _mapping_example(record: Mapping[str, Any]) -> str:
    """An example of how to map this very record; empty unless its columns have usual names."""
    found = {
        name: next((usual for usual in names if usual in record), None)
        for name, names in USUAL_NAMES.items()
        if name not in record
    }
    options = " ".join(f"{name}={column}" for name, column in found.items() if column)
    return f"; map them, for example --task-fields {options}" if options else ""


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object of one line. ValueError begins with `where`."""
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON at column {error.colno} ({error.msg}); "
            'write one object on each line, like {"prompt": "...", "answer": "..."}'
        ) from None
    return as_object(record, where)


def as_object(record: Any, where: str) -> dict[str, Any]:
    """The record itself. ValueError begins with `where` if it is none."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a {type(record).__name__}, but a task is a JSON object")
    return record
