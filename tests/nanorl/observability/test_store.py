"""The rollout store: exact round trips, every rollout once, no damage by kills or full disks."""

import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl.envs.tasks.problem import make_problem
from nanorl.observability.store import Filter, RolloutStore, StoreError, content_hash
from nanorl.observability.store.rows import Filed, from_content, to_entry, to_rows
from nanorl.rollout_json import from_json, to_json
from nanorl.task import Task
from nanorl.types import Rollout, Status, TokenStats, TurnSpan


def make_rollout(rollout_id: str, *, seed: int = 0, **fields) -> Rollout:
    rng = random.Random(f"{rollout_id}-{seed}")
    n = rng.randint(3, 60)
    mask = [0] + [rng.randint(0, 1) for _ in range(n - 1)]
    data = {
        "task_id": "task-1",
        "group_id": "group-1",
        "tokens": [rng.randrange(150_000) for _ in range(n)],
        "loss_mask": mask,
        "logps": [float(np.float32(-rng.random() * 9)) * m for m in mask],
        "versions": [7 if m else -1 for m in mask],
        "turn_spans": [TurnSpan(action_start=1, action_end=2, observation_end=n)],
        "reward": 1.0,
        "turn_rewards": [0.25],
        "metrics": {"tool_s": 0.5},
    }
    return Rollout(rollout_id=rollout_id, **(data | fields))


def add(store: RolloutStore, rollout: Rollout, *, step: int, version: int) -> None:
    store.add_group([rollout], step=step, version=version)


def is_whole(path) -> bool:
    db = sqlite3.connect(path)
    try:
        return db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        db.close()


def through_rows(rollout: Rollout) -> Rollout:
    rows = to_rows([rollout], [Filed(0, 0, "kind", 3)])[0]
    return from_content(to_entry(rows.entry), rows.content)


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.data())
def test_any_numbers_survive_packing_to_the_last_bit(tokens, data):
    floats = st.lists(st.floats(), min_size=len(tokens), max_size=len(tokens))
    logps = data.draw(floats)
    zeros = [0] * len(tokens)
    rollout = make_rollout("r", tokens=tokens, loss_mask=zeros, logps=logps, versions=zeros)
    back = through_rows(rollout)
    assert back.tokens == tokens
    assert np.array_equal(np.asarray(back.logps), np.asarray(logps, "<f8"), equal_nan=True)


def test_packing_is_much_smaller_than_json():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 49_152, 1000).tolist()
    logps = (-rng.exponential(size=1000)).astype(np.float32).astype(float).tolist()
    ones = [1] * 1000
    rollout = make_rollout("r", tokens=tokens, loss_mask=ones, logps=logps, versions=ones)
    packed = len(to_rows([rollout], [Filed(0, 0, "kind", 3)])[0].content)
    assert packed < 0.25 * len(json.dumps([tokens, logps]))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), status=st.sampled_from(Status))
def test_a_rollout_comes_back_equal(seed, status, tmp_path_factory):
    rollout = make_rollout("r", seed=seed, status=status)
    with RolloutStore(tmp_path_factory.mktemp("s") / "r.sqlite") as store:
        add(store, rollout, step=3, version=2)
        back = store.get("r")
    assert back == rollout
    assert to_json(back) == json.loads(json.dumps(to_json(rollout)))


