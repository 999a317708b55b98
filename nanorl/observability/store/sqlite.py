"""SQLite: one file, safe against `kill -9` (WAL) and power loss (synchronous=FULL, one fsync a
transaction). A second process may read while one writes."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from nanorl.observability.store.database import INDEXES, SCHEMA_VERSION, TABLES, StoreError

T = TypeVar("T")

CACHE_KIB = 65_536
"""Random index pages, those of hashes above all, stay in memory up to some million rollouts."""
MMAP_BYTES = 2**30
CHECKPOINT_PAGES = 4_000
"""16 MiB of log before it is folded into the file: random pages are then written once, not often"""
TYPES = {"id": "INTEGER", "blob": "BLOB", "clustered": " WITHOUT ROWID"}

_FOREIGN = {
    "view": "type = 'view'",
    "trigger": "type = 'trigger'",
    "virtual table": "type = 'table' AND sql LIKE 'CREATE VIRTUAL%'",
}
"""What a file can do beside holding rows, and how it is found."""

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
    sqlite3.SQLITE_CANTOPEN: (
        "it cannot be opened: check that the folder exists and is writable (a killed run's log has "
        "to be taken in: to only read it, copy the folder and read the copy)"
    ),
    sqlite3.SQLITE_READONLY: "it is read-only: make the file and its folder writable",
    sqlite3.SQLITE_PERM: "no permission: make the file and its folder writable",
}


class SqliteDatabase:
    """A SQLite file as a `Database`. May be used from several threads of one process."""

    def __init__(
        self, path: Path, *, lock_timeout_s: float = 10.0, is_read_only: bool = False
    ) -> None:
        self.name = str(path)
        self._lock = threading.RLock()
        with self._errors("open"):
            self._db = sqlite3.connect(
                _read_only(path) if is_read_only else path,
                uri=is_read_only,
                timeout=lock_timeout_s,
                isolation_level=None,
                check_same_thread=False,
            )
        try:
            with self._errors("open"):
                self._distrust()
                if is_read_only:
                    self._db.execute("PRAGMA query_only = ON")
                else:
                    self._set_up()
        except BaseException:  # whatever fails, the connection is nobody's yet
            self._db.close()
            raise

    def _distrust(self) -> None:
        """The file may be somebody else's. StoreError for one that has what would run by itself,
        or be asked for ever."""
        self._db.execute("PRAGMA trusted_schema = OFF")
        for kind, words in _FOREIGN.items():
            found = self._db.execute(f"SELECT name FROM sqlite_master WHERE {words}").fetchone()
            if found is not None:
                raise StoreError(
                    f"{self.name}: has a {kind}, which no store has ({str(found[0])[:80]!r}): "
                    "another program made it, move it away"
                )

    def _set_up(self) -> None:
        self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only takes effect in a new file
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._db.execute(f"PRAGMA mmap_size = {MMAP_BYTES}")
        self._db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")

    def write(self, action: str, work: Callable[[], T]) -> T:
        with self._lock, self._errors(action):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                done = work()
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite rolls back by itself after some errors
                    self._db.execute("ROLLBACK")
                raise
            return done

    def read(self, work: Callable[[], T]) -> T:
        with self._lock, self._errors("read"):
            return work()

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._db.execute(sql, values).fetchall()

    def run(self, sql: str, values: Sequence[Any] = ()) -> int:
        return self._db.execute(sql, values).rowcount

    def insert(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        marks = ", ".join("?" * len(columns))
        self._db.executemany(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", rows)

    def schema_version(self) -> int:
        return self._db.execute("PRAGMA user_version").fetchone()[0]

    def create_tables(self) -> None:
        for statement in (*TABLES, *INDEXES):
            self._db.execute(statement.format(**TYPES))
        self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def used_bytes(self) -> int:
        page, count, free = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_size", "page_count", "freelist_count")
        )
        return page * (count - free)

    def vacuum(self) -> None:
        with self._lock, self._errors("shrink"):
            # Not `execute`: that steps the statement once, and each step frees a single page.
            self._db.executescript("PRAGMA incremental_vacuum")

    def close(self) -> None:
        with self._lock, self._errors("close"):
            self._db.close()

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            remedy = _REMEDIES.get(code, "check the disk, or use another --out")
            raise StoreError(f"cannot {action} {self.name}: {remedy} ({error})") from error


def _read_only(path: Path) -> str:
    """The address of a file that is not to be touched. One beside which no log lies has no writer.
    It is read as it is: to share it, SQLite would leave a log and an index beside it, which a
    read-only disk even forbids."""
    has_writer = path.with_name(f"{path.name}-wal").exists()
    return f"{path.resolve().as_uri()}?mode=ro{'' if has_writer else '&immutable=1'}"
