"""Files of schemas 1 and 2, in which each per-token list was a blob of its own, are written anew.

In one transaction: a process that dies leaves the old file. It takes a second for some thousand
rollouts, and for that time the room of both.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from typing import Any

import numpy as np

from nanorl.observability.store.database import STEP_SHIFT, Database, StoreError
from nanorl.observability.store.expiry import worths
from nanorl.observability.store.rows import LISTS, Filed, insert_rows, pack_stats, to_rows
from nanorl.types import Branch, Rollout, Status, TokenStats, TurnSpan, kind_of
from nanorl.unpacking import unzlib

COLUMNS = ("rollout_id", "task_id", "group_id", "step", "version", "status", "reward", "extra")
INDEXES = ("by_step", "by_task", "by_group", "by_version", "by_hash", "by_status", "by_kind")
NUM_AT_ONCE = 500
Json = dict[str, Any]


def migrate(db: Database, schema: int) -> None:
    """Bring the tables of `schema` to the newest, inside a transaction. StoreError if a row is
    damaged."""
    if db.schema_version() != schema:  # another process was quicker
        return
    tables = ["rollouts"] if schema == 1 else ["rollouts", "tasks", "token_stats", "facts"]
    for name in INDEXES:
        db.run(f"DROP INDEX IF EXISTS {name}")
    for name in tables:
        db.run(f"ALTER TABLE {name} RENAME TO old_{name}")
    db.create_tables()
    _copy_rollouts(db, "kind" if schema > 1 else "''")
    if schema > 1:
        db.run("INSERT INTO tasks SELECT task_id, kind, content FROM old_tasks")
        db.run("INSERT INTO facts SELECT name, value FROM old_facts")
        _copy_token_stats(db)
    for name in tables:
        db.run(f"DROP TABLE old_{name}")


def _copy_rollouts(db: Database, kind: str) -> None:
    order = "ORDER BY step, group_id, rollout_id"
    ids = db.query(f"SELECT step, rollout_id FROM old_rollouts {order}")
    columns = ", ".join((*COLUMNS, *LISTS, kind))
    for step, group in groupby(ids, key=lambda row: row[0]):
        number, names = step << STEP_SHIFT, [name for _, name in group]
        for start in range(0, len(names), NUM_AT_ONCE):
            part = names[start : start + NUM_AT_ONCE]
            marks = ", ".join("?" * len(part))
            sql = f"SELECT {columns} FROM old_rollouts WHERE rollout_id IN ({marks}) {order}"
            found = [_to_rollout(db, row) for row in db.query(sql, part)]
            rollouts = [rollout for rollout, _, _ in found]
            ranks = worths(rollouts)
            filed = [
                Filed(step, version, kind or kind_of(one.task_id), ranks[one.rollout_id])
                for one, version, kind in found
            ]
            rows = to_rows(rollouts, filed)
            insert_rows(db, number + start, rows, [None] * len(rows))


def _to_rollout(db: Database, row: tuple[Any, ...]) -> tuple[Rollout, int, str]:
    """With its version and its kind."""
    *values, kind = row
    fields = dict(zip((*COLUMNS, *LISTS), values, strict=True))
    try:
        return _from_fields(fields), fields["version"], kind
    except ValueError as error:
        raise StoreError(
            f"{db.name}: rollout {fields['rollout_id']!r}: {error}; the file is damaged: move it "
            "away; the run can go on without it"
        ) from error


def _from_fields(fields: Mapping[str, Any]) -> Rollout:
    extra = json.loads(fields["extra"])
    own = _to_sequence(fields, extra)
    branches = [
        _to_sequence({name: base64.b64decode(one[name]) for name in LISTS}, one)
        for one in extra.get("branches", [])  # absent where there are none
    ]
    return Rollout(
        task_id=fields["task_id"],
        group_id=fields["group_id"],
        rollout_id=fields["rollout_id"],
        reward=math.nan if fields["reward"] is None else fields["reward"],
        turn_rewards=own.turn_rewards,
        status=Status(fields["status"]),
        metrics=extra["metrics"],
        branches=branches,
        error=extra.get("error", ""),
        turn_spans=own.turn_spans,
        **{name: getattr(own, name) for name in LISTS},
    )


def _to_sequence(blobs: Mapping[str, Any], about: Json) -> Branch:
    lists: Json = {name: _unpack(blobs[name]) for name in LISTS}
    if len({len(values) for values in lists.values()}) > 1:
        raise ValueError("its per-token lists differ in length")
    return Branch(
        turn_spans=[
            TurnSpan(action_start=start, action_end=end, observation_end=observation_end)
            for start, end, observation_end in about["turn_spans"]
        ],
        turn_rewards=about.get("turn_rewards", []),
        is_history=about.get("is_history", False),
        **lists,
    )


def _unpack(blob: bytes) -> list[Any]:
    """Three characters of numpy dtype, then a zlib stream."""
    try:
        return np.frombuffer(unzlib(blob[3:]), dtype=blob[:3].decode("ascii")).tolist()
    except (ValueError, TypeError) as error:
        raise ValueError(f"damaged token list of {len(blob)} bytes: {error}") from error


def _copy_token_stats(db: Database) -> None:
    sql = (
        "SELECT r.id, s.shape, s.numbers FROM old_token_stats s "
        "JOIN rollouts r ON r.rollout_id = s.rollout_id"
    )
    found = ((number, _to_stats(*rest)) for number, *rest in db.query(sql))
    db.insert("token_stats", ("id", "content"), ((n, pack_stats(one)) for n, one in found))


def _to_stats(shape: str, numbers: bytes) -> TokenStats:
    rest = iter(_unpack(numbers))
    lengths: dict[str, Sequence[int]] = json.loads(shape)
    values = {name: [list(islice(rest, one)) for one in each] for name, each in lengths.items()}
    return TokenStats(values=values)
