"""What `RolloutStore` asks of a database, and the tables that it keeps there.

    rollouts     what a rollout is found by; `id` grows with the step
    contents     what it says: a blob, or the name of one that lies elsewhere (blobs.py)
    turns        what happened in each of its turns
    token_stats  numbers about its tokens, which the trainer knows after its step
    tasks        the tasks that were tried, whole
    expired      how many rollouts of a step were dropped
    facts        small JSON facts of the run

`id` is step * 2**24 and a number within the step. Every index ends with it, so the first page of
any slice, in the order of steps, is read off its index without a sort. That is also why `step`
needs no index of its own.
Next: store.py (the store), sqlite.py and postgres.py (the databases), filter.py (slices).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Clause = tuple[str, Sequence[Any]]
"""What stands behind WHERE, and the values of its marks."""
MOST_MARKS = 1_000  # values of one statement; SQLite's limit is 32,766
SCHEMA_VERSION = 3
STEP_SHIFT = 24
"""16 million rollouts in a step, and 2**38 steps, in an integer of 63 bits."""

# {id} and {blob} are the types of the database; {clustered} keeps turns beside their rollout.
TABLES = (
    """CREATE TABLE rollouts (
        id {id} PRIMARY KEY,
        rollout_id TEXT NOT NULL UNIQUE,
        task_id TEXT NOT NULL,
        group_id TEXT NOT NULL,
        kind TEXT NOT NULL,
        step {id} NOT NULL,
        version {id} NOT NULL,
        status TEXT NOT NULL,
        reward DOUBLE PRECISION,
        num_tokens {id} NOT NULL,
        num_turns {id} NOT NULL,
        num_failed_turns {id} NOT NULL,
        content_hash TEXT NOT NULL,
        num_bytes {id} NOT NULL,
        worth {id} NOT NULL,
        stored_at DOUBLE PRECISION NOT NULL
    )""",
    "CREATE TABLE contents (id {id} PRIMARY KEY, content {blob}, place TEXT)",
    """CREATE TABLE turns (
        id {id} NOT NULL,
        turn {id} NOT NULL,
        num_tokens {id} NOT NULL,
        num_observation_tokens {id} NOT NULL,
        reward DOUBLE PRECISION NOT NULL,
        is_failed {id} NOT NULL,
        PRIMARY KEY (id, turn)
    ){clustered}""",
    "CREATE TABLE token_stats (id {id} PRIMARY KEY, content {blob} NOT NULL)",
    "CREATE TABLE tasks (task_id TEXT PRIMARY KEY, kind TEXT NOT NULL, content TEXT NOT NULL)",
    """CREATE TABLE expired (
        step {id} PRIMARY KEY, num_rollouts {id} NOT NULL, num_successes {id} NOT NULL
    )""",
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
)
INDEXES = (
    "CREATE INDEX by_task ON rollouts (task_id, id)",
    "CREATE INDEX by_group ON rollouts (group_id, id)",
    "CREATE INDEX by_kind ON rollouts (kind, id)",
    "CREATE INDEX by_version ON rollouts (version, id)",
    "CREATE INDEX by_status ON rollouts (status, id)",
    "CREATE INDEX by_hash ON rollouts (content_hash, id)",
    "CREATE INDEX by_failed_turn ON turns (turn, id) WHERE is_failed = 1",
    "CREATE INDEX by_place ON contents (place) WHERE place IS NOT NULL",
)


class StoreError(RuntimeError):
    """The rollouts could not be read or written; the message says where and names the fix."""


class EmptyStoreError(StoreError):
    """There are no tables, or not yet: whoever makes the store has just begun."""


class OldSchemaError(StoreError):
    """The tables are of an earlier version of this program, and may only be read."""


class Database(Protocol):
    """SQL with `?` for values. `query`, `run` and `insert` belong inside `read` or `write`."""

    name: str
    """Where it is, for messages; never with a password."""

    def write(self, action: str, work: Callable[[], T]) -> T:
        """Do `work` in a transaction: all of it or nothing, and on return it is on the disk.

        StoreError "cannot `action` ...". `work` may be done twice: after a lost connection.
        """

    def read(self, work: Callable[[], T]) -> T:
        """Do `work`, which reads."""

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows."""

    def run(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Run a statement; how many rows it changed."""

    def insert(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Add rows, none of which is there."""

    def schema_version(self) -> int:
        """The schema version of the tables that are there; 0: there are none."""

    def create_tables(self) -> None:
        """Make TABLES and INDEXES and set the schema version."""

    def used_bytes(self) -> int:
        """The bytes that tables and indexes take up, without what is free for new rows."""

    def vacuum(self) -> None:
        """Hand space that became free back to the disk."""

    def close(self) -> None:
        """No call may follow."""


def among(column: str, values: Sequence[Any]) -> Clause:
    """The rows in which `column` is one of the values, MOST_MARKS at most."""
    return f"{column} IN ({', '.join('?' * len(values))})", values


def in_parts(values: Sequence[T]) -> list[Sequence[T]]:
    """So many that a statement can take each part."""
    return [values[start : start + MOST_MARKS] for start in range(0, len(values), MOST_MARKS)]
