"""`StoredRollouts`: the rollouts of a file that another process may be writing, a page at a time.

    with StoredRollouts("runs/tiny-seed0/rollouts.sqlite") as store:
        entries, total = store.page(Selection(outcome="wrong", order="longest", limit=100))

The file is opened for reading alone: WAL lets a reader and the writer go on beside each other, and
every question is one short transaction, so that the writer's checkpoints are not held up. A file of
schema 1 is read as it is, with what it lacks made up for this connection.
Left out: searching in texts, which are tokens in the file (pages.py).
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from nanorl.store import ENTRY_COLUMNS, SCHEMA_VERSION, Entry, RolloutStore, StoreError, to_entry
from nanorl.types import Status, kind_of

ORDERS: Mapping[str, str] = MappingProxyType(
    {
        "newest": "step DESC, group_id DESC, rollout_id DESC",
        "oldest": "step, group_id, rollout_id",
        "worst": "status = 'failed', reward, step DESC, rollout_id",
        "best": "status = 'failed', reward DESC, step DESC, rollout_id",
        "longest": "num_tokens DESC, step DESC, rollout_id",
    }
)
OUTCOMES: Mapping[str, str] = MappingProxyType(
    {
        "right": "status = 'finished' AND reward >= 1",
        "wrong": "status = 'finished' AND ifnull(reward, 0) < 1",
        "cut": "status IN ('truncated_turn', 'truncated_context')",
        "failed": "status = 'failed'",
    }
)
_ABSENT_IN_SCHEMA_1 = (
    "CREATE TEMP VIEW rollouts AS SELECT *, kind_of(task_id) AS kind FROM main.rollouts",
    "CREATE TEMP TABLE tasks (task_id, kind, content)",
    "CREATE TEMP TABLE token_stats (rollout_id, shape, numbers)",
    "CREATE TEMP TABLE facts (name, value)",
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which rollouts, in which order, and which part of that list. ValueError for unknown words.

    `task` is a part of the task's id, `steps` the first and the last.
    """

    steps: tuple[int, int] | None = None
    kind: str = ""
    task: str = ""
    task_id: str = ""
    group_id: str = ""
    outcome: str = ""
    order: str = "newest"
    offset: int = 0
    limit: int = 100

    def __post_init__(self) -> None:
        for name, known in (("order", ORDERS), ("outcome", {"": "", **OUTCOMES})):
            if getattr(self, name) not in known:
                words = ", ".join(filter(None, known))
                raise ValueError(f"{name} {getattr(self, name)!r}: one of {words}")
        if self.offset < 0 or not 0 < self.limit <= 1000:
            raise ValueError(
                f"offset {self.offset}, limit {self.limit}: offset must not be negative, limit "
                "must be 1 to 1000"
            )

    def where(self) -> tuple[str, list[Any]]:
        """The condition in SQL, and the values of its question marks."""
        conditions: dict[str, list[Any]] = {}
        if self.steps is not None:
            conditions["step BETWEEN ? AND ?"] = list(self.steps)
        for name in ("kind", "task_id", "group_id"):
            if value := getattr(self, name):
                conditions[f"{name} = ?"] = [value]
        if self.task:
            conditions["instr(task_id, ?)"] = [self.task]
        if self.outcome:
            conditions[OUTCOMES[self.outcome]] = []
        text = " AND ".join(f"({condition})" for condition in conditions) or "1"
        return text, [value for values in conditions.values() for value in values]


class Tally(NamedTuple):
    """How many rollouts of a kind in a step there are, and what came of them."""

    kind: str
    step: int
    num: int
    num_right: int
    num_wrong: int
    num_cut: int
    num_failed: int


class StoredRollouts(RolloutStore):
    """A RolloutStore that only reads. StoreError where the file is not there, or damaged."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        with self._errors("open"):
            self._db = self._connected()
        try:
            with self._errors("read"):
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _connected(self) -> sqlite3.Connection:
        """A file beside which no log lies has no writer. It is read as it is: to share it, SQLite
        would leave a log and an index beside it, which a read-only disk even forbids."""
        has_writer = self.path.with_name(f"{self.path.name}-wal").exists()
        return sqlite3.connect(
            f"{self.path.resolve().as_uri()}?mode=ro{'' if has_writer else '&immutable=1'}",
            uri=True,
            timeout=5.0,
            isolation_level=None,
            check_same_thread=False,
        )

    def _prepare(self) -> None:
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found not in range(1, SCHEMA_VERSION + 1):
            raise StoreError(
                f"{self.path}: rollout file of schema {found}, this program reads schemas up to "
                f"{SCHEMA_VERSION}: view it with the version that wrote it"
            )
        if found == 1:
            self._db.create_function("kind_of", 1, kind_of, deterministic=True)
            for statement in _ABSENT_IN_SCHEMA_1:
                self._db.execute(statement)

    def __enter__(self) -> StoredRollouts:
        return self

    def page(self, selection: Selection) -> tuple[list[Entry], int]:
        """A part of the list, and how long the whole list is."""
        where, values = selection.where()
        sql = (
            f"SELECT {', '.join(ENTRY_COLUMNS)} FROM rollouts WHERE {where} "
            f"ORDER BY {ORDERS[selection.order]} LIMIT ? OFFSET ?"
        )
        with self._reading():
            rows = self._db.execute(sql, [*values, selection.limit, selection.offset]).fetchall()
            [total] = self._db.execute(
                f"SELECT count(*) FROM rollouts WHERE {where}", values
            ).fetchone()
        return [to_entry(row) for row in rows], total

    def entry(self, rollout_id: str) -> Entry:
        """The index columns of one rollout. KeyError without it."""
        sql = f"SELECT {', '.join(ENTRY_COLUMNS)} FROM rollouts WHERE rollout_id = ?"
        with self._reading():
            row = self._db.execute(sql, (rollout_id,)).fetchone()
        if row is None:
            raise KeyError(f"no rollout {rollout_id!r} in {self.path}")
        return to_entry(row)

    def tally(self) -> list[Tally]:
        """What came of the rollouts, by kind and step."""
        sums = ", ".join(f"sum({condition})" for condition in OUTCOMES.values())
        sql = f"SELECT kind, step, count(*), {sums} FROM rollouts GROUP BY kind, step"
        with self._reading():
            return [Tally(*row) for row in self._db.execute(f"{sql} ORDER BY step, kind")]


def outcome_of(entry: Entry) -> str:
    """The name in OUTCOMES."""
    if entry.status is Status.FINISHED:
        return "right" if entry.reward >= 1.0 else "wrong"
    return "failed" if entry.status is Status.FAILED else "cut"