def test_rollouts_are_found_by_every_index_column(tmp_path):
    with RolloutStore(tmp_path / "r.sqlite") as store:
        for step in range(3):
            for group in range(2):
                group_id = f"s{step}g{group}"
                rollouts = [
                    make_rollout(
                        f"{group_id}m{member}",
                        group_id=group_id,
                        task_id=f"t{group}",
                        status=Status.FAILED if member == 2 else Status.FINISHED,
                    )
                    for member in range(3)
                ]
                store.add_group(rollouts, step=step, version=step - 1)
        ids = lambda rollouts: [rollout.rollout_id for rollout in rollouts]  # noqa: E731
        assert ids(store.query(group_id="s1g0")) == ["s1g0m0", "s1g0m1", "s1g0m2"]
        assert ids(store.query(task_id="t1", step=2)) == ["s2g1m0", "s2g1m1", "s2g1m2"]
        assert len(store.query(version=-1)) == 6
        assert ids(store.query(status=Status.FAILED, step=0)) == ["s0g0m2", "s0g1m2"]
        wanted = content_hash(store.get("s1g1m0"))
        assert ids(store.query(content_hash=wanted)) == ["s1g1m0"]
        assert len(store.query(limit=4)) == 4
        assert (len(store), len(store.query(status=Status.FAILED))) == (18, 6)
        assert [entry.step for entry in store.entries()] == sorted([0, 1, 2] * 6)
        assert {entry.version for entry in store.entries(step=2)} == {1}
        with pytest.raises(KeyError, match="no rollout 'x'"):
            store.get("x")


def test_tasks_come_back_whole_and_name_the_kind_of_their_rollouts(tmp_path):
    chat = Task([{"role": "user", "content": "a \ud800 half"}], answer={"x": [1]}, task_id="own")
    plain = Task("2 + 2?", answer="4", kind="sums", files={"a.py": "x = 1"}, data={"most": 3})
    with RolloutStore(tmp_path / "r.sqlite") as store:
        store.add_tasks([chat, plain])
        store.add_tasks([plain, Task("another text", task_id="own")])  # the first one stays
        for task in (chat, plain):
            add(store, make_rollout(task.task_id, task_id=task.task_id), step=0, version=0)
        add(store, make_rollout("r", task_id="squares-0f3a"), step=0, version=0)
    with RolloutStore(tmp_path / "r.sqlite") as store:
        assert (store.task("own"), store.task(plain.task_id)) == (chat, plain)
        store.add_tasks([problem := make_problem("sums", "1 + 1?", 2, "print(2)")])
        stored = store.task(problem.task_id)
        assert type(stored) is Task and stored.answer == "2"  # what a teacher knows is not stored
        assert store.task("squares-0f3a") is None
        assert {task.task_id for task in store.tasks()} == {"own", plain.task_id, problem.task_id}
        kinds = {entry.rollout_id: entry.kind for entry in store.entries()}
        assert kinds == {"own": "task", plain.task_id: "sums", "r": "squares"}


def test_numbers_about_tokens_come_back_and_go_with_their_rollouts(tmp_path):
    stats = TokenStats(
        values={"advantage": [[0.0, -0.1], [0.5]], "trained_logp": [[0.0, -2.5], [math.nan]]}
    )
    with RolloutStore(tmp_path / "r.sqlite") as store:
        for step in range(3):
            add(store, make_rollout(f"r{step}"), step=step, version=step)
            store.add_token_stats({f"r{step}": stats})
            store.put_fact(f"weights/{step + 1}", {"sum": step})
        store.put_fact("start/0", ["cpu"])
        back = store.token_stats("r1")
        assert back is not None and back.values["advantage"] == stats.values["advantage"]
        assert back.values["trained_logp"][0] == [0.0, -2.5]
        assert math.isnan(back.values["trained_logp"][1][0])
        assert store.delete_from_step(1) == 2
        assert store.token_stats("r1") is None and store.token_stats("r0") is not None
        assert store.facts() == {"start/0": ["cpu"], "weights/1": {"sum": 0}}
        assert store.facts("start/") == {"start/0": ["cpu"]}


STORES = Path(__file__).parent / "stores"
"""What the code of schemas 1 and 2 wrote, as `sqlite3 .dump`: three rollouts, of steps 4 and 10."""


def old_file(path: Path, schema: int) -> Path:
    with sqlite3.connect(path) as db:
        db.executescript((STORES / f"schema_{schema}.sql").read_text())
    db.close()
    return path


