"""Ways to an answer: by hand, over kills, and what a run found that its teacher never showed."""

import asyncio
import json

import pytest
from test_report_html import decode, make_rollout
from test_store import add

from nanoengine.packing import Sample
from nanorl.observability.report.ways import (
    TAUGHT,
    TaughtWays,
    read_taught,
    turns_of,
    way_of,
    ways_of_run,
    ways_section,
)
from nanorl.observability.store import RolloutStore

PRINTED = [("print(17 * 3)", ">51"), ("Answer: 51", "")]
REVERSED = [("print('ab'[::-1])", ">ba"), ("Answer: ba", "")]
TWICE = [("print(x)", ">NameError"), ("print(2)", ">2"), ("Answer: 2", "")]


def sample(turns):
    rollout = make_rollout(turns)
    return Sample(tokens=rollout.tokens, loss_mask=rollout.loss_mask)


def teach(folder, rows, *, num_drills=0):
    async def play():
        taught = TaughtWays(folder, decode, num_drills)
        for step, batch in rows:
            await taught.on_warm_batch(step, [sample(turns) for turns in batch])

    asyncio.run(play())


@pytest.mark.parametrize(
    ("turns", "way"),
    [
        (["print(17 * 3)", "Answer: 51"], ("print(N * N)",)),
        (["print('ab'[::-1])", "Answer: ba"], ("print('…'[::-N])",)),
        (['open("a_1.txt")  # x1', "print(1.5)", "2"], ("open('…')  # x1", "print(N)")),
        (["Answer: 51"], ()),
        ([], ()),
    ],
)
def test_a_way_has_neither_numbers_nor_quoted_texts_nor_the_answer(turns, way):
    assert way_of(turns) == way


def test_turns_are_the_runs_of_trained_tokens():
    one = sample(TWICE)
    assert turns_of(one.tokens, one.loss_mask, decode) == ["print(x)", "print(2)", "Answer: 2"]


def test_each_way_is_noted_once_with_its_first_step(tmp_path):
    teach(tmp_path, [(0, [PRINTED, PRINTED]), (1, [PRINTED]), (2, [REVERSED, PRINTED])])
    assert read_taught(tmp_path / TAUGHT) == [
        (0, [("print(N * N)",)]),
        (2, [("print('…'[::-N])",)]),
    ]


def test_drills_are_no_ways(tmp_path):
    teach(tmp_path, [(0, [REVERSED]), (1, [PRINTED])], num_drills=1)
    assert read_taught(tmp_path / TAUGHT) == [(1, [("print(N * N)",)])]


def test_steps_that_are_taken_again_after_a_kill_are_noted_anew(tmp_path):
    teach(tmp_path, [(0, [PRINTED]), (1, [TWICE]), (2, [REVERSED])])
    with (tmp_path / TAUGHT).open("a") as file:
        file.write('{"step": 3, "wa')  # the line that the kill cut off
    teach(tmp_path, [(1, [REVERSED]), (2, [PRINTED])])
    assert read_taught(tmp_path / TAUGHT) == [
        (0, [("print(N * N)",)]),
        (1, [("print('…'[::-N])",)]),
    ]


def stored(tmp_path, played):
    store = RolloutStore(tmp_path / "rollouts.sqlite")
    for number, (step, turns, reward) in enumerate(played):
        rollout = make_rollout(turns, rollout_id=f"r{number}", reward=reward, turn_rewards=[])
        add(store, rollout, step=step, version=step)
    return store


def test_ways_that_nobody_showed_are_counted_among_the_last_successes(tmp_path):
    teach(tmp_path, [(0, [PRINTED])])
    played = [
        (0, REVERSED, 1.0),  # too early
        (4, [("print(  17*3 )\n", ">51"), ("Answer: 51", "")], 1.0),  # other blanks alone
        (4, TWICE, 1.0),
        (5, TWICE, 1.0),
        (5, REVERSED, 0.0),  # wrong
        (5, REVERSED, 1.0),
    ]
    with stored(tmp_path, played) as store:
        ways = ways_of_run(tmp_path, store, decode)
    data = json.loads(json.dumps(ways.to_json()))
    found = data.pop("found")
    assert data == {
        "from_step": 4,
        "taught": 1,
        "successes": 4,
        "successes_by_new_ways": 3,
        "new_ways": 2,
    }
    assert found[0] == {"way": ["print(x)", "print(N)"], "count": 2, "rollout_id": "r2"}
    assert [(one.way, one.count, one.rollout_id) for one in ways.found] == [
        (("print(x)", "print(N)"), 2, "r2"),
        (("print('…'[::-N])",), 1, "r5"),
    ]
    page = ways_section(ways.to_json())
    assert "75.0% of 4 successes" in page
    assert "<pre>print(x)</pre><pre>print(N)</pre>" in page


@pytest.mark.parametrize("is_taught", [False, True])
def test_nothing_is_said_without_a_teacher_or_a_success(tmp_path, is_taught):
    if is_taught:
        teach(tmp_path, [(0, [PRINTED])])
    with stored(tmp_path, [(0, PRINTED, 0.0 if is_taught else 1.0)]) as store:
        assert ways_of_run(tmp_path, store, decode) is None
    assert ways_section({}) == ""
