"""Where a run's rollouts lie, and how much room they take up there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_store import make_rollout

from nanorl.observability.store import RolloutStore
from nanorl.options.store_address import TRAINING_FILE, training_store
from nanorl.options.trust import remember

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from postgres_server import PostgresServer, why_not

ELSEWHERE = "postgresql://somebody@host/database?run=one"


def test_the_runs_option_goes_before_its_folder_and_an_empty_folder_is_named(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="names what nobody has named on this machine"):
        training_store(tmp_path, ELSEWHERE)
    remember({"store": ELSEWHERE})
    assert training_store(tmp_path, ELSEWHERE) == ELSEWHERE
    with pytest.raises(ValueError, match=f"{tmp_path}: has no {TRAINING_FILE} yet"):
        training_store(tmp_path, "")
    (tmp_path / TRAINING_FILE).touch()
    assert training_store(tmp_path, "") == str(tmp_path / TRAINING_FILE)
    assert training_store(tmp_path, ELSEWHERE) == ELSEWHERE


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.xdist_group("postgres")
def test_a_run_in_a_database_takes_up_what_the_server_says_of_its_tables_alone() -> None:
    psycopg = pytest.importorskip("psycopg")
    with PostgresServer() as server, RolloutStore(f"{server.address}&run=one") as store:
        empty = store.stats().used_bytes
        with RolloutStore(f"{server.address}&run=other") as other:
            other.add_group([make_rollout(f"o{i}", seed=i) for i in range(40)], step=1)
        assert store.stats().used_bytes == empty > 0  # indexes of nothing have a page each
        for step in range(4):
            rollouts = [make_rollout(f"s{step}m{i}", seed=9 * step + i) for i in range(40)]
            store.add_group(rollouts, step=step)
        used = store.stats().used_bytes
        with psycopg.connect(server.address) as db:
            tables = db.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'one'")
            sizes = [
                db.execute(f"SELECT pg_total_relation_size('one.{name}')").fetchall()[0][0]
                for (name,) in tables.fetchall()
            ]
        assert used == sum(sizes) > empty
        assert store.expire(max_bytes=2 * used) == 0
        assert store.expire(max_bytes=used // 2) > 0
