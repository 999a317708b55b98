"""Every rollout of a run in one SQLite file, each `rollout_id` exactly once.

Safe against `kill -9` (WAL, one transaction a group) and against power loss (synchronous=FULL, one
fsync a group). A rollout that is generated again after a resume replaces the earlier one.
Index columns are plain, so `sqlite3 rollouts.sqlite 'select step, avg(reward) ...'` works. The
per-token lists are blobs, the smallest exact numpy type and then zlib: a rollout of 1,000 tokens
takes a few kB instead of tens as JSON and comes back equal to the last bit, because log-probs are
stored as fp32 only where fp32 holds every one of them. Those of further branches, which few
rollouts have, are the same bytes as text in the column `extra`.
Beside the rollouts lie the tasks that they tried, whole, so that a rollout can be read and played
again when the file of the tasks is gone; numbers about their tokens, which the trainer knows only
after its step; and small facts of the run as JSON.
In this file: the tables, `RolloutStore`, a rollout as a row, per-token lists as bytes.
Left out: several writers (a second process may read while one writes).
"""

from __future__ import annotations

import base64
import hashlib
import json
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nanorl.monitor.vitals import vitals
from nanorl.types import Branch, Rollout, Status, Task, TokenStats, TurnSpan, kind_of

SCHEMA_VERSION = 2

SCHEMA = """
CREATE TABLE IF NOT EXISTS rollouts (
    rollout_id TEXT PRIMARY KEY,
    task_id TEXT NOT NULL,
    group_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    version INTEGER NOT NULL,
    status TEXT NOT NULL,
    reward REAL,
    num_tokens INTEGER NOT NULL,
    num_turns INTEGER NOT NULL,
    content_hash TEXT NOT NULL,
    extra TEXT NOT NULL,
    tokens BLOB NOT NULL,
    loss_mask BLOB NOT NULL,
    logps BLOB NOT NULL,
    versions BLOB NOT NULL,
    kind TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS tasks (
    task_id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    content TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS token_stats (
    rollout_id TEXT PRIMARY KEY,
    shape TEXT NOT NULL,
    numbers BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS facts (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_step ON rollouts (step, group_id);
CREATE INDEX IF NOT EXISTS by_task ON rollouts (task_id, step);
CREATE INDEX IF NOT EXISTS by_group ON rollouts (group_id);
CREATE INDEX IF NOT EXISTS by_version ON rollouts (version);
CREATE INDEX IF NOT EXISTS by_hash ON rollouts (content_hash);
CREATE INDEX IF NOT EXISTS by_status ON rollouts (status);
CREATE INDEX IF NOT EXISTS by_kind ON rollouts (kind, step);
"""

ENTRY_COLUMNS = (
    *("rollout_id", "task_id", "group_id", "step", "version", "status", "reward"),
    *("num_tokens", "num_turns", "content_hash", "kind"),
)
LISTS = ("tokens", "loss_mask", "logps", "versions")
COLUMNS = (*ENTRY_COLUMNS, "extra", *LISTS)

