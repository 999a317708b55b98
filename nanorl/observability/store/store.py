"""`RolloutStore`: every rollout of a run, each `rollout_id` exactly once.

The same store lies in a SQLite file or in a PostgreSQL database (store_address.py); large
contents may lie elsewhere (blobs.py). A rollout that is generated again after a resume replaces the
earlier one.
Beside the rollouts lie the tasks that they tried, whole, so that a rollout can be read and played
again when the file of the tasks is gone; numbers about their tokens, which the trainer knows only
after its step; and small facts of the run as JSON.
Next: database.py (the tables), rows.py (a rollout as rows), filter.py (slices), expiry.py.
Left out: several writers (others may read while one writes).
"""

from __future__ import annotations

import json
import math
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nanorl.observability.monitor.vitals import vitals
from nanorl.observability.store.blobs import BlobFolder, is_local
from nanorl.observability.store.database import (
    SCHEMA_VERSION,
    STEP_SHIFT,
    Clause,
    Database,
    EmptyStoreError,
    OldSchemaError,
    StoreError,
    among,
    in_parts,
)
from nanorl.observability.store.expiry import (
    count_expired,
    least_valuable,
    older_days,
    older_steps,
    worths,
)
from nanorl.observability.store.filter import EVERY, Filter
from nanorl.observability.store.listing import NEWEST, Tally, count_outcomes, find_page
from nanorl.observability.store.migration import migrate
from nanorl.observability.store.rows import (
    ENTRY_COLUMNS,
    Entry,
    Filed,
    Rows,
    from_content,
    insert_rows,
    pack_stats,
    to_entry,
    to_rows,
    unpack_stats,
)
from nanorl.observability.store.sqlite import SqliteDatabase
from nanorl.observability.store.stats import Duplicates, StoreStats, find_duplicates, read_stats
from nanorl.options.store_address import StoreAddress
from nanorl.task import Task
from nanorl.types import Rollout, Status, TokenStats, kind_of

T = TypeVar("T")
ENTRY = ", ".join(f"r.{name}" for name in ENTRY_COLUMNS)
WEIGHTS = "weights/"
"""Facts of a version of the weights, made by the step before it."""
OWNER = "store/owner"
"""The fact that names this store's folder of blobs."""
BLOBS = "store/blobs"
"""The fact that says where they are."""


