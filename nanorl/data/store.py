"""Every rollout of a run in one SQLite file, each `rollout_id` exactly once.

Safe against `kill -9` (WAL, one transaction a group) and against power loss (synchronous=FULL, one
fsync a group). A rollout that is generated again after a resume replaces the earlier one. Index
columns are plain, so `sqlite3 rollouts.sqlite 'select step, avg(reward) ...'` works; the per-token
lists are compressed (nanorl.data.encoding). Left out: the queue to the trainer, and several
writers: a second process may read while one writes.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from nanorl.data.rows import (
    COLUMNS,
    ENTRY_COLUMNS,
    SCHEMA,
    SCHEMA_VERSION,
    Entry,
    from_row,
    to_entry,
    to_row,
)
from nanorl.types import Rollout, Status

# Primary result codes of SQLite (https://www.sqlite.org/rescode.html), each with its remedy.
_REMEDIES = {
    sqlite3.SQLITE_FULL: "the disk is full: free some space, then go on with --resume",
    sqlite3.SQLITE_IOERR: (
        "the disk refused to read or write (full, over a quota or a file size limit, or failing): "
        "make room, then go on with --resume"
    ),
    sqlite3.SQLITE_BUSY: "another process is writing to it: stop that run, or use another --out",
    sqlite3.SQLITE_LOCKED: "another process is writing to it: stop that run, or use another --out",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: move it away; the run can go on without it",
    sqlite3.SQLITE_NOTADB: "this is not a SQLite file: move it away, or use another --out",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: check that the folder exists and is writable",
    sqlite3.SQLITE_READONLY: "it is read-only: make the file and its folder writable",
    sqlite3.SQLITE_PERM: "no permission: make the file and its folder writable",
}


class StoreError(RuntimeError):
    """The rollout file could not be read or written; the message names the file and the fix."""


class RolloutStore:
    """`step` is the training step that a rollout belongs to, `version` the policy that began it.

    May be used from several threads of one process. All errors of the file are StoreError.
    """

    def __init__(self, path: str | Path, *, lock_timeout_s: float = 10.0) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        with self._errors("open"):
            self._db = sqlite3.connect(
                self.path, timeout=lock_timeout_s, isolation_level=None, check_same_thread=False
            )
        try:
            with self._errors("open"):
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, SCHEMA_VERSION):
            raise StoreError(
                f"{self.path}: rollout file of schema {found}, this program reads schema "
                f"{SCHEMA_VERSION}: move it away, or use another --out"
            )
        self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only takes effect in a new file
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        with self._transaction("create"):
            for statement in SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def add(self, rollout: Rollout, *, step: int, version: int) -> None:
        """Stores one rollout; one of the same `rollout_id` is replaced."""
        self.add_group([rollout], step=step, version=version)

    def add_group(
        self, rollouts: Sequence[Rollout], *, step: int, version: int | None = None
    ) -> None:
        """Stores all of them or, whatever happens, none. On return they are on the disk. Without
        `version` each is filed under the one that began it."""
        ids = [rollout.rollout_id for rollout in rollouts]
        if len(set(ids)) != len(ids):
            double = next(rollout_id for rollout_id in ids if ids.count(rollout_id) > 1)
            raise ValueError(
                f"rollout_id {double!r} occurs twice in one group: ids must be unique in a run"
            )
        rows = [to_row(r, step, r.version if version is None else version) for r in rollouts]
        marks = ", ".join("?" * len(COLUMNS))
        sql = f"INSERT OR REPLACE INTO rollouts ({', '.join(COLUMNS)}) VALUES ({marks})"
        with self._transaction(f"store rollouts of step {step} in"):
            self._db.executemany(sql, rows)

    def get(self, rollout_id: str) -> Rollout:
        """KeyError if there is none."""
        rows = self._select(COLUMNS, {"rollout_id": rollout_id})
        if not rows:
            raise KeyError(f"no rollout {rollout_id!r} in {self.path}")
        return self._from_row(rows[0])

    def query(
        self,
        *,
        task_id: str | None = None,
        group_id: str | None = None,
        step: int | None = None,
        version: int | None = None,
        content_hash: str | None = None,
        status: Status | None = None,
        limit: int | None = None,
    ) -> list[Rollout]:
        """Those that match every filter given, ordered by step, group_id and rollout_id."""
        filters = {
            "task_id": task_id,
            "group_id": group_id,
            "step": step,
            "version": version,
            "content_hash": content_hash,
            "status": status,
        }
        given = {name: value for name, value in filters.items() if value is not None}
        return [self._from_row(row) for row in self._select(COLUMNS, given, limit)]

    def entries(self, *, step: int | None = None) -> list[Entry]:
        """The index without the tokens, in the order of `query`; of one step or of all."""
        rows = self._select(ENTRY_COLUMNS, {} if step is None else {"step": step})
        return [to_entry(row) for row in rows]

    def count(self, *, status: Status | None = None) -> int:
        """How many rollouts, or how many of one status."""
        where, values = _where({} if status is None else {"status": status})
        with self._reading():
            row = self._db.execute(f"SELECT count(*) FROM rollouts{where}", values).fetchone()
        return int(row[0])

    def __len__(self) -> int:
        return self.count()

    def delete_from_step(self, step: int) -> int:
        """Forgets every rollout of `step` and later; a resume regenerates them. How many."""
        with self._transaction("delete from"):
            return self._db.execute("DELETE FROM rollouts WHERE step >= ?", (step,)).rowcount

    def expire(self, keep_steps: int) -> int:
        """Keeps the rollouts of the newest `keep_steps` step numbers; how many were dropped.

        The file shrinks by the pages that became free.
        """
        if keep_steps < 1:
            raise ValueError(f"keep_steps={keep_steps}: give at least 1, or do not call expire")
        sql = "DELETE FROM rollouts WHERE step <= (SELECT max(step) FROM rollouts) - ?"
        with self._transaction("delete from"):
            num_dropped = self._db.execute(sql, (keep_steps,)).rowcount
        with self._reading():
            # Not `execute`: that steps the statement once, and each step frees a single page.
            self._db.executescript("PRAGMA incremental_vacuum")
        return num_dropped

    def check(self) -> None:
        """Reads the whole file; StoreError if it is damaged."""
        with self._reading():
            problems = [row[0] for row in self._db.execute("PRAGMA integrity_check(3)")]
        if problems != ["ok"]:
            remedy = _REMEDIES[sqlite3.SQLITE_CORRUPT]
            raise StoreError(f"{self.path}: {remedy} ({'; '.join(problems)})")

    def close(self) -> None:
        with self._lock, self._errors("close"):
            self._db.close()

    def __enter__(self) -> RolloutStore:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _select(
        self, columns: Sequence[str], filters: dict[str, Any], limit: int | None = None
    ) -> list[tuple[Any, ...]]:
        where, values = _where(filters)
        sql = (
            f"SELECT {', '.join(columns)} FROM rollouts{where} "
            "ORDER BY step, group_id, rollout_id LIMIT ?"
        )
        with self._reading():
            return self._db.execute(sql, [*values, -1 if limit is None else limit]).fetchall()

    def _from_row(self, row: tuple[Any, ...]) -> Rollout:
        try:
            return from_row(row)
        except ValueError as error:
            remedy = _REMEDIES[sqlite3.SQLITE_CORRUPT]
            raise StoreError(f"{self.path}: rollout {row[0]!r}: {error}; {remedy}") from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock, self._errors("read"):
            yield

    @contextmanager
    def _transaction(self, action: str) -> Iterator[None]:
        with self._lock, self._errors(action):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite rolls back by itself after some errors
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            remedy = _REMEDIES.get(code, "check the disk, or use another --out")
            raise StoreError(f"cannot {action} {self.path}: {remedy} ({error})") from error


def _where(filters: dict[str, Any]) -> tuple[str, list[Any]]:
    if not filters:
        return "", []
    return " WHERE " + " AND ".join(f"{name} = ?" for name in filters), list(filters.values())