_DELETE_ORPHANS = (
    "DELETE FROM token_stats WHERE rollout_id NOT IN (SELECT rollout_id FROM rollouts)"
)

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


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The index columns of one stored rollout.

    Entry(rollout_id="s12-t3-m1", task_id="squares-0f3a...", kind="squares",
          group_id="s12-t3", step=12, version=12, status=Status.FINISHED,
          reward=1.0, num_tokens=143, num_turns=2, content_hash="9c1d...")
    """

    rollout_id: str
    task_id: str
    group_id: str
    step: int
    version: int
    status: Status
    reward: float
    num_tokens: int
    num_turns: int
    content_hash: str
    kind: str


class StoreError(RuntimeError):
    """The rollout file could not be read or written; the message names the file and the fix."""


class RolloutStore:
    """The rollouts of one run, written in groups and read by their index columns.

        with RolloutStore("runs/tiny-seed0/rollouts.sqlite") as store:
            worst = min(store.entries(step=12), key=lambda entry: entry.reward)
            rollout = store.get(worst.rollout_id)
            same_task = store.query(task_id=rollout.task_id)

    `step` is the training step that a rollout belongs to, `version` the policy that began it.
    May be used from several threads of one process. All errors of the file are StoreError.
    """

    def __init__(self, path: str | Path, *, lock_timeout_s: float = 10.0) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        self._kinds: dict[str, str] = {}  # of tasks, as far as they were asked for
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
        if found not in range(SCHEMA_VERSION + 1):
            raise StoreError(
                f"{self.path}: rollout file of schema {found}, this program reads schemas up to "
                f"{SCHEMA_VERSION}: move it away, or use another --out"
            )
        self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only takes effect in a new file
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        with self._transaction("create"):
            if found == 1:
                self._db.execute("ALTER TABLE rollouts ADD COLUMN kind TEXT NOT NULL DEFAULT ''")
                self._db.create_function("kind_of", 1, kind_of, deterministic=True)
                self._db.execute("UPDATE rollouts SET kind = kind_of(task_id)")
            for statement in SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def add_group(
        self, rollouts: Sequence[Rollout], *, step: int, version: int | None = None
    ) -> None:
        """Store all of them or, whatever happens, none. On return they are on the disk.

        A rollout of the same `rollout_id` is replaced. Without `version` each rollout is filed
        under the version that began it.
        """
        ids = [rollout.rollout_id for rollout in rollouts]
        if len(set(ids)) != len(ids):
            double = next(rollout_id for rollout_id in ids if ids.count(rollout_id) > 1)
            raise ValueError(
                f"rollout_id {double!r} occurs twice in one group: ids must be unique in a run"
            )
        rows = [
            to_row(r, step, r.version if version is None else version, self._kind(r.task_id))
            for r in rollouts
        ]
        marks = ", ".join("?" * len(COLUMNS))
        sql = f"INSERT OR REPLACE INTO rollouts ({', '.join(COLUMNS)}) VALUES ({marks})"
        with self._transaction(f"store rollouts of step {step} in"):
            self._db.executemany(sql, rows)

    def add_tasks(self, tasks: Sequence[Task]) -> None:
        """Store tasks, whole; one whose id is there stays as it is."""
        new = [task for task in tasks if task.task_id not in self._kinds]
        rows = [(t.task_id, t.kind, json.dumps(t.to_json())) for t in new]
        with self._transaction("store tasks in"):
            self._db.executemany("INSERT OR IGNORE INTO tasks VALUES (?, ?, ?)", rows)
        self._kinds |= {task.task_id: task.kind for task in new}

    def task(self, task_id: str) -> Task | None:
        """The task of this id, as it was when it was first played; None if it was not stored."""
        sql = "SELECT content FROM tasks WHERE task_id = ?"
        with self._reading():
            row = self._db.execute(sql, (task_id,)).fetchone()
        return None if row is None else Task.from_json(json.loads(row[0]))

    def tasks(self) -> list[Task]:
        """All tasks that were stored, in the order of their ids."""
        with self._reading():
            rows = self._db.execute("SELECT content FROM tasks ORDER BY task_id").fetchall()
        return [Task.from_json(json.loads(row[0])) for row in rows]

    def add_token_stats(self, stats: Mapping[str, TokenStats]) -> None:
        """Store numbers about the tokens of rollouts, by their ids; earlier ones are replaced."""
        rows = [(rollout_id, *_pack_stats(one)) for rollout_id, one in stats.items()]
        with self._transaction("store numbers of tokens in"):
            self._db.executemany("INSERT OR REPLACE INTO token_stats VALUES (?, ?, ?)", rows)

    def token_stats(self, rollout_id: str) -> TokenStats | None:
        """Numbers about the tokens of a rollout; None where no step was made of it."""
        sql = "SELECT shape, numbers FROM token_stats WHERE rollout_id = ?"
        with self._reading():
            row = self._db.execute(sql, (rollout_id,)).fetchone()
        return None if row is None else _unpack_stats(*row)

    def put_fact(self, name: str, value: Any) -> None:
        """Store something small about the run as JSON, such as what it ran on."""
        with self._transaction("store a fact in"):
            self._db.execute(
                "INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value))
            )

    def facts(self, prefix: str = "") -> dict[str, Any]:
        """The facts whose names begin so, by name."""
        sql = "SELECT name, value FROM facts WHERE substr(name, 1, ?) = ? ORDER BY name"
        with self._reading():
            rows = self._db.execute(sql, (len(prefix), prefix)).fetchall()
        return {name: json.loads(value) for name, value in rows}

    def get(self, rollout_id: str) -> Rollout:
        """The rollout of this id; KeyError if there is none."""
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
        """The rollouts that match every filter given, in order of step, group_id and rollout_id."""
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
        """The index columns of one step or of all, without the tokens, in the order of `query`."""
        rows = self._select(ENTRY_COLUMNS, {} if step is None else {"step": step})
        return [to_entry(row) for row in rows]

    def __len__(self) -> int:
        with self._reading():
            row = self._db.execute("SELECT count(*) FROM rollouts").fetchone()
        return int(row[0])

    def delete_from_step(self, step: int) -> int:
        """Forget the rollouts of `step` and later, which a resume regenerates, and what is known of
        the weights that came of them (facts `weights/VERSION`); the number of rollouts."""
        with self._transaction("delete from"):
            num_deleted = self._db.execute("DELETE FROM rollouts WHERE step >= ?", (step,)).rowcount
            self._db.execute(_DELETE_ORPHANS)
            sql = (
                "DELETE FROM facts WHERE name LIKE 'weights/%' AND CAST(substr(name, 9) AS INT) > ?"
            )
            self._db.execute(sql, (step,))
        return num_deleted

    def expire(self, keep_steps: int) -> int:
        """Keep the rollouts of the newest `keep_steps` steps and drop the others; their number.

        The file shrinks by the pages that became free.
        """
        if keep_steps < 1:
            raise ValueError(f"keep_steps={keep_steps}: give at least 1, or do not call expire")
        sql = "DELETE FROM rollouts WHERE step <= (SELECT max(step) FROM rollouts) - ?"
        with self._transaction("delete from"):
            num_dropped = self._db.execute(sql, (keep_steps,)).rowcount
            self._db.execute(_DELETE_ORPHANS)
        with self._reading():
            # Not `execute`: that steps the statement once, and each step frees a single page.
            self._db.executescript("PRAGMA incremental_vacuum")
        return num_dropped

    def heartbeat(self) -> dict[str, Any]:
        """Says which process this is, and how many rollouts it holds: read from the file, so the
        answer says that it works."""
        return {**vitals(), "num_rollouts": float(len(self))}

    def close(self) -> None:
        with self._lock, self._errors("close"):
            self._db.close()

    def __enter__(self) -> RolloutStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _kind(self, task_id: str) -> str:
        """The type of a task that is stored, or what its id says."""
        if task_id not in self._kinds:
            sql = "SELECT kind FROM tasks WHERE task_id = ?"
            with self._reading():
                row = self._db.execute(sql, (task_id,)).fetchone()
            if row is None:
                return kind_of(task_id)
            self._kinds[task_id] = row[0]
        return self._kinds[task_id]

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


def to_entry(row: tuple[Any, ...]) -> Entry:
    """The entry of a row of ENTRY_COLUMNS."""
    fields = dict(zip(ENTRY_COLUMNS, row, strict=True))
    fields["status"] = Status(fields["status"])
    fields["reward"] = _reward(fields["reward"])
    return Entry(**fields)


def to_row(rollout: Rollout, step: int, version: int, kind: str) -> tuple[Any, ...]:
    """The values of COLUMNS, in their order."""
    extra: dict[str, Any] = {
        "turn_spans": _spans_to_lists(rollout.turn_spans),
        "turn_rewards": rollout.turn_rewards,
        "metrics": rollout.metrics,
    }
    if rollout.error:
        extra["error"] = rollout.error
    if rollout.branches:
        extra["branches"] = [_branch_to_text(branch) for branch in rollout.branches]
    return (
        rollout.rollout_id,
        rollout.task_id,
        rollout.group_id,
        step,
        version,
        rollout.status.value,
        rollout.reward,  # NaN becomes NULL in SQLite
        rollout.num_tokens,
        rollout.num_turns,
        content_hash(rollout),
        kind,
        json.dumps(extra),
        *_pack_lists(rollout.sequences[0]).values(),
    )


def from_row(row: tuple[Any, ...]) -> Rollout:
    """The inverse of `to_row`; ValueError if the row is damaged."""
    fields = dict(zip(COLUMNS, row, strict=True))
    extra = json.loads(fields["extra"])
    own = {name: fields[name] for name in LISTS}
    first = _unpack_sequence(own, extra["turn_spans"])
    sequences = [first]
    for branch in extra.get("branches", []):  # absent where there are none
        blobs = {name: base64.b64decode(branch[name]) for name in LISTS}
        further = _unpack_sequence(blobs, branch["turn_spans"])
        further.turn_rewards = branch.get("turn_rewards", [])
        further.is_history = branch.get("is_history", False)
        sequences.append(further)
    lengths = [len(sequence.tokens) for sequence in sequences]
    if sum(lengths) != fields["num_tokens"]:
        raise ValueError(f"sequences of {lengths} tokens, not {fields['num_tokens']} in all")
    return Rollout(
        task_id=fields["task_id"],
        group_id=fields["group_id"],
        rollout_id=fields["rollout_id"],
        reward=_reward(fields["reward"]),
        turn_rewards=extra["turn_rewards"],
        status=Status(fields["status"]),
        metrics=extra["metrics"],
        branches=sequences[1:],
        error=extra.get("error", ""),
        turn_spans=first.turn_spans,
        **{name: getattr(first, name) for name in LISTS},
    )


def _pack_stats(stats: TokenStats) -> tuple[str, bytes]:
    """The names with the lengths of their lists as JSON, and all numbers in a row."""
    shape = {name: [len(one) for one in lists] for name, lists in stats.values.items()}
    numbers = [number for lists in stats.values.values() for one in lists for number in one]
    return json.dumps(shape), pack_floats(numbers)


def _unpack_stats(shape: str, numbers: bytes) -> TokenStats:
    rest = iter(unpack(numbers))
    return TokenStats(
        values={
            name: [list(islice(rest, length)) for length in lengths]
            for name, lengths in json.loads(shape).items()
        }
    )


def _spans_to_lists(spans: Sequence[TurnSpan]) -> list[list[int]]:
    return [list(asdict(span).values()) for span in spans]


def _pack_lists(sequence: Branch) -> dict[str, bytes]:
    """The bytes of LISTS, in their order."""
    packers = {"logps": pack_floats}
    return {name: packers.get(name, pack_ints)(getattr(sequence, name)) for name in LISTS}


def _branch_to_text(branch: Branch) -> dict[str, Any]:
    texts = {n: base64.b64encode(blob).decode() for n, blob in _pack_lists(branch).items()}
    return {
        **texts,
        "turn_spans": _spans_to_lists(branch.turn_spans),
        "turn_rewards": branch.turn_rewards,
        "is_history": branch.is_history,
    }


def _unpack_sequence(blobs: Mapping[str, bytes], spans: Sequence[Sequence[int]]) -> Branch:
    """ValueError if the lists differ in length."""
    lists: dict[str, Any] = {name: unpack(blob) for name, blob in blobs.items()}
    lengths = {len(values) for values in lists.values()}
    if len(lengths) > 1:
        raise ValueError(f"per-token lists of lengths {sorted(lengths)}")
    turn_spans = [
        TurnSpan(action_start=start, action_end=end, observation_end=observation_end)
        for start, end, observation_end in spans
    ]
    return Branch(turn_spans=turn_spans, **lists)


def _reward(value: float | None) -> float:
    return float("nan") if value is None else value


# Three characters of numpy dtype, then a zlib stream. Level 1: a step writes a few MB at most.
_INT_DTYPES = ("|i1", "|u1", "<i2", "<u2", "<i4", "<i8")


def pack_ints(values: Sequence[int]) -> bytes:
    """Any integers of 64 bits, in the smallest type that holds them all."""
    exact = np.asarray(values, dtype=np.int64)
    low, high = (int(exact.min()), int(exact.max())) if len(exact) else (0, 0)
    dtype = next(
        name for name in _INT_DTYPES if np.iinfo(name).min <= low and high <= np.iinfo(name).max
    )
    return _pack(exact, dtype)


def pack_floats(values: Sequence[float]) -> bytes:
    """fp32 if that is exact (as the contract of `Rollout.logps` says), else fp64."""
    exact = np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float32).astype(np.float64)
    return _pack(exact, "<f4" if np.array_equal(rounded, exact, equal_nan=True) else "<f8")


def _pack(array: np.ndarray, dtype: str) -> bytes:
    return dtype.encode("ascii") + zlib.compress(array.astype(dtype).tobytes(), level=1)


def unpack(blob: bytes) -> list[int] | list[float]:
    """The list that was packed; ValueError if the bytes are damaged."""
    try:
        return np.frombuffer(zlib.decompress(blob[3:]), dtype=blob[:3].decode("ascii")).tolist()
    except (zlib.error, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"damaged token list of {len(blob)} bytes: {error}") from error


def content_hash(rollout: Rollout) -> str:
    """SHA-256 of task, tokens and loss mask: equal where the policy was asked and said the same.

    Rewards, log-probs and timings are left out, so that a regenerated rollout can be recognised.
    """
    digest = hashlib.sha256(rollout.task_id.encode("utf-8") + b"\0")
    for sequence in rollout.sequences:
        digest.update(np.asarray(sequence.tokens, dtype="<i8").tobytes())
        digest.update(np.asarray(sequence.loss_mask, dtype="<i8").tobytes())
    return digest.hexdigest()
