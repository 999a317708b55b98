"""Slices of the store by text, what a failed turn is, duplicates, and what expires first."""

import random
import sqlite3
import time

import pytest
from agent_doubles import EOS, output_of, tiny_tokenizer
from test_store import make_rollout

from nanorl.agents.limits import Limits
from nanorl.agents.tokens import TurnBuilder
from nanorl.observability.store import Filter, RolloutStore
from nanorl.rollout_json import from_json, to_json
from nanorl.types import Branch, Rollout, Status, TurnSpan

FAILED, FINE = {"num_executions": 1.0, "num_tool_errors": 1.0}, {"num_executions": 1.0}


def in_turns(name: str, *metrics: dict[str, float], **fields) -> Rollout:
    """A rollout with a turn for each; turn n has n tokens and an observation of 10 n."""
    spans, place = [], 1
    for number in range(1, len(metrics) + 1):
        end = place + number
        spans.append(
            TurnSpan(action_start=place, action_end=end, observation_end=end + 10 * number)
        )
        place = end + 10 * number
    return make_rollout(
        name,
        tokens=list(range(place)),
        loss_mask=[0] * place,
        logps=[0.0] * place,
        versions=[-1] * place,
        turn_spans=spans,
        turn_metrics=list(metrics),
        turn_rewards=[0.1 * n for n in range(len(metrics))],
        **fields,
    )


@pytest.fixture
def store(tmp_path):
    with RolloutStore(tmp_path / "r.sqlite") as store:
        store.add_group([in_turns("a", FINE, FAILED, task_id="sums-1", group_id="s0-g0")], step=0)
        store.add_group(
            [
                in_turns("b", FAILED, FINE, task_id="sums-2", group_id="s1-g0", reward=0.5),
                in_turns("c", FINE, task_id="dates-1", group_id="s1-g0", reward=0.0),
            ],
            step=1,
        )
        store.add_group(
            [
                in_turns("d", FINE, FAILED, FINE, task_id="dates-1", group_id="s2-g0"),
                in_turns(
                    "e",
                    status=Status.FAILED,
                    task_id="dates-1",
                    group_id="s2-g1",
                    reward=float("nan"),
                ),
            ],
            step=2,
            version=1,
        )
        yield store


# By hand, from the fixture above.
@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "abcde"), ("turn=2, failed", "ad"), ("failed", "abd"), ("turn=1,failed", "b"),
        ("turn=2", "abd"), ("turn>=3", "d"), ("turn>1, turn_tokens<3, failed", "ad"),
        ("step=1..2", "bcde"), ("step<1", "a"), ("step>0, step<=1", "bc"), ("step!=1", "ade"),
        ("step>=1, turn=2, failed", "d"), ("turn=2, failed, task=dates-1", "d"),
        ("kind=sums", "ab"), ("task~-1", "acde"), ("group=s1-g0", "bc"), ("rollout=c", "c"),
        ("status=failed", "e"), ("status!=failed", "abcd"), ("success", "ad"), ("reward<1", "bc"),
        ("reward=0.5..1", "abd"), ("turns>=2", "abd"), ("failed_turns=0", "ce"),
        ("version=1", "de"), ("tokens>60", "d"), ("observation=30", "d"), ("turn_reward>0.15", "d"),
        ("turn=2, failed, success, kind=sums", "a"), ("kind=none", ""), ("task~%", ""),
    ],
)  # fmt: skip
def test_a_slice_has_the_rollouts_that_its_text_says(store, text, names):
    where = Filter.parse(text)
    assert [entry.rollout_id for entry in store.entries(where=where)] == list(names)
    assert store.count(where) == len(names)
    assert Filter.parse(str(where)) == where
    newest = store.entries(where=where, newest_first=True, limit=2)
    assert [entry.rollout_id for entry in newest] == list(names[::-1][:2])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("color=red", r"where 'color=red': no rollout has a 'color'; there are step, version"),
        ("step=many", "where 'step=many': 'many' is not a whole number"),
        ("step=1.5", "'1.5' is not a whole number"),
        ("reward=high", "'high' is not a number"),
        ("task>3", r"task is a text: compare it with =, != or ~"),
        ("step~3", r"~ looks into texts; step is a number"),
        ("status=broken", "a status is one of finished, truncated_turn"),
        ("turn 2", r"write NAME=VALUE, such as step=5..9, or failed"),
    ],
)
def test_a_wrong_slice_is_told_what_could_stand_there(text, why):
    with pytest.raises(ValueError, match=why):
        Filter.parse(text)


def plan(store: RolloutStore, text: str) -> str:
    chosen = Filter.parse(text).sql()
    sql = f"EXPLAIN QUERY PLAN SELECT r.id {chosen.source} ORDER BY {chosen.number} LIMIT 100"
    return " | ".join(row[-1] for row in store._db.query(sql, chosen.values))


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("turn=2, failed", "by_failed_turn"), ("step=3..4, turn=2, failed", "by_failed_turn"),
        ("task=t", "by_task"), ("group=g", "by_group"), ("kind=k", "by_kind"),
        ("version=3", "by_version"), ("status=failed", "by_status"), ("hash=x", "by_hash"),
        ("step=3", "PRIMARY KEY"), ("task=t, turn=1, failed", "by_task"),
    ],
)  # fmt: skip
def test_the_first_page_of_a_slice_is_read_off_an_index_without_a_sort(store, text, index):
    found = plan(store, text)
    assert index in found and "TEMP B-TREE" not in found and "SCAN" not in found


