"""All tasks of a user's data: files, tables, data sets and Python objects.

    read_tasks("tasks.jsonl")                     one JSON object a line
    read_tasks("tasks.json")                      a list of objects
    read_tasks("tasks.csv")                       a header, then a task a line
    read_tasks("tasks.parquet")                   needs pyarrow
    read_tasks("folder")                          what `datasets` saved (save_to_disk)
    read_tasks("folder:test")                     one split of it
    read_tasks("hf:openai/gsm8k:main:train")      the hub's: NAME, NAME:SPLIT, NAME:CONFIG:SPLIT
    read_tasks({"prompt": f"{n} + 1?", "answer": n + 1} for n in range(50))

What a record may hold is said in records.py. Every error names the place: file and line, row or
entry, and field. A data set with splits of its own keeps them; else a quarter of all prompts,
chosen by their hash, is held out, or where all prompts are alike a quarter of the tasks.
Left out: data sets larger than memory, and iterators that never end, which are refused: every
process of a run and every resumption must find the same tasks. Draw those from a random generator
(`GeneratedTasks`, the `tasks(rng)` of an environment).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoengine.extras import missing
from nanorl.envs.tasks.records import SPLITS, TaskFields, as_object, parse_object, task_of
from nanorl.task import Task, json_text, split_of

HUB = "hf:"
MOST_OF_ITERATOR = 100_000
"""So many tasks are read from an iterator without a length before it is held to be endless."""

Record = tuple[str, Mapping[str, Any]]  # where it stands, and what it says


def read_tasks(
    source: Path | str | Iterable[Task | Mapping[str, Any]], fields: TaskFields | None = None
) -> list[Task]:
    """All different tasks of `source`, in its order; a task that occurs twice is one."""
    fields = fields or TaskFields()
    if not isinstance(source, str | Path):
        tasks = list(_of_objects(source, fields))
        name = "tasks"
    else:
        name = str(source)
        fields = replace(fields, folder=_folder_of(name))
        fields = fields.of_table() if _is_table(name) else fields
        tasks = [task_of(record, where, fields) for where, record in _records(name)]
    if not tasks:
        raise ValueError(f"{name}: holds no task; {_how_to_write(name)}")
    return _unique(_split_by_prompt(tasks), name)


def _split_by_prompt(tasks: list[tuple[Task, bool]]) -> list[Task]:
    """Equal prompts fall into one split, unless a split was given or all prompts are alike."""
    texts = [json_text(task.prompt, "prompt") for task, _ in tasks]
    if len(set(texts)) == 1:
        return [task for task, _ in tasks]
    return [
        task if is_given else replace(task, split=split_of(text))
        for (task, is_given), text in zip(tasks, texts, strict=True)
    ]


def _unique(tasks: list[Task], name: str) -> list[Task]:
    found: dict[str, Task] = {}
    for task in tasks:
        if found.setdefault(task.task_id, task) != task:
            raise ValueError(
                f"{name}: two different tasks have the task_id {task.task_id!r}; give each its "
                "own, or none: then it follows from the content"
            )
    return list(found.values())


def _of_objects(
    source: Iterable[Task | Mapping[str, Any]], fields: TaskFields
) -> Iterator[tuple[Task, bool]]:
    most = None if hasattr(source, "__len__") else MOST_OF_ITERATOR
    for number, one in enumerate(source):
        if number == most:
            raise ValueError(
                f"tasks: the iterator still went on after {most} tasks, and one that never ends "
                "cannot be read: a resumed run must find the same tasks. Give a list, or a "
                "function that draws a task from a random generator (`tasks(self, rng)` of an "
                "environment)"
            )
        where = f"task {number}"
        if isinstance(one, Task):
            yield one, True
        elif isinstance(one, Mapping):
            yield task_of(one, where, fields)
        else:
            raise ValueError(
                f"{where}: {one!r:.200}, a {type(one).__name__}; give nanorl.Task(...) or a "
                "dict with a prompt"
            )


def _folder_of(name: str) -> Path | None:
    """The folder in which the paths of a file of tasks begin; None for the hub's, which open no
    file here."""
    if name.startswith(HUB):
        return None
    folder = next(
        (one for one in (name, name.rpartition(":")[0]) if one and Path(one).is_dir()), ""
    )
    return Path(folder) if folder else Path(name).parent


# -- files -----------------------------------------------------------------------------------------


def _is_table(name: str) -> bool:
    """Say whether the columns are somebody else's choice."""
    return not name.endswith((".jsonl", ".json"))