class RolloutStore:
    """The rollouts of one run, written in groups and read by their index columns.

        with RolloutStore("runs/tiny-seed0/rollouts.sqlite") as store:
            failed = store.entries(where=Filter.parse("turn=2, failed"), limit=10)
            rollout = store.get(failed[0].rollout_id)
            same_task = store.query(task_id=rollout.task_id)

    `step` is the training step that a rollout belongs to, `version` the policy that began it.
    Rollouts come in the order of their steps; in a step, in the order in which they were stored,
    those of one `add_group` by group_id and rollout_id.
    May be used from several threads of one process. All errors of file or server are StoreError.
    """

    def __init__(
        self, address: str | Path, *, lock_timeout_s: float = 10.0, is_read_only: bool = False
    ) -> None:
        """With `is_read_only` nothing is written: StoreError where there is no store, and
        OldSchemaError for one of an earlier version, whose tables would have to change."""
        where = StoreAddress.parse(address)
        self._kinds: dict[str, str] = {}  # of tasks, as far as they were asked for
        self._db = _open(where, lock_timeout_s, is_read_only=is_read_only)
        try:
            self._prepare(is_read_only=is_read_only)
            self._blobs = self._open_blobs(where, is_read_only=is_read_only)
        except BaseException:  # whatever fails, the connection is nobody's yet
            self._db.close()
            raise
        self._blob_bytes = where.blob_bytes
        self._lock = threading.RLock()

    def _prepare(self, *, is_read_only: bool) -> None:
        found = self._db.read(self._db.schema_version)
        if found > SCHEMA_VERSION:
            raise StoreError(
                f"{self._db.name}: rollouts of schema {found}, this program reads schemas up to "
                f"{SCHEMA_VERSION}: move it away, or use another --out"
            )
        if is_read_only and found == 0:
            raise EmptyStoreError(f"{self._db.name}: holds no rollouts: is that a store?")
        if is_read_only and found < SCHEMA_VERSION:
            raise OldSchemaError(
                f"{self._db.name}: rollouts of schema {found}, this program reads "
                f"{SCHEMA_VERSION}: open it once to write, as nanorl store does"
            )
        if found == 0:
            self._db.write("create", self._create)
        elif found < SCHEMA_VERSION:
            self._db.write("bring to the new schema", lambda: migrate(self._db, found))

    def _create(self) -> None:
        if self._db.schema_version() == 0:  # still: another process may have come first
            self._db.create_tables()

    def _open_blobs(self, where: StoreAddress, *, is_read_only: bool) -> BlobFolder | None:
        facts = self.facts("store/")
        address = where.blobs or str(facts.get(BLOBS, ""))
        if not address:
            return None
        if not (where.blobs or is_local(address)):  # the file may be somebody else's
            raise StoreError(
                f"{self._db.name}: says that its contents lie at {address}: if you know that "
                f"place, name the store as sqlite:///FILE?blobs={address}"
            )
        owner = str(facts.get(OWNER) or uuid.uuid4().hex)
        folder = BlobFolder(address, owner)
        if facts != {BLOBS: address, OWNER: owner} and not is_read_only:
            self.put_fact(OWNER, owner)
            self.put_fact(BLOBS, address)
        return folder

    # -- writing -----------------------------------------------------------------------------------

    def add_group(
        self, rollouts: Sequence[Rollout], *, step: int, version: int | None = None
    ) -> None:
        """Store all of them or, whatever happens, none. On return they are on the disk.

        A rollout of the same `rollout_id` is replaced. Without `version` each rollout is filed
        under the version that began it. One call for a thousand of them is far quicker than a
        thousand calls.
        """
        ids = [rollout.rollout_id for rollout in rollouts]
        if len(set(ids)) != len(ids):
            double = next(rollout_id for rollout_id in ids if ids.count(rollout_id) > 1)
            raise ValueError(
                f"rollout_id {double!r} occurs twice in one group: ids must be unique in a run"
            )
        ranks, kinds = worths(rollouts), self._kinds_of({one.task_id for one in rollouts})
        ordered = sorted(rollouts, key=lambda one: (one.group_id, one.rollout_id))
        filed = [Filed(step, version, kinds[one.task_id], ranks[one.rollout_id]) for one in ordered]
        rows = to_rows(ordered, filed)
        with self._lock:  # no blob goes between its writing and its row's
            places = [self._place(one.content) for one in rows]
            self._changing(
                f"store rollouts of step {step} in", lambda: self._replace(ids, step, rows, places)
            )

    def _place(self, content: bytes) -> str | None:
        """The name of the blob that it is put into; None where it belongs into the row."""
        if self._blobs is None or len(content) < self._blob_bytes:
            return None
        return self._blobs.put(content)

    def _replace(
        self, ids: Sequence[str], step: int, rows: Sequence[Rows], places: Sequence[str | None]
    ) -> list[str]:
        """The names of the blobs that were in the rows before."""
        dropped = self._delete_all(self._numbers(ids).values())
        low, high = step << STEP_SHIFT, (step + 1) << STEP_SHIFT
        sql = "SELECT max(id) FROM rollouts WHERE id >= ? AND id < ?"
        last = self._db.query(sql, (low, high))[0][0]
        first = low if last is None else last + 1
        insert_rows(self._db, first, rows, places)
        return dropped

    def _numbers(self, rollout_ids: Sequence[str]) -> dict[str, int]:
        """The `id` of each rollout that is there."""
        found: dict[str, int] = {}
        for part in in_parts(rollout_ids):
            where, values = among("rollout_id", part)
            sql = f"SELECT rollout_id, id FROM rollouts WHERE {where}"
            found.update(dict(self._db.query(sql, values)))
        return found

    def add_tasks(self, tasks: Sequence[Task]) -> None:
        """Store tasks, whole; one whose id is there stays as it is."""
        new = {task.task_id: task for task in tasks if task.task_id not in self._kinds}
        if not new:
            return
        sql = "INSERT INTO tasks VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
        rows = [(t.task_id, t.kind, json.dumps(t.to_json())) for t in new.values()]
        self._db.write("store tasks in", lambda: [self._db.run(sql, row) for row in rows])
        self._kinds |= {task.task_id: task.kind for task in new.values()}

    def add_token_stats(self, stats: Mapping[str, TokenStats]) -> None:
        """Store numbers about the tokens of rollouts that are there, by their ids; earlier ones are
        replaced."""
        if not stats:
            return
        packed = {rollout_id: pack_stats(one) for rollout_id, one in stats.items()}

        def put() -> None:
            numbers = self._numbers(list(packed))
            for part in in_parts(list(numbers.values())):
                where, values = among("id", part)
                self._db.run(f"DELETE FROM token_stats WHERE {where}", values)
            rows = ((number, packed[rollout_id]) for rollout_id, number in numbers.items())
            self._db.insert("token_stats", ("id", "content"), rows)

        self._db.write("store numbers of tokens in", put)

    def put_fact(self, name: str, value: Any) -> None:
        """Store something small about the run as JSON, such as what it ran on."""
        sql = (
            "INSERT INTO facts VALUES (?, ?) "
            "ON CONFLICT (name) DO UPDATE SET value = excluded.value"
        )
        text = json.dumps(value)
        self._db.write("store a fact in", lambda: self._db.run(sql, (name, text)))

    # -- reading -----------------------------------------------------------------------------------

    def get(self, rollout_id: str) -> Rollout:
        """The rollout of this id; KeyError if there is none."""
        found = self._rollouts(Filter.of(rollout=rollout_id), limit=1)
        if not found:
            raise KeyError(f"no rollout {rollout_id!r} in {self._db.name}")
        return found[0]

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
        """The rollouts that match every filter given, whole, in their order."""
        where = Filter.of(
            task=task_id,
            group=group_id,
            step=step,
            version=version,
            hash=content_hash,
            status=None if status is None else status.value,
        )
        return self._rollouts(where, limit)

    def entries(
        self,
        *,
        step: int | None = None,
        where: Filter = EVERY,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> list[Entry]:
        """The index columns of a slice or of all, without the tokens, in their order."""
        chosen = where & Filter.of(step=step)
        rows = self._select(ENTRY, chosen, limit, newest_first=newest_first)
        return [to_entry(row) for row in rows]

    def page(
        self, where: Filter = EVERY, *, order: str = NEWEST, offset: int = 0, limit: int = 100
    ) -> tuple[list[Entry], int]:
        """A part of a slice in an order of listing.ORDERS, and how long all of it is."""
        find = partial(find_page, self._db, where, order=order, offset=offset, limit=limit)
        return self._db.read(find)

    def entry(self, rollout_id: str) -> Entry:
        """The index columns of one rollout; KeyError if there is none."""
        found = self.entries(where=Filter.of(rollout=rollout_id), limit=1)
        if not found:
            raise KeyError(f"no rollout {rollout_id!r} in {self._db.name}")
        return found[0]

    def tally(self) -> list[Tally]:
        """Count what came of the rollouts, by step and kind."""
        return self._db.read(partial(count_outcomes, self._db))

    def steps(self) -> set[int]:
        """The steps whose rollouts were stored, also those that have expired since."""
        sql = "SELECT DISTINCT step FROM rollouts UNION SELECT step FROM expired"
        return {int(row[0]) for row in self._db.read(lambda: self._db.query(sql))}

    def count(self, where: Filter = EVERY) -> int:
        """Count the rollouts of a slice."""
        chosen = where.sql()
        sql = f"SELECT count(*) {chosen.source}"
        return int(self._db.read(lambda: self._db.query(sql, chosen.values))[0][0])

    def __len__(self) -> int:
        return self.count()

    def task(self, task_id: str) -> Task | None:
        """The task of this id, as it was when it was first played; None if it was not stored."""
        sql = "SELECT content FROM tasks WHERE task_id = ?"
        rows = self._db.read(lambda: self._db.query(sql, (task_id,)))
        return Task.from_json(json.loads(rows[0][0])) if rows else None

    def tasks(self) -> list[Task]:
        """All tasks that were stored, in the order of their ids."""
        sql = "SELECT content FROM tasks ORDER BY task_id"
        return [
            Task.from_json(json.loads(row[0])) for row in self._db.read(lambda: self._db.query(sql))
        ]

    def token_stats(self, rollout_id: str) -> TokenStats | None:
        """Numbers about the tokens of a rollout; None where no step was made of it."""
        sql = (
            "SELECT s.content FROM token_stats s JOIN rollouts r ON r.id = s.id "
            "WHERE r.rollout_id = ?"
        )
        rows = self._db.read(lambda: self._db.query(sql, (rollout_id,)))
        return self._undamaged(rollout_id, lambda: unpack_stats(rows[0][0])) if rows else None

    def facts(self, prefix: str = "") -> dict[str, Any]:
        """The facts whose names begin so, by name."""
        sql = "SELECT name, value FROM facts WHERE substr(name, 1, ?) = ? ORDER BY name"
        rows = self._db.read(lambda: self._db.query(sql, (len(prefix), prefix)))
        return {name: json.loads(value) for name, value in rows}

    def duplicates(self, limit: int | None = None) -> list[Duplicates]:
        """Rollouts of one content hash, those that are there most often first."""
        return find_duplicates(self._db, limit)

    def stats(self) -> StoreStats:
        """Count what the store holds."""
        return read_stats(self._db)

    # -- forgetting --------------------------------------------------------------------------------

    def delete_from_step(self, step: int) -> int:
        """Forget the rollouts of `step` and later, which a resume regenerates, with their numbers
        and the facts weights/N of those steps; how many rollouts."""
        first = step << STEP_SHIFT

        def forget() -> list[str]:
            self._db.run("DELETE FROM expired WHERE step >= ?", (step,))
            for name in self.facts(WEIGHTS):
                if int(name.removeprefix(WEIGHTS)) > step:
                    self._db.run("DELETE FROM facts WHERE name = ?", (name,))
            return self._delete("id >= ?", (first,))

        num_before = len(self)
        with self._lock:
            self._changing("delete from", forget)
        return num_before - len(self)

    def expire(
        self,
        keep_steps: int | None = None,
        *,
        days: float | None = None,
        max_bytes: int | None = None,
    ) -> int:
        """Drop the rollouts that are not of the newest `keep_steps` steps, were stored more than
        `days` ago, or have least value while all take up more than `max_bytes`; their number.

        `stats` goes on counting them. The file shrinks by the pages that became free. The newest
        step stays, whatever it takes up. What has value: expiry.py.
        """
        limits = {"keep_steps": keep_steps, "days": days, "max_bytes": max_bytes}
        for name, limit in limits.items():
            least = 0 if name == "days" else 1
            if limit is not None and not (limit > 0 and least <= limit < math.inf):
                raise ValueError(f"{name}={limit}: give a number above 0, or leave it out")
        num_before = len(self)
        with self._lock:
            if keep_steps is not None:
                self._changing(
                    "delete from", lambda: self._expire(older_steps(self._db, keep_steps))
                )
            if days is not None:
                self._changing("delete from", lambda: self._expire(older_days(days)))
            if max_bytes is not None:
                self._changing("delete from", lambda: self._expire_to(max_bytes))
        num_dropped = num_before - len(self)
        if num_dropped:
            self._db.vacuum()
        return num_dropped

    def vacuum(self) -> int:
        """Hand free space back to the disk, and remove blobs that no row names (a process died
        between the two); the number of these."""
        self._db.vacuum()
        if self._blobs is None:
            return 0
        with self._lock:
            return self._blobs.sweep(set(self._places("place IS NOT NULL", ())))

    def _expire(self, chosen: Clause) -> list[str]:
        count_expired(self._db, *chosen)
        return self._delete(*chosen)

    def _expire_to(self, max_bytes: int) -> list[str]:
        dropped: list[str] = []
        for part in in_parts(least_valuable(self._db, max_bytes)):
            dropped += self._expire(among("id", part))
        return dropped

    def _changing(self, action: str, work: Callable[[], list[str]]) -> None:
        """Do `work` in a transaction; the blobs that it names go after it."""
        dropped = self._db.write(action, work)
        if self._blobs is None or not dropped:
            return
        for part in in_parts(dropped):
            named = set(self._places(*among("place", part)))  # by other rows
            for name in set(part) - named:
                self._blobs.remove(name)

    def _delete_all(self, numbers: Iterable[int]) -> list[str]:
        parts = in_parts(list(numbers))
        return [name for part in parts for name in self._delete(*among("id", part))]

    def _delete(self, where: str, values: Sequence[Any]) -> list[str]:
        """Rows of rollouts; the names of their blobs. `where` is said of `id` and other columns of
        rollouts."""
        chosen = f"id IN (SELECT id FROM rollouts WHERE {where})"
        sql = f"SELECT place FROM contents WHERE place IS NOT NULL AND {chosen}"
        names = [] if self._blobs is None else [row[0] for row in self._db.query(sql, values)]
        for table in ("contents", "turns", "token_stats"):
            self._db.run(f"DELETE FROM {table} WHERE {chosen}", values)
        self._db.run(f"DELETE FROM rollouts WHERE {where}", values)
        return names

    def _places(self, where: str, values: Sequence[Any]) -> list[str]:
        sql = f"SELECT DISTINCT place FROM contents WHERE {where}"
        return [row[0] for row in self._db.read(lambda: self._db.query(sql, values))]

    # -- the process -------------------------------------------------------------------------------

    def heartbeat(self) -> dict[str, Any]:
        """Says which process this is, and how many rollouts it holds: read from the file, so the
        answer says that it works."""
        return {**vitals(), "num_rollouts": float(len(self))}

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> RolloutStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _kinds_of(self, task_ids: set[str]) -> dict[str, str]:
        """The types of tasks: as they are stored, or what their ids say."""
        for part in in_parts(list(task_ids - self._kinds.keys())):
            where, values = among("task_id", part)
            sql = f"SELECT task_id, kind FROM tasks WHERE {where}"
            self._kinds |= dict(self._db.read(partial(self._db.query, sql, values)))
        known = self._kinds
        return {one: known[one] if one in known else kind_of(one) for one in task_ids}

    def _select(
        self, columns: str, where: Filter, limit: int | None, *, newest_first: bool = False
    ) -> list[tuple[Any, ...]]:
        source, values, number = where.sql()
        sql = f"SELECT {columns} {source} ORDER BY {number}{' DESC' if newest_first else ''}"
        if limit is not None:
            sql, values = f"{sql} LIMIT ?", [*values, limit]
        return self._db.read(lambda: self._db.query(sql, values))

    def _rollouts(self, where: Filter, limit: int | None) -> list[Rollout]:
        # A subquery, not a join with `contents`, which would tempt a database to begin there.
        columns = (
            f"{ENTRY}, (SELECT content FROM contents c WHERE c.id = r.id), "
            "(SELECT place FROM contents c WHERE c.id = r.id)"
        )
        return [self._to_rollout(row) for row in self._select(columns, where, limit)]

    def _to_rollout(self, row: tuple[Any, ...]) -> Rollout:
        *columns, content, place = row
        entry = to_entry(tuple(columns))
        if place is not None:
            assert self._blobs is not None, "a store with blobs knows where they are"
            content = self._blobs.get(place)
        return self._undamaged(entry.rollout_id, lambda: from_content(entry, content))

    def _undamaged(self, rollout_id: str, read: Callable[[], T]) -> T:
        try:
            return read()
        except ValueError as error:
            raise StoreError(
                f"{self._db.name}: rollout {rollout_id!r}: {error}; it is damaged: move it away; "
                "the run can go on without it"
            ) from error


def open_for_reading(address: str | Path) -> RolloutStore:
    """The store, for reading alone: WAL lets a reader and the writer go on beside each other, and
    every question is one short transaction, so that the writer's checkpoints are not held up. One
    that an earlier version of this program wrote is brought to today's tables first. StoreError
    where it is not there, or damaged, or would have to be brought to today's tables and is a link:
    what it leads to may be no store at all."""
    try:
        return RolloutStore(address, is_read_only=True)
    except OldSchemaError:
        if Path(address).is_symlink():
            raise
        RolloutStore(address).close()
        return RolloutStore(address, is_read_only=True)


def _open(where: StoreAddress, lock_timeout_s: float, *, is_read_only: bool) -> Database:
    if where.path is not None:
        return SqliteDatabase(where.path, lock_timeout_s=lock_timeout_s, is_read_only=is_read_only)
    from nanorl.observability.store.postgres import PostgresDatabase  # an extra

    return PostgresDatabase(where.server, schema=where.run, lock_timeout_s=lock_timeout_s)