def test_turns_are_counted_from_the_history_on_and_those_beside_come_last(tmp_path):
    own = in_turns("r", FAILED)
    for is_history in (False, True):
        own.branches.append(
            Branch(
                tokens=[1, 2, 3], loss_mask=[0, 1, 1], logps=[0.0] * 3, versions=[-1] * 3,
                turn_spans=[TurnSpan(action_start=1, action_end=3, observation_end=3)],
                turn_metrics=[{"num_exec_timeout": 1.0}] if is_history else [{"num_exec_ok": 1.0}],
                is_history=is_history,
            )
        )  # fmt: skip
    own.branches.reverse()
    with RolloutStore(tmp_path / "r.sqlite") as store:
        store.add_group([own], step=0)
        assert store.get("r") == own
        rows = store._db.query("SELECT turn, num_tokens, is_failed FROM turns ORDER BY turn")
    assert rows == [(1, 2, 1), (2, 1, 1), (3, 2, 0)]


def test_a_builder_keeps_what_was_counted_in_each_turn():
    builder = TurnBuilder(
        tiny_tokenizer(), Limits(max_turns=9), task_id="t", group_id="g", rollout_id="r"
    )
    builder.start([{"role": "user", "content": "hi"}])
    for metrics in ({}, FAILED, None):
        builder.append_action(output_of([5, EOS]))
        if metrics is not None:
            builder.note(0.0, metrics)
    rollout = builder.close(1.0)
    assert rollout.turn_metrics == [{}, FAILED, {}]
    assert rollout.metrics["num_tool_errors"] == 1.0
    assert builder.branch().turn_metrics == rollout.turn_metrics


def test_duplicates_are_counted_with_the_one_that_came_first(store):
    first = store.get("c")
    for step, name in ((3, "again"), (4, "and again")):
        store.add_group([from_json(to_json(first) | {"rollout_id": name})], step=step)
    found = store.duplicates()
    assert [(one.num, one.first) for one in found] == [(3, "c")]
    assert store.count(Filter.parse(f"hash={found[0].content_hash}")) == 3
    assert store.stats().num_duplicates == 2


# -- expiry ----------------------------------------------------------------------------------------


def test_expiry_by_age_drops_what_was_stored_long_ago(store, tmp_path):
    with sqlite3.connect(tmp_path / "r.sqlite") as db:
        db.execute("UPDATE rollouts SET stored_at = ? WHERE step = 0", (time.time() - 3 * 86_400,))
    db.close()
    assert store.expire(days=4) == 0
    assert store.expire(days=2) == 1
    assert [entry.rollout_id for entry in store.entries()] == list("bcde")
    stats = store.stats()
    assert (stats.num_rollouts, stats.num_expired, stats.num_expired_successes) == (4, 1, 1)
    with pytest.raises(ValueError, match="max_bytes=0: give a number above 0"):
        store.expire(max_bytes=0)


def large(name: str, group: str, reward: float, *, seed: int = 0, **fields) -> Rollout:
    """Some 30 kB, which no compressor makes smaller."""
    rng = random.Random(seed or name)
    tokens = [rng.randrange(2**31) for _ in range(8_000)]
    zeros = [0] * len(tokens)
    return make_rollout(
        name, group_id=group, reward=reward, tokens=tokens, loss_mask=zeros, logps=zeros,
        versions=zeros, **fields,
    )  # fmt: skip


def test_when_space_is_short_what_teaches_least_goes_first(tmp_path):
    with RolloutStore(tmp_path / "r.sqlite") as store:
        rare = [large(f"rare{n}", "rare", float(n == 0)) for n in range(5)]
        flat = [large(f"flat{n}", "flat", 1.0) for n in range(2)]
        mixed = [large(f"mixed{n}", "mixed", float(n)) for n in range(2)]
        twice = [large("twice0", "twice", 0.0, seed=7), large("twice1", "twice", 1.0, seed=7)]
        broken = [large("broken", "mixed", 0.0, status=Status.FAILED)]
        store.add_group([*rare, *flat, *mixed, *twice, *broken], step=0)
        store.add_group([large("new0", "new", 0.0), large("new1", "new", 0.0)], step=1)
        before = {entry.rollout_id for entry in store.entries()}
        ranks = dict.fromkeys(["broken", "twice1"], 1) | dict.fromkeys(["flat0", "flat1"], 2)
        ranks["rare0"] = 4
        used, gone = store.stats().used_bytes, []
        for percent in (*range(97, 0, -6), 1):
            store.expire(max_bytes=percent * used // 100)
            left = {entry.rollout_id for entry in store.entries()}
            gone.append(sorted(ranks.get(name, 3) for name in before - left))
            before = left
            assert percent < 40 or store.stats().used_bytes <= percent * used // 100
        assert [rank for each in gone for rank in each] == [1, 1, 2, 2, *[3] * 7, 4]
        assert before == {"new0", "new1"}  # the newest step, whatever it takes up


def test_the_file_shrinks_when_rollouts_expire(tmp_path):
    path = tmp_path / "r.sqlite"
    with RolloutStore(path) as store:
        for step in range(20):
            store.add_group([large(f"r{step}", f"g{step}", 0.0)], step=step)
        assert store.expire(max_bytes=200_000) > 10
    assert path.stat().st_size < 260_000
