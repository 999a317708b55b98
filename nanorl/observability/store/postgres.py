"""PostgreSQL: many runs in one database, each in a schema of its own, so that they never meet.

Writers of one run wait for each other (an advisory lock); a connection that is lost, as when the
server is started again, is made anew for up to RECONNECT_S seconds, and the transaction is done
again: storing a group replaces it by itself. Rows are inserted with COPY.
Needs psycopg 3, the extra `postgres`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from nanoengine.extras import missing
from nanorl.observability.store.database import INDEXES, SCHEMA_VERSION, TABLES, StoreError
from nanorl.options.store_address import without_password

try:
    import psycopg
    from psycopg import sql
except ModuleNotFoundError:
    raise missing("--store postgresql://...", "psycopg", extra="postgres") from None

T = TypeVar("T")

RECONNECT_S = 30.0
PAUSE_S = 0.5
TYPES = {"id": "BIGINT", "blob": "BYTEA", "clustered": ""}
VERSION_TABLE = "CREATE TABLE store_schema (version BIGINT NOT NULL)"

# SQLSTATE or its class (https://www.postgresql.org/docs/current/errcodes-appendix.html).
_REMEDIES = {
    "28": "it refuses this user: set PGPASSWORD or ~/.pgpass, and check the server's pg_hba.conf",
    "3D": "there is no such database: create it (createdb)",
    "42501": "the user may not do that: GRANT CREATE ON DATABASE",
    "53": "the server has no room left (disk, memory or connections): make some, then go on with "
    "--resume",
    "55": "another process is writing to this run's schema: stop that run, or use another run=NAME",
}
_UNREACHABLE = "it does not answer: start the server, then go on with --resume"


class PostgresDatabase:
    """A schema of a PostgreSQL database as a `Database`. May be used from several threads of one
    process, one after the other."""

    def __init__(
        self,
        server: str,
        *,
        schema: str,
        lock_timeout_s: float = 10.0,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        self.name = f"{without_password(server)} (run {schema})"
        self._server, self._schema, self._reconnect_s = server, schema, reconnect_s
        self._lock_timeout_s = lock_timeout_s
        self._lock = threading.RLock()
        self._depth = 0  # of calls of `read` and `write` in each other
        try:
            self._db = self._connect()
        except psycopg.Error as error:
            raise self._error("open", error) from error

    def write(self, action: str, work: Callable[[], T]) -> T:
        def locked() -> T:
            self._db.execute(
                "SELECT pg_advisory_xact_lock(hashtext(%s))", (f"nanorl/{self._schema}",)
            )
            return work()

        return self._in_transaction(action, locked)

    def read(self, work: Callable[[], T]) -> T:
        return self._in_transaction("read", work)

    def _in_transaction(self, action: str, work: Callable[[], T]) -> T:
        with self._lock:
            if self._depth:  # part of a transaction
                return work()
            self._depth += 1
            try:
                return self._until_it_answers(work)
            except psycopg.Error as error:
                raise self._error(action, error) from error
            finally:
                self._depth -= 1

    def _until_it_answers(self, work: Callable[[], T]) -> T:
        end = time.monotonic() + self._reconnect_s
        while True:
            try:
                if self._db.closed:
                    self._db = self._connect()
                with self._db.transaction():
                    return work()
            except psycopg.OperationalError as error:
                is_lost = self._db.closed or error.sqlstate is None
                if not is_lost or time.monotonic() > end:
                    raise
                self._db.close()
                time.sleep(PAUSE_S)

    def _connect(self) -> psycopg.Connection[Any]:
        db = psycopg.connect(self._server, autocommit=True)
        name = sql.Identifier(self._schema)
        with db.transaction():
            # Two processes that create it at the same time would both fail.
            db.execute("SELECT pg_advisory_xact_lock(hashtext('nanorl'))")
            db.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
        db.execute(sql.SQL("SET search_path TO {}").format(name))
        db.execute(sql.SQL("SET lock_timeout TO {}").format(f"{self._lock_timeout_s * 1e3:.0f}ms"))
        return db

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._db.execute(_marked(sql), values).fetchall()

    def run(self, sql: str, values: Sequence[Any] = ()) -> int:
        return self._db.execute(_marked(sql), values).rowcount

    def insert(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        with (
            self._db.cursor() as cursor,
            cursor.copy(f"COPY {table} ({', '.join(columns)}) FROM STDIN") as copy,
        ):
            for row in rows:
                copy.write_row(row)

    def schema_version(self) -> int:
        # Not to_regclass: it may still believe what it saw before another process made the tables.
        there = "SELECT 1 FROM pg_tables WHERE schemaname = ? AND tablename = 'store_schema'"
        if not self.query(there, (self._schema,)):
            return 0
        return self.query("SELECT version FROM store_schema")[0][0]

    def create_tables(self) -> None:
        for statement in (VERSION_TABLE, *TABLES, *INDEXES):
            self.run(statement.format(**TYPES))
        self.run("INSERT INTO store_schema VALUES (?)", (SCHEMA_VERSION,))

    def used_bytes(self) -> int:
        found = self.query(
            "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n "
            "ON n.oid = c.relnamespace WHERE n.nspname = ? AND c.relkind = 'r'",
            (self._schema,),
        )
        return int(found[0][0] or 0)

    def vacuum(self) -> None:
        """Marks the space as free for new rows. The server hands it back to the disk at VACUUM
        FULL alone, which would lock everybody out."""
        with self._lock:
            try:
                for table in ("rollouts", "contents", "turns", "token_stats"):
                    self._db.execute(f"VACUUM {table}")
            except psycopg.Error as error:
                raise self._error("shrink", error) from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _error(self, action: str, error: psycopg.Error) -> StoreError:
        text = without_password(str(error)).strip().replace("\n", " ")
        state = error.sqlstate or ""
        remedy = _REMEDIES.get(state[:2]) or _REMEDIES.get(state)
        if remedy is None and isinstance(error, psycopg.OperationalError):
            remedy = _UNREACHABLE
        return StoreError(f"cannot {action} {self.name}: {remedy or 'check the server'} ({text})")


def _marked(statement: str) -> str:
    return statement.replace("?", "%s")
