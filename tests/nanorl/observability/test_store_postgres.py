"""The rollout store in PostgreSQL: a real server, the same answers as SQLite's, restarts."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_store import make_rollout

from nanorl.observability.store import Filter, RolloutStore, StoreError
from nanorl.task import Task
from nanorl.types import Status, TokenStats

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from postgres_server import PostgresServer, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.xdist_group("postgres"),
]
SLICES = (
    "", "step=1", "step>1", "turn=2, failed", "failed", "turn=1, failed, task=t1", "turns>=2",
    "group~g0", "status=failed", "reward<0.5", "success", "turn_tokens>=2", "step!=0, version=1",
    "observation=0", "hash!=x",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as running:
        yield running


def of_run(server: PostgresServer, run: str) -> str:
    return f"{server.address}&run={run}"


def fill(store: RolloutStore) -> None:
    failed, fine = {"num_tool_errors": 1.0}, {"num_executions": 1.0}
    store.add_tasks([Task("2 + 2?", answer="4", task_id="t0", kind="sums")])
    for step in range(3):
        rollouts = [
            make_rollout(
                f"s{step}m{member}",
                task_id=f"t{member % 2}",
                group_id=f"s{step}g{member % 2}",
                reward=float(member % 3 == 0) if member else float("nan"),
                status=Status.FAILED if member == 3 else Status.FINISHED,
                turn_metrics=[failed if (step + member) % 2 else fine],
            )
            for member in range(6)
        ]
        for number in (1, 4):
            rollouts[number].turn_spans *= 2
            rollouts[number].turn_metrics = [fine, failed]
        store.add_group(rollouts, step=step, version=step)


def test_postgres_answers_as_sqlite_does(server, tmp_path):
    with (
        RolloutStore(tmp_path / "r.sqlite") as lite,
        RolloutStore(of_run(server, "same")) as store,
    ):
        for one in (lite, store):
            fill(one)
        for text in SLICES:
            where = Filter.parse(text)
            found = [entry.rollout_id for entry in store.entries(where=where)]
            assert found == [entry.rollout_id for entry in lite.entries(where=where)], text
            assert store.count(where) == len(found)
        assert any(store.count(Filter.parse(text)) not in (0, 18) for text in SLICES)
        first, last = store.entries(limit=1), store.entries(limit=1, newest_first=True)
        assert (first[0].rollout_id, last[0].rollout_id) == ("s0m0", "s2m5")
        assert store.get("s1m4") == lite.get("s1m4")
        assert store.task("t0") == lite.task("t0") and len(store.tasks()) == 1
        mine, its = store.stats(), lite.stats()
        assert (mine.by_kind, mine.by_status) == (its.by_kind, its.by_status)
        assert mine.num_duplicates == its.num_duplicates
        assert store.expire(keep_steps=2) == lite.expire(keep_steps=2) == 6
        assert store.delete_from_step(2) == lite.delete_from_step(2) == 6
        assert store.stats().num_expired == lite.stats().num_expired == 6


def test_what_was_stored_is_there_after_a_new_connection(server):
    stats = TokenStats(values={"advantage": [[0.5, -0.1]]})
    with RolloutStore(of_run(server, "again")) as store:
        store.add_group([make_rollout("r")], step=1)
        store.add_token_stats({"r": stats})
        store.put_fact("start/0", {"device": "cpu"})
        store.put_fact("start/0", {"device": "cuda"})
        store.add_group([make_rollout("q", seed=1)], step=1)
        again = make_rollout("q", seed=2)
        store.add_group([again], step=1)
    with RolloutStore(of_run(server, "again")) as store:
        assert store.token_stats("r") == stats and store.get("q") == again
        assert (len(store), store.facts()) == (2, {"start/0": {"device": "cuda"}})


def test_two_runs_in_a_database_do_not_meet(server):
    with (
        RolloutStore(of_run(server, "one")) as one,
        RolloutStore(of_run(server, "Two.b-1")) as two,
    ):
        one.add_group([make_rollout("r", seed=1)], step=0)
        two.add_group([make_rollout("r", seed=2)], step=5)
        assert one.get("r") != two.get("r")
        assert one.delete_from_step(0) == 1
        assert [entry.step for entry in two.entries()] == [5]


def test_a_group_is_stored_whole_or_not_at_all(server):
    with RolloutStore(of_run(server, "whole")) as store:
        store.add_group([make_rollout("a")], step=0)
        bad = make_rollout("b", group_id="a\0b")  # no text of PostgreSQL
        with pytest.raises(StoreError, match=r"cannot store rollouts of step 1 in .*run whole"):
            store.add_group([make_rollout("a", seed=2), bad], step=1)
        assert store.get("a") == make_rollout("a") and len(store) == 1


def test_a_run_goes_on_when_the_server_was_started_again(server):
    with RolloutStore(of_run(server, "restart")) as store:
        store.add_group([make_rollout("a")], step=0)
        server.stop()
        again = threading.Timer(0.7, server.start)
        again.start()
        store.add_group([make_rollout("b")], step=1)  # waits for it
        again.join()
        assert [entry.rollout_id for entry in store.entries()] == ["a", "b"]


def test_a_server_that_stays_away_is_one_clear_error(server):
    from nanorl.observability.store.postgres import PostgresDatabase

    database = PostgresDatabase(server.address, schema="away", reconnect_s=0.2)
    server.stop()
    try:
        with pytest.raises(StoreError, match=r"cannot read .*does not answer: start the server"):
            database.read(lambda: database.query("SELECT 1"))
        with pytest.raises(StoreError, match=r"cannot open .*start the server"):
            RolloutStore(of_run(server, "away"))
    finally:
        server.start()
    assert database.read(lambda: database.query("SELECT 1")) == [(1,)]
    database.close()


def test_writers_of_one_run_wait_for_each_other(server):
    def write(name: str) -> None:
        with RolloutStore(of_run(server, "writers")) as store:
            for number in range(10):
                store.add_group([make_rollout(f"{name}{number}")], step=0)

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with RolloutStore(of_run(server, "writers")) as store:
        assert len({entry.rollout_id for entry in store.entries()}) == 20


def test_a_password_is_refused_and_never_shown(tmp_path):
    for address in (
        "postgresql://me:hunter2@host/db",
        "postgresql://host/db?password=hunter2",
        f"sqlite://{tmp_path}/r.sqlite?blobs=s3://key:hunter2@bucket/x",
    ):
        with pytest.raises(ValueError, match=r"holds a password.*PGPASSWORD") as caught:
            RolloutStore(address)
        assert "hunter2" not in str(caught.value)