@pytest.mark.parametrize("schema", [1, 2])
def test_files_of_old_schemas_are_read_and_go_on(schema, tmp_path):
    path = old_file(tmp_path / "r.sqlite", schema)
    with RolloutStore(path) as store:
        assert [(entry.step, entry.rollout_id) for entry in store.entries()] == [
            (4, "s4-g0-m0"), (4, "s4-g0-m1"), (10, "s10-g0-m0"),
        ]  # fmt: skip
        first, failed, last = store.query()
        assert first.tokens == [5, 6, 20, 21, 9, 22] and first.logps[2:4] == [
            -0.30000001192092896,
            -1.1,
        ]
        assert (first.turn_rewards, first.metrics) == ([0.1, 0.0], {"num_executions": 1.0})
        assert first.turn_spans[0] == TurnSpan(action_start=2, action_end=4, observation_end=5)
        assert failed.status is Status.FAILED and math.isnan(failed.reward)
        assert last.branches[0].is_history and last.branches[0].tokens == [1, 2]
        assert [entry.kind for entry in store.entries(step=10)] == [["sums", "plus"][schema - 1]]
        assert store.entries(where=Filter.parse("turn=3"))[0].rollout_id == "s10-g0-m0"
        add(store, make_rollout("new"), step=11, version=0)
        if schema == 2:
            stats = store.token_stats("s4-g0-m0")
            assert stats is not None
            assert stats.values == {"advantage": [[0.0, 0.0, 0.7, 0.7, 0.0, 0.7]]}
            assert store.facts() == {"weights/5": {"sum": 3}}
            assert store.task("sums-0f3a").prompt == "1 + 1?"
            assert failed.error == "ToolTimeout: 3 s"
    assert is_whole(path)
    with RolloutStore(path) as store:
        assert len(store) == 4


def test_a_damaged_old_file_is_one_clear_error_and_stays_as_it_was(tmp_path):
    path = old_file(tmp_path / "r.sqlite", 1)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE rollouts SET tokens = x'7c75317879' WHERE step = 10")
    db.close()
    with pytest.raises(StoreError, match=r"r\.sqlite: rollout 's10-g0-m0': damaged token list"):
        RolloutStore(path)
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (1,)
    assert db.execute("SELECT count(*) FROM rollouts WHERE length(tokens) > 5").fetchone() == (2,)
    db.close()


def test_why_a_rollout_failed_is_kept(tmp_path):
    failed = make_rollout("r", status=Status.FAILED, error="ToolTimeout: 3 s")
    with RolloutStore(tmp_path / "r.sqlite") as store:
        add(store, failed, step=0, version=0)
        assert store.get("r").error == "ToolTimeout: 3 s"


def test_a_rollout_generated_again_replaces_the_first(tmp_path):
    with RolloutStore(tmp_path / "r.sqlite") as store:
        add(store, make_rollout("r", seed=1), step=1, version=0)
        again = make_rollout("r", seed=2, reward=0.0)
        add(store, again, step=1, version=0)
        assert len(store) == 1
        assert store.get("r") == again


def test_content_hash_sees_tokens_and_not_timings():
    first = make_rollout("a", seed=5)
    same = from_json(to_json(first) | {"rollout_id": "b", "metrics": {"tool_s": 9.0}})
    other = from_json(to_json(first) | {"tokens": [*first.tokens[:-1], 1]})
    assert content_hash(first) == content_hash(same) != content_hash(other)


def test_a_group_is_stored_whole_or_not_at_all(tmp_path):
    with RolloutStore(tmp_path / "r.sqlite") as store:
        with pytest.raises(ValueError, match="'a' occurs twice"):
            store.add_group([make_rollout("a"), make_rollout("a")], step=0, version=0)
        bad = make_rollout("b", metrics={"x": object()})
        with pytest.raises(TypeError):
            store.add_group([make_rollout("a"), bad], step=0, version=0)
        assert len(store) == 0


def test_the_content_hash_sees_what_was_sampled() -> None:
    first = make_rollout("a")
    mask = [1 - value for value in first.loss_mask]
    assert content_hash(first) != content_hash(make_rollout("a", loss_mask=mask))
    assert content_hash(first) != content_hash(make_rollout("a", task_id="another"))