def _records(name: str) -> Iterator[Record]:
    path = Path(name)
    if name.startswith(HUB):
        return _hub_records(name.removeprefix(HUB))
    if path.is_dir():
        return _dataset_records(path, "")
    folder, colon, split = name.rpartition(":")
    if colon and Path(folder).is_dir():
        return _dataset_records(Path(folder), split)
    if not path.exists():
        raise ValueError(
            f"task file {name!r} does not exist; check the path (for a data set of the Hugging "
            f"Face hub write {HUB}NAME)"
        )
    reader = {
        ".jsonl": _jsonl_records,
        ".json": _json_records,
        ".csv": _csv_records,
        ".parquet": _parquet_records,
    }.get(path.suffix)
    if reader is None:
        raise ValueError(
            f"{name}: files with tasks end in .jsonl, .json, .csv or .parquet; rename it, or "
            "convert it"
        )
    return reader(path)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None


def _jsonl_records(path: Path) -> Iterator[Record]:
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, parse_object(line, where)


def _json_records(path: Path) -> Iterator[Record]:
    try:
        records = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg})") from None
    if not isinstance(records, list):
        raise ValueError(
            f"{path}: a {type(records).__name__}; write a list of objects, or one object a line "
            "into a .jsonl file"
        )
    for number, record in enumerate(records):
        where = f"{path}: entry {number}"
        yield where, as_object(record, where)


def _csv_records(path: Path) -> Iterator[Record]:
    reader = csv.DictReader(_read_text(path).splitlines(keepends=True), strict=True)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            number = reader.reader.line_num  # the outer one's is of the last whole row
            raise ValueError(f"{path}:{number}: not CSV ({error})") from None
        where = f"{path}:{reader.line_num}"
        if None in row or None in row.values():
            raise ValueError(
                f"{where}: the row has more or fewer cells than the header, which has "
                f"{len(reader.fieldnames or ())}; put a cell with a comma into quotes"
            )
        yield where, row


def _parquet_records(path: Path) -> Iterator[Record]:
    try:
        import pyarrow as arrow  # here: an extra
        from pyarrow.parquet import ParquetFile  # here: an extra
    except ImportError:
        raise missing(str(path), "pyarrow", extra="data") from None
    try:
        with ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows):
                yield f"{path}: row {number}", row
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file ({error})") from None


# -- data sets ------------------------------------------------------------------------------------


def _dataset_records(folder: Path, split: str) -> Iterator[Record]:
    """Read the records of a folder that `datasets` wrote with save_to_disk."""
    if not any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise ValueError(
            f"{folder}: this folder is no data set (save_to_disk of `datasets`); name a file of "
            "tasks in it"
        )
    try:
        from datasets import load_from_disk  # here: an extra
    except ImportError:
        raise missing(str(folder), "datasets", extra="data") from None
    yield from _split_records(load_from_disk(str(folder)), str(folder), split)


def _hub_records(name: str) -> Iterator[Record]:
    try:
        from datasets import load_dataset  # here: an extra
    except ImportError:
        raise missing(HUB + name, "datasets", extra="data") from None
    repository, *rest = name.split(":")
    if len(rest) > 2:
        raise ValueError(f"{HUB}{name}: write {HUB}NAME, {HUB}NAME:SPLIT or {HUB}NAME:CONFIG:SPLIT")
    config, split = (rest[0] if len(rest) == 2 else None), (rest[-1] if rest else "")
    yield from _split_records(load_dataset(repository, config), HUB + repository, split)


def _split_records(dataset: Any, name: str, split: str) -> Iterator[Record]:
    """The rows; those of a data set with splits say which is theirs, unless one was chosen."""
    if not isinstance(dataset, dict):  # a Dataset, of one split
        if split:
            raise ValueError(f"{name}:{split}: this data set has no splits; leave :{split} out")
        parts, is_marked = {"": dataset}, False
    else:
        if split and split not in dataset:
            raise ValueError(f"{name}:{split}: it has the splits {', '.join(dataset)}")
        parts, is_marked = ({split: dataset[split]} if split else dataset), not split
    for part, rows in parts.items():
        if is_marked and part not in SPLITS:
            raise ValueError(
                f"{name}: its split {part!r} is none of {', '.join(SPLITS)}, so whether to train "
                f"on it is not known; choose one split, for example {name}:{part}"
            )
        for number, row in enumerate(_undecoded(rows)):
            where = f"{name}{f' [{part}]' if part else ''}: row {number}"
            yield where, ({"split": part, **row} if is_marked else row)


def _undecoded(rows: Any) -> Iterator[dict[str, Any]]:
    """The rows of a data set; of one with pictures as they are stored, {"bytes", "path"}: decoders
    would run in this process, and pictures are kept as they came."""
    if "Image(" not in str(rows.features):
        yield from rows
        return
    for batch in rows.with_format("arrow").iter(batch_size=64):
        yield from batch.to_pylist()


def _how_to_write(name: str) -> str:
    return "write one JSON object on each line" if name.endswith(".jsonl") else "add some"
