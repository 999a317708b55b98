"""Finished groups on the disk, until a checkpoint has learnt from them.

A run that is killed plays nothing again that had been played: what waited in the transfer queue,
and what was trained on since the last checkpoint, is read from here by the process that goes on
with it. It is a SQLite file of JSON rows, so a group is there whole or not at all; the last ones
may be missing after a power failure, which costs their time and nothing else.

Left out: what follows from a group and can be computed again (log-probs of a reference, values).
"""

from __future__ import annotations

import sqlite3
import threading
import zlib
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from nanorl.flow.group import FinishedGroup
from nanorl.unpacking import unzlib

SCHEMA = 'CREATE TABLE IF NOT EXISTS finished ("index" INTEGER PRIMARY KEY, body BLOB NOT NULL)'


class Journal:
    """The groups of one run by their index. Methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it. One that is damaged is begun anew: it only saves time."""
        self.path = path
        self._lock = threading.Lock()
        try:
            self._database = self._open()
        except sqlite3.DatabaseError:
            for file in path.parent.glob(f"{path.name}*"):
                file.unlink()
            self._database = self._open()

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=OFF")
            database.execute(SCHEMA)
            database.execute("SELECT count(*), sum(length(body)) FROM finished").fetchone()
        except sqlite3.DatabaseError:
            database.close()
            raise
        return database

    def put(self, group: FinishedGroup) -> None:
        """Keep a group; one of the same index is replaced."""
        body = zlib.compress(group.to_text().encode(), 1)
        with self._lock:
            self._database.execute(
                "INSERT OR REPLACE INTO finished VALUES (?, ?)", (group.index, body)
            )

    def groups(self) -> list[FinishedGroup]:
        """All of them by index."""
        with self._lock, closing(self._database.cursor()) as cursor:
            rows = cursor.execute('SELECT body FROM finished ORDER BY "index"').fetchall()
        return [FinishedGroup.from_text(unzlib(body)) for (body,) in rows]

    def indices(self) -> list[int]:
        with self._lock:
            return [row[0] for row in self._database.execute('SELECT "index" FROM finished')]

    def forget(self, indices: Iterable[int]) -> None:
        with self._lock:
            self._database.executemany(
                'DELETE FROM finished WHERE "index" = ?', [(index,) for index in indices]
            )

    def forget_all(self) -> None:
        with self._lock:
            self._database.execute("DELETE FROM finished")

    def close(self) -> None:
        with self._lock:
            self._database.close()
