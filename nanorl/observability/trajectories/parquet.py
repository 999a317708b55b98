"""Parquet: the rows of jsonl.py as columns, for Hugging Face datasets, pandas, Polars and verl.

A column has one type, so what has other fields in every row is JSON text here: the arguments of
calls, as in OpenAI's API; `tools`, as TRL reads them too; `metrics`; and a content with pictures.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoengine.extras import missing
from nanorl.observability.trajectories.base import Trajectory
from nanorl.observability.trajectories.files import whole_file
from nanorl.observability.trajectories.frames import Content, Json
from nanorl.observability.trajectories.jsonl import to_row

if TYPE_CHECKING:
    import pyarrow

MOST_ROWS, MOST_TOKENS = 256, 1 << 20  # of a row group, which is held in memory


def write_parquet(trajectories: Iterable[Trajectory], path: Path, *, force: bool) -> None:
    """Write the file, a row group in memory at a time. ValueError without the package pyarrow."""
    schema = _schema()
    from pyarrow import Table  # here: an extra
    from pyarrow.parquet import ParquetWriter  # here: an extra

    with whole_file(path, force=force) as file, ParquetWriter(file, schema) as writer:
        for rows in _row_groups(trajectories):
            writer.write_table(Table.from_pylist(rows, schema))


def _row_groups(trajectories: Iterable[Trajectory]) -> Iterator[list[Json]]:
    rows: list[Json] = []
    num_tokens = 0
    for trajectory in trajectories:
        rows.append(_columns(to_row(trajectory)))
        num_tokens += trajectory.rollout.num_tokens
        if len(rows) >= MOST_ROWS or num_tokens >= MOST_TOKENS:
            yield rows
            rows, num_tokens = [], 0
    yield rows


def _columns(row: Json) -> Json:
    """The row with JSON text where columns have no type of their own."""
    branches = [_sequence_columns(branch) for branch in row["branches"]]
    return {
        **_sequence_columns(row),
        "metrics": _text(row["metrics"]),
        "branches": branches,
    }


def _sequence_columns(row: Json) -> Json:
    messages = [
        {
            **message,
            "content": _content(message["content"]),
            "tool_calls": [_call(call) for call in message.get("tool_calls", [])],
        }
        for message in row["messages"]
    ]
    turns = [
        {
            **turn,
            "calls": [
                {
                    **call,
                    "arguments": _text(call["arguments"]),
                    "result": _content(call["result"]),
                }
                for call in turn["calls"]
            ],
        }
        for turn in row["turns"]
    ]
    return {**row, "messages": messages, "turns": turns, "tools": _text(row["tools"])}


def _content(content: Content | None) -> str | None:
    return _text(content) if isinstance(content, list) else content


def _call(call: Json) -> Json:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _text(function["arguments"])}}


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _schema() -> pyarrow.Schema:
    try:
        import pyarrow as pa  # here: an extra
    except ImportError:
        raise missing("--to parquet", "pyarrow", extra="data") from None

    def record(**fields: Any) -> Any:
        return pa.struct(list(fields.items()))

    text, number, count = pa.string(), pa.float64(), pa.int64()
    function = record(name=text, arguments=text)
    tool_call = record(id=text, type=text, function=function)
    message = record(
        role=text, content=text, reasoning_content=text, tool_call_id=text,
        tool_calls=pa.list_(tool_call),
    )  # fmt: skip
    call = record(id=text, name=text, arguments=text, result=text)
    turn = record(
        action_start=count, action_end=count, observation_end=count, reward=number,
        finish_reason=text, text=text, calls=pa.list_(call),
    )  # fmt: skip
    image = record(start=count, length=count, key=text, grid=pa.list_(count), sha256=text)
    sequence = {
        "messages": pa.list_(message),
        "tools": text,
        "tokens": pa.list_(count),
        "loss_mask": pa.list_(pa.int8()),
        "logps": pa.list_(number),
        "versions": pa.list_(count),
        "kept": pa.list_(pa.list_(count)),
        "images": pa.list_(image),
        "turns": pa.list_(turn),
    }
    names = {"rollout_id": text, "group_id": text, "task_id": text}
    outcome = {
        "step": count, "phase": text, "status": text, "reward": number, "total_reward": number,
        "is_success": pa.bool_(), "version": count, "metrics": text,
    }  # fmt: skip
    branch = record(name=text, caller=pa.list_(text), **sequence)
    return pa.schema(list({**names, **outcome, **sequence, "branches": pa.list_(branch)}.items()))