def test_a_refused_group_leaves_nothing_and_the_store_goes_on(tmp_path):
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        store._db._db.execute(
            "CREATE TEMP TRIGGER refuse BEFORE INSERT ON rollouts WHEN new.rollout_id = 'b' "
            "BEGIN SELECT raise(ABORT, 'no b'); END"
        )
        with pytest.raises(StoreError, match=r"cannot store rollouts of step 0.*no b"):
            store.add_group([make_rollout("a"), make_rollout("b")], step=0, version=0)
        assert len(store) == 0
        add(store, make_rollout("c"), step=0, version=0)
        assert [entry.rollout_id for entry in store.entries()] == ["c"]


def test_a_stored_group_survives_a_power_loss(tmp_path):
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        settings = [
            store._db._db.execute(f"PRAGMA {n}").fetchone()[0]
            for n in ("synchronous", "journal_mode")
        ]
    assert settings == [2, "wal"], "FULL: one fsync a transaction (sqlite.org/pragma.html)"


def test_rollouts_come_in_the_order_of_steps_then_groups_then_ids(tmp_path):
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        add(store, make_rollout("a", group_id="g"), step=2, version=0)
        rollouts = [make_rollout(n, group_id=g) for n, g in (("b", "h"), ("d", "g"), ("c", "g"))]
        store.add_group(rollouts, step=1)
        assert [rollout.rollout_id for rollout in store.query()] == ["c", "d", "b", "a"]
        assert [entry.rollout_id for entry in store.entries()] == ["c", "d", "b", "a"]
        assert [rollout.rollout_id for rollout in store.query(limit=2)] == ["c", "d"]
        assert store.query(limit=0) == []


def test_resume_forgets_the_steps_after_the_checkpoint(tmp_path):
    with RolloutStore(tmp_path / "r.sqlite") as store:
        for step in range(5):
            add(store, make_rollout(f"r{step}"), step=step, version=step)
        assert store.delete_from_step(3) == 2
        assert [entry.rollout_id for entry in store.entries()] == ["r0", "r1", "r2"]


def test_expiry_keeps_the_newest_steps_and_shrinks_the_file(tmp_path):
    path = tmp_path / "r.sqlite"
    rng = random.Random(0)
    with RolloutStore(path) as store:
        for step in range(20):
            tokens = [rng.randrange(60_000) for _ in range(20_000)]
            zeros = [0] * len(tokens)
            add(
                store,
                make_rollout(
                    f"r{step}", tokens=tokens, loss_mask=zeros, logps=zeros, versions=zeros
                ),
                step=step,
                version=step,
            )
    full = path.stat().st_size
    with RolloutStore(path) as store:
        assert store.expire(keep_steps=2) == 18
        assert [entry.step for entry in store.entries()] == [18, 19]
        assert store.expire(keep_steps=2) == 0
        with pytest.raises(ValueError, match="keep_steps=0"):
            store.expire(0)
    assert path.stat().st_size < 0.3 * full


WRITER = """
    import sys
    sys.path[:0] = {paths!r}
    from nanorl.observability.store import RolloutStore
    from test_store import make_rollout
    store = RolloutStore({path!r})
    start = len(store) // 4
    print("ready", flush=True)
    for step in range(start, 100_000):
        group = [make_rollout(f"s{{step}}m{{m}}", group_id=f"s{{step}}") for m in range(4)]
        store.add_group(group, step=step, version=step)
        print(step, flush=True)
"""


def run_writer(path, **popen):
    paths = [os.getcwd(), os.path.dirname(__file__)]
    code = textwrap.dedent(WRITER.format(paths=paths, path=str(path)))
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **popen
    )


def test_kill_9_loses_no_acknowledged_group_and_tears_none(tmp_path):
    path, rng = tmp_path / "r.sqlite", random.Random(0)
    for _ in range(4):
        writer = run_writer(path)
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.2)
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged = [int(line) for line in writer.communicate()[0].split(b"\n")[:-1]]
        with RolloutStore(path) as store:
            assert is_whole(path)
            entries = store.entries()
            steps = sorted({entry.step for entry in entries})
            assert steps == list(range(len(steps)))
            assert len(entries) == 4 * len(steps)  # whole groups only, each rollout once
            assert not acknowledged or acknowledged[-1] in steps
            for entry in entries[-4:]:
                assert store.get(entry.rollout_id).tokens == make_rollout(entry.rollout_id).tokens


