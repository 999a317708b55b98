"""Contents of rollouts at addresses of fsspec: where they lie, when they go, what a kill leaves;
and addresses of stores."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import fsspec
import pytest
from test_store import make_rollout

from nanorl.observability.store import RolloutStore, StoreError
from nanorl.observability.store.blobs import BlobFolder
from nanorl.options.run_config import RunConfig
from nanorl.options.store_address import StoreAddress
from nanorl.rollout_json import from_json, to_json
from nanorl.types import Rollout


def sqlite_at(path: Path, **options: object) -> str:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"sqlite://{path}?{query}"


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_contents_lie_at_the_address_and_rows_in_the_file(tmp_path):
    rollouts = [make_rollout(f"r{n}") for n in range(3)]
    with RolloutStore(sqlite_at(tmp_path / "r.sqlite", blobs=f"file://{tmp_path}/blobs")) as store:
        store.add_group(rollouts, step=0)
        assert store.query() == rollouts
    with RolloutStore(tmp_path / "r.sqlite") as store:  # the file knows where they are
        assert store.query() == rollouts
        assert store.stats().content_bytes == sum(
            f.stat().st_size for f in files(tmp_path / "blobs")
        )
    with sqlite3.connect(tmp_path / "r.sqlite") as db:
        rows = db.execute("SELECT content, place FROM contents").fetchall()
    db.close()
    assert [row[0] for row in rows] == [None] * 3
    assert {row[1] for row in rows} == {path.name for path in files(tmp_path / "blobs")}


def test_small_contents_stay_in_the_file(tmp_path):
    large = make_rollout("large", metrics={f"m{n}": n / 7 for n in range(2_000)})
    address = sqlite_at(tmp_path / "r.sqlite", blobs=f"{tmp_path}/blobs", blob_bytes=4_000)
    with RolloutStore(address) as store:
        store.add_group([make_rollout("small"), large], step=0)
        assert store.get("large") == large
        assert store.get("small") == make_rollout("small")
    assert len(files(tmp_path / "blobs")) == 1


def same(name: str) -> Rollout:
    """As another of another name: the ids are no part of the content."""
    return from_json(to_json(make_rollout("same")) | {"rollout_id": name})


def test_equal_contents_are_one_blob_which_goes_with_the_last_of_them(tmp_path):
    with RolloutStore(sqlite_at(tmp_path / "r.sqlite", blobs=f"{tmp_path}/blobs")) as store:
        store.add_group([same("a"), same("b")], step=0)
        store.add_group([same("c")], step=1)
        assert len(files(tmp_path / "blobs")) == 1
        assert store.delete_from_step(1) == 1 and store.get("b").tokens == same("b").tokens
        store.add_group([same("a"), same("b")], step=0)  # stored again
        assert len(files(tmp_path / "blobs")) == 1
        other = make_rollout("a", seed=9)
        store.add_group([other], step=0)
        assert len(files(tmp_path / "blobs")) == 2
        assert store.delete_from_step(0) == 2
        assert files(tmp_path / "blobs") == []


def test_stores_that_share_an_address_do_not_meet(tmp_path):
    names = ("one", "two")
    addresses = [sqlite_at(tmp_path / f"{n}.sqlite", blobs=f"{tmp_path}/blobs") for n in names]
    with RolloutStore(addresses[0]) as one, RolloutStore(addresses[1]) as two:
        for store in (one, two):
            store.add_group([same("a")], step=0)
        one.delete_from_step(0)
        one.vacuum()
        assert two.get("a") == same("a")


def test_a_filesystem_in_memory_will_do(tmp_path):
    with RolloutStore(sqlite_at(tmp_path / "r.sqlite", blobs="memory://store-test")) as store:
        store.add_group([make_rollout("a")], step=0)
        assert store.get("a") == make_rollout("a")
        assert len(fsspec.filesystem("memory").find("/store-test")) == 1


KILLED = """
    import os, signal, sys
    sys.path[:0] = {paths!r}
    from nanorl.observability.store import RolloutStore
    from nanorl.observability.store.sqlite import SqliteDatabase
    from test_store import make_rollout
    store = RolloutStore({address!r})
    store.add_group([make_rollout("a")], step=0)
    SqliteDatabase.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    store.add_group([make_rollout("b")], step=1)
"""


def test_a_kill_between_blob_and_row_leaves_a_blob_that_a_sweep_removes(tmp_path):
    address = sqlite_at(tmp_path / "r.sqlite", blobs=f"{tmp_path}/blobs")
    paths = [os.getcwd(), os.path.dirname(__file__)]
    code = textwrap.dedent(KILLED.format(paths=paths, address=address))
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert len(files(tmp_path / "blobs")) == 2
    with RolloutStore(address) as store:
        assert [entry.rollout_id for entry in store.entries()] == ["a"]
        assert store.get("a") == make_rollout("a")
        assert store.vacuum() == 1 and store.vacuum() == 0
        assert len(files(tmp_path / "blobs")) == 1
        store.add_group([make_rollout("b")], step=1)
        assert store.get("b") == make_rollout("b")


def test_lost_and_damaged_blobs_are_one_clear_error(tmp_path):
    with RolloutStore(sqlite_at(tmp_path / "r.sqlite", blobs=f"{tmp_path}/blobs")) as store:
        store.add_group([make_rollout("a")], step=0)
        [file] = files(tmp_path / "blobs")
        file.write_bytes(b"other")
        with pytest.raises(StoreError, match=f"the blob {file.name} at .*blobs is damaged"):
            store.get("a")
        file.unlink()
        with pytest.raises(StoreError, match=f"cannot read the blob {file.name} at .*go on with"):
            store.get("a")
        assert len(store.entries()) == 1  # the index is whole


def test_an_unknown_address_of_blobs_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"blobs=nowhere://x: Protocol not known"):
        BlobFolder("nowhere://x", "owner")


def test_addresses_are_taken_apart():
    at = StoreAddress.parse
    assert at("runs/x?/r.sqlite").path == Path("runs/x?/r.sqlite")
    both = at("sqlite:///data/r.sqlite?blobs=s3://bucket/x&blob_bytes=65536")
    assert both == StoreAddress(
        path=Path("/data/r.sqlite"), blobs="s3://bucket/x", blob_bytes=65536
    )
    server = at("postgresql://me@host:5433/db?sslmode=require&run=tiny-seed0")
    assert server == StoreAddress(
        server="postgresql://me@host:5433/db?sslmode=require", run="tiny-seed0"
    )


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("mysql://host/db", "a store is a file, sqlite:///FILE or postgresql://SERVER"),
        ("postgresql://host/db", r"say which run it is, \?run=NAME"),
        ("postgresql://host/db?run=a/b", r"say which run it is, \?run=NAME"),
        ("sqlite://host/r.sqlite", "write sqlite:///FOLDER/FILE"),
        ("sqlite:///r.sqlite?blobs=s3://x&blob_bytes=many", "blob_bytes=many: a number of bytes"),
        ("postgresql://me:hunter2@host/db?run=x", r"me:\*\*\*@host/db.*holds a password"),
    ],
)
def test_a_wrong_address_is_refused_before_the_run_begins(address, why):
    with pytest.raises(ValueError, match=why):
        RunConfig(store=address)
