"""Store files that somebody else has made: bombs, views, triggers, addresses and names that lead
elsewhere. Each is one error that names the row or the file; nothing is run, filled or removed."""

from __future__ import annotations

import json
import sqlite3
import zlib
from pathlib import Path

import numpy as np
import pytest
import zstandard

from nanorl.observability.store import RolloutStore, StoreError, open_for_reading
from nanorl.observability.store.blobs import BlobFolder
from nanorl.observability.store.rows import NUM_LENGTH_BYTES
from nanorl.types import Rollout, TokenStats
from nanorl.unpacking import MOST_BYTES, unzlib, unzstd


def make_store(path: Path) -> Path:
    rollout = Rollout(
        task_id="task",
        group_id="group",
        rollout_id="the-row",
        tokens=[1, 2],
        loss_mask=[0, 1],
        logps=[0.0, -1.0],
        versions=[-1, 0],
        reward=1.0,
    )
    with RolloutStore(path) as store:
        store.add_group([rollout], step=0)
        store.add_token_stats({"the-row": TokenStats(values={"advantage": [[0.0, 1.0]]})})
    return path


def change(path: Path, sql: str, *values: object) -> None:
    db = sqlite3.connect(path)
    db.execute(sql, values)
    db.commit()
    db.close()


def bomb(num_bytes: int) -> bytes:
    return zstandard.compress(bytes(num_bytes))


def test_a_bomb_is_refused_by_the_size_that_it_says(tmp_path: Path) -> None:
    content = bomb(MOST_BYTES + 1)
    assert len(content) < MOST_BYTES / 1000
    path = make_store(tmp_path / "rollouts.sqlite")
    change(path, "UPDATE contents SET content = ?", content)
    change(path, "UPDATE token_stats SET content = ?", content)
    with open_for_reading(path) as store:
        with pytest.raises(StoreError, match=r"rollout 'the-row'.* MiB"):
            store.get("the-row")
        with pytest.raises(StoreError, match=r"rollout 'the-row'.* MiB"):
            store.token_stats("the-row")


def test_a_bomb_that_says_no_size_or_another_is_refused_too() -> None:
    stream = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    unsaid = stream.compress(bytes(MOST_BYTES + 1)) + stream.flush()
    with pytest.raises(ValueError, match="MiB"):
        unzstd(unsaid)
    liar = bytearray(bomb(4000))
    said = zstandard.get_frame_parameters(bytes(liar)).content_size
    assert said == 4000
    place = bytes(liar).index((4000 - 256).to_bytes(2, "little"))
    liar[place : place + 2] = (300 - 256).to_bytes(2, "little")
    assert zstandard.get_frame_parameters(bytes(liar)).content_size == 300
    with pytest.raises(ValueError):
        unzstd(bytes(liar))
    assert unzstd(zstandard.compress(b"x" * 5000)) == b"x" * 5000


def test_a_bomb_of_an_earlier_schema_is_refused() -> None:
    for num_bytes in (MOST_BYTES + 1, 5 * MOST_BYTES):
        with pytest.raises(ValueError, match="MiB"):
            unzlib(zlib.compress(bytes(num_bytes), 9))
    assert unzlib(zlib.compress(b"x" * 5000)) == b"x" * 5000