def test_a_full_disk_is_one_clear_error_and_loses_nothing(tmp_path):
    import resource

    path = tmp_path / "r.sqlite"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))  # noqa: E731
    writer = run_writer(path, preexec_fn=limit)
    out, err = writer.communicate(timeout=120)
    last = err.decode().strip().splitlines()[-1]
    assert writer.returncode != 0
    assert last.startswith(
        "nanorl.observability.store.database.StoreError: cannot store rollouts of step"
    )
    assert str(path) in last
    assert "--resume" in last
    acknowledged = [int(line) for line in out.split(b"\n")[1:-1]]
    with RolloutStore(path) as store:
        assert is_whole(path)
        steps = sorted({entry.step for entry in store.entries()})
        assert steps == acknowledged
        add(store, make_rollout("more"), step=steps[-1] + 1, version=0)  # room again: goes on


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_full_tmpfs_is_one_clear_error_and_the_store_goes_on_after_it(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=768k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        ballast = tmp_path / "ballast"
        ballast.write_bytes(bytes(300_000))
        with RolloutStore(tmp_path / "r.sqlite") as store:
            num = 0
            with pytest.raises(StoreError, match=r"r\.sqlite: the disk .*full.*--resume"):
                for num in range(10_000):
                    add(store, make_rollout(f"r{num}"), step=num, version=0)
            assert 0 < len(store) == num < 10_000
            ballast.unlink()
            add(store, make_rollout(f"r{num}"), step=num, version=0)
            assert store.get(f"r{num}") == make_rollout(f"r{num}") and len(store) == num + 1
        assert is_whole(tmp_path / "r.sqlite")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_file_errors_name_the_file_and_the_fix(tmp_path):
    text = tmp_path / "text.sqlite"
    text.write_text("this is not a database, " * 100)
    with pytest.raises(StoreError, match=r"text\.sqlite: this is not a SQLite file: move it away"):
        RolloutStore(text)
    with pytest.raises(StoreError, match=r"r\.sqlite: it cannot be opened: check that the folder"):
        RolloutStore(tmp_path / "missing" / "r.sqlite")
    old = sqlite3.connect(tmp_path / "old.sqlite")
    old.execute("PRAGMA user_version = 99")
    old.close()
    with pytest.raises(StoreError, match=r"old\.sqlite: rollouts of schema 99"):
        RolloutStore(tmp_path / "old.sqlite")


def test_a_locked_file_is_one_clear_error(tmp_path):
    path = tmp_path / "r.sqlite"
    with RolloutStore(path, lock_timeout_s=0.01) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process is writing to it: stop that run"):
            add(store, make_rollout("r"), step=0, version=0)
        other.execute("ROLLBACK")
        add(store, make_rollout("r"), step=0, version=0)
        assert other.execute("SELECT count(*) FROM rollouts").fetchone() == (1,)
        other.close()


def test_damage_in_the_middle_is_one_clear_error(tmp_path):
    path = tmp_path / "r.sqlite"
    with RolloutStore(path) as store:
        for n in range(300):
            add(store, make_rollout(f"r{n}"), step=n, version=0)
    size = path.stat().st_size
    with open(path, "r+b") as file:
        for offset in range(4096, size, 4096):
            file.seek(offset)
            file.write(os.urandom(2048))
    with pytest.raises(StoreError, match=r"r\.sqlite"), RolloutStore(path) as store:
        store.query()


def test_nan_rewards_survive(tmp_path):
    with RolloutStore(tmp_path / "r.sqlite") as store:
        add(store, make_rollout("r", reward=float("nan")), step=0, version=0)
        assert np.isnan(store.get("r").reward)
        assert np.isnan(store.entries()[0].reward)
