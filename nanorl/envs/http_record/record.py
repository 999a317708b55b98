"""`HttpRecord`: the recorded answers, in one SQLite file. One answer for each key, the first.

An answer is on the disk before any client sees it, so a process that is killed loses nothing that
somebody has read. Two processes may write to one file: the first answer wins, and both give it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
from pathlib import Path

from nanorl.envs.http_record.http_exchange import WebAnswer, WebRequest

FORMAT = 1
_APPLICATION = 0x6E687470  # "nhtp"
_TABLES = """
CREATE TABLE about (salt BLOB NOT NULL);
CREATE TABLE answers (
    key TEXT PRIMARY KEY, method TEXT NOT NULL, url TEXT NOT NULL, at TEXT NOT NULL,
    status INTEGER NOT NULL, reason TEXT NOT NULL, headers TEXT NOT NULL, body BLOB NOT NULL,
    digest TEXT NOT NULL
) WITHOUT ROWID;
"""


class DamagedRecordError(ValueError):
    """The file is not, or not any more, what was recorded."""


class HttpRecord:
    """The answers by their keys. `salt` goes into every key of this file."""

    def __init__(self, path: Path, *, must_exist: bool = False) -> None:
        """ValueError where there is no such file and `must_exist`; DamagedRecordError where it
        cannot be read as a record."""
        self.path = path
        if must_exist and not path.is_file():
            raise ValueError(
                f"--http.mode replay: there is no record {path}; name one: --http.store"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._database = sqlite3.connect(path, timeout=30.0, isolation_level=None)
            self.salt = self._open()
        except sqlite3.DatabaseError as error:
            raise self._damage(error) from error

    def get(self, key: str) -> WebAnswer | None:
        """The answer that was recorded, None without one. DamagedRecordError if it has changed
        since."""
        try:
            row = self._database.execute(
                "SELECT status, reason, headers, CAST(body AS BLOB), digest FROM answers "
                "WHERE key = ?",
                (key,),
            ).fetchone()
        except sqlite3.DatabaseError as error:
            raise self._damage(error) from error
        if row is None:
            return None
        status, reason, headers, body, digest = row
        if _digest(status, headers, body) != digest:
            raise self._damage("an answer is not what was written")
        pairs = tuple((name, value) for name, value in json.loads(headers))
        return WebAnswer(status=status, reason=reason, headers=pairs, body=body)

    def put(self, key: str, request: WebRequest, answer: WebAnswer) -> WebAnswer:
        """Record an answer, to the disk; returns the one that counts, which is the first."""
        headers = json.dumps(answer.headers)
        digest = _digest(answer.status, headers, answer.body)
        row = (key, request.method, request.shown_url, answer.status, answer.reason, headers)
        try:
            self._database.execute(
                "INSERT OR IGNORE INTO answers (key, method, url, status, reason, headers, body, "
                "digest, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, datetime('now'))",
                (*row, answer.body, digest),
            )
        except sqlite3.OperationalError as error:
            raise OSError(f"{self.path}: an answer cannot be recorded: {error}") from error
        return self.get(key) or answer

    def close(self) -> None:
        self._database.close()

    def _open(self) -> bytes:
        execute = self._database.execute
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")
        execute("BEGIN IMMEDIATE")
        [[application]] = execute("PRAGMA application_id").fetchall()
        [[version]] = execute("PRAGMA user_version").fetchall()
        [[num_tables]] = execute("SELECT COUNT(*) FROM sqlite_master").fetchall()
        if not num_tables:
            for statement in _TABLES.split(";")[:-1]:
                execute(statement)
            execute("INSERT INTO about VALUES (?)", (secrets.token_bytes(16),))
            execute(f"PRAGMA application_id = {_APPLICATION}")
            execute(f"PRAGMA user_version = {FORMAT}")
        elif (application, version) != (_APPLICATION, FORMAT):
            raise sqlite3.DatabaseError(f"no record of format {FORMAT}")
        execute("COMMIT")
        [[state]] = execute("PRAGMA quick_check(1)").fetchall()
        if state != "ok":
            raise sqlite3.DatabaseError(state)
        [[salt]] = execute("SELECT salt FROM about").fetchall()
        return bytes(salt)

    def _damage(self, why: object) -> DamagedRecordError:
        return DamagedRecordError(
            f"{self.path} cannot be read as recorded answers ({why}); put the file back, or name "
            "another one: --http.store"
        )


def _digest(status: int, headers: str, body: bytes) -> str:
    return hashlib.sha256(b"%d\n%s\n" % (status, headers.encode()) + body).hexdigest()