HEADERS = {
    "deep": b"[" * 100_000,
    "objects": b'{"sequences": [{"num": -1, "dtypes": ["|O", "|O", "|O", "|O"], "spans": []}]}',
    "huge": b'{"sequences": [{"num": 1e9, "dtypes": ["<f8", "<f8", "<f8", "<f8"], "spans": []}]}',
    "empty": b'{"sequences": []}',
    "another type": b'{"sequences": {}}',
    "a list": b"[]",
    "bytes": b"\xff",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_of_anything_is_one_error_that_names_the_row(tmp_path: Path, kind: str) -> None:
    header = HEADERS[kind]
    path = make_store(tmp_path / "rollouts.sqlite")
    length = len(header).to_bytes(NUM_LENGTH_BYTES, "little")
    content = zstandard.compress(length + header + np.zeros(64).tobytes())
    change(path, "UPDATE contents SET content = ?", content)
    change(path, "UPDATE token_stats SET content = ?", content)
    with open_for_reading(path) as store:
        with pytest.raises(StoreError, match="rollout 'the-row'"):
            store.get("the-row")
        with pytest.raises(StoreError, match="rollout 'the-row'"):
            store.token_stats("the-row")


FOREIGN = {
    "view": "CREATE VIEW more AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) "
    "SELECT x FROM n",
    "trigger": "CREATE TRIGGER t AFTER INSERT ON rollouts BEGIN DELETE FROM contents; END",
    "virtual table": "CREATE VIRTUAL TABLE v USING fts5(x)",
}


@pytest.mark.parametrize("is_read_only", [True, False])
@pytest.mark.parametrize("kind", FOREIGN)
def test_what_no_store_has_is_refused(tmp_path: Path, kind: str, is_read_only: bool) -> None:
    path = make_store(tmp_path / "rollouts.sqlite")
    change(path, FOREIGN[kind])
    with pytest.raises(StoreError, match=f"has a {kind}, which no store has"):
        RolloutStore(path, is_read_only=is_read_only)


def test_a_table_that_is_a_view_is_refused_before_it_is_asked(tmp_path: Path) -> None:
    path = make_store(tmp_path / "rollouts.sqlite")
    change(path, "ALTER TABLE rollouts RENAME TO hidden")
    endless = FOREIGN["view"].replace(" more ", " rollouts ")
    change(path, endless)
    with pytest.raises(StoreError, match="has a view"):
        open_for_reading(path)


def test_a_reader_can_change_nothing_and_believes_no_schema(tmp_path: Path) -> None:
    path = make_store(tmp_path / "rollouts.sqlite")
    with open_for_reading(path) as store:
        database = store._db
        assert database.query("PRAGMA query_only") == [(1,)]  # type: ignore[attr-defined]
        assert database.query("PRAGMA trusted_schema") == [(0,)]  # type: ignore[attr-defined]


def test_a_file_does_not_lead_its_reader_to_other_machines(tmp_path: Path) -> None:
    path = make_store(tmp_path / "rollouts.sqlite")
    sql = "INSERT INTO facts (name, value) VALUES (?, ?)"
    change(path, sql, "store/owner", json.dumps("0" * 32))
    change(path, sql, "store/blobs", json.dumps("http://127.0.0.1:1/blobs"))
    with pytest.raises(StoreError, match=r"127.0.0.1:1/blobs.*\?blobs="):
        open_for_reading(path)


def test_a_file_that_is_no_store_is_not_made_one_by_looking(tmp_path: Path) -> None:
    """Nor one that a link in a run's folder leads to."""
    theirs, link = tmp_path / "theirs.sqlite", tmp_path / "rollouts.sqlite"
    for version in (0, 1):
        change(theirs, f"CREATE TABLE IF NOT EXISTS mine{version} (x)")
        change(theirs, f"PRAGMA user_version = {version}")
        if version:
            link.symlink_to(theirs)
        before = theirs.read_bytes()
        with pytest.raises(StoreError):
            open_for_reading(link if version else theirs)
        assert theirs.read_bytes() == before


def test_names_in_a_file_remove_and_read_nothing_elsewhere(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("all that I have")
    (tmp_path / "blobs" / ("0" * 32) / "no").mkdir(parents=True)
    notes = tmp_path / "blobs" / ("0" * 32) / "no" / "notes.txt"
    notes.write_text("mine")
    folder = BlobFolder(str(tmp_path / "blobs"), "0" * 32)
    for name in ("../../precious", f"x/../../../../{precious}", "", "no", "notes.txt"):
        with pytest.raises(StoreError, match="is no blob's name"):
            folder.remove(name)
        with pytest.raises(StoreError, match="is no blob's name"):
            folder.get(name)
    assert folder.sweep([]) == 0
    assert precious.read_text() == "all that I have" and notes.read_text() == "mine"
    for owner in ("..", "../precious", "", "a/b", "/etc"):
        with pytest.raises(StoreError, match="owner"):
            BlobFolder(str(tmp_path), owner)
