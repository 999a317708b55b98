"""Parts of a replay by hand: the first difference, fingerprints, changed tasks and manifests."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from nanoengine.state.fingerprint import fingerprint, folded_sum
from nanoinfer.params import SamplingParams
from nanorl.flow.batch_policy import BatchPolicy, Remedy
from nanorl.inspection.replay.causes import changed_parts, ranked
from nanorl.inspection.replay.difference import Difference, first_difference
from nanorl.inspection.replay.forced import StoredTurns
from nanorl.inspection.replay.past_run import RL, PastRun, choose
from nanorl.inspection.replay.tasks import changes
from nanorl.observability.store import RolloutStore
from nanorl.options.phase_config import RLConfig
from nanorl.options.run_config import RunConfig
from nanorl.run.history import Event, RunHistory
from nanorl.task import Task
from nanorl.types import Branch, Rollout, Status, TurnSpan


def rollout() -> Rollout:
    """A prompt of two tokens, an action of two, an observation of one, an action of one; beside it
    a sub-agent's sequence."""
    return Rollout(
        task_id="t", group_id="g", rollout_id="r",
        tokens=[5, 6, 20, 21, 9, 22], loss_mask=[0, 0, 1, 1, 0, 1],
        logps=[0.0, 0.0, -0.25, -1.5, 0.0, -0.5], versions=[-1, -1, 4, 4, -1, 4],
        turn_spans=[
            TurnSpan(action_start=2, action_end=4, observation_end=5),
            TurnSpan(action_start=5, action_end=6, observation_end=6),
        ],
        reward=1.0, turn_rewards=[0.0, 0.5], metrics={"reward/rule": 1.0, "num_turns": 2.0},
        branches=[Branch(tokens=[7, 8], loss_mask=[0, 1], logps=[0.0, -2.0], versions=[-1, 4])],
    )  # fmt: skip


def decode(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def found(other: Rollout) -> tuple:
    difference = first_difference(rollout(), other, decode)
    assert difference is not None
    one = difference
    return one.kind, one.sequence, one.turn, one.token, one.then, one.now


def test_equal_rollouts_have_no_difference_whatever_their_times() -> None:
    other = rollout()
    other.metrics["num_turns"] = 7.0
    other.versions[2] = 5
    assert first_difference(rollout(), other, decode) is None


def test_the_first_difference_says_where_and_of_what_kind_it_is() -> None:
    cases = [
        ("tokens", 1, 66, ("prompt", 0, -1, 1, "6", "66")),
        ("tokens", 3, 99, ("token", 0, 0, 3, "21", "99")),
        ("logps", 3, math.nextafter(-1.5, 0.0), ("logp", 0, 0, 3, "-1.5", "-1.4999999999999998")),
        ("logps", 3, math.nan, ("logp", 0, 0, 3, "-1.5", "nan")),
        ("tokens", 4, 10, ("observation", 0, 0, 4, "9", "10")),
        ("tokens", 5, 23, ("token", 0, 1, 5, "22", "23")),
    ]
    for name, place, value, expected in cases:
        other = rollout()
        getattr(other, name)[place] = value
        other.reward = 0.0  # comes after it
        assert found(other) == expected


def test_longer_and_missing_sequences_differ_where_the_shorter_ends() -> None:
    longer = rollout()
    for name, value in (("tokens", 9), ("loss_mask", 1), ("logps", -0.1), ("versions", 4)):
        getattr(longer, name).append(value)
    assert found(longer)[:5] == ("token", 0, 1, 6, "(the end)")
    assert found(replace(rollout(), branches=[])) == ("sequences", 0, -1, -1, "2", "1")
    beside = rollout()
    beside.branches[0].logps[1] = -3.0
    assert found(beside) == ("logp", 1, -1, 1, "-2.0", "-3.0")


def test_status_and_rewards_come_after_the_tokens_the_parts_first() -> None:
    assert found(replace(rollout(), status=Status.TRUNCATED_TURN))[0] == "status"
    other = replace(rollout(), reward=0.0, metrics={"reward/rule": 0.0, "reward/form": 1.0})
    assert found(other)[4:] == ("reward/rule 1.0", "reward/rule 0.0")
    assert found(replace(rollout(), turn_rewards=[0.0, 0.25]))[4] == "of turn 1 0.5"
    nan = replace(rollout(), reward=math.nan)
    assert first_difference(nan, replace(rollout(), reward=math.nan), decode) is None


@pytest.mark.parametrize(
    ("limit", "params", "reason"),
    [
        (3, {}, "stop"),
        (2, {}, "length"),
        (2, {"stop_token_ids": (21,)}, "stop"),
        (2, {"ignore_eos": True}, "length"),
    ],
)
@pytest.mark.parametrize("end", [21, 30])
def test_a_turn_that_ends_with_its_last_allowed_token_is_not_cut_off(
    limit: int, params: dict, reason: str, end: int
) -> None:
    """As the engine says it: a token that ends the turn counts before the limit does."""
    is_ended = end == 30 and not params.get("ignore_eos")
    stored = rollout()
    stored.tokens[3] = end
    turns = StoredTurns(stored, eos_ids=frozenset({30}))
    said = asyncio.run(turns.generate([5, 6], SamplingParams(max_tokens=limit, **params)))
    assert said.ids == [20, end]
    assert said.finish_reason == ("stop" if is_ended else reason)


def test_a_changed_task_is_told_field_by_field() -> None:
    then = Task("p", answer="1", files={"a": "x", "b": "y"}, data={"n": 1})
    now = Task("p", answer="1", files={"a": "x", "b": "z", "c": "w"}, data={"n": 2})
    assert changes(then, replace(then)) == ""
    said = "files['b']: 'y' -> 'z'; files['c']: 'null' -> 'w'; data['n']: '1' -> '2'"
    assert changes(then, replace(now, split=then.split)) == said
    assert changes(then, None).startswith(f"the source has no task {then.task_id}")


def test_causes_are_those_that_can_matter_for_the_kind() -> None:
    found = {"weights": "w", "sandbox": "s", "task": "t", "code": "c", "machine": "m", "store": ""}
    names = {
        "logp": ["weights", "machine", "code"],
        "observation": ["task", "sandbox", "code", "machine"],
        "prompt": ["task", "code"],
    }
    for kind, expected in names.items():
        difference = Difference(kind=kind, then="", now="")  # type: ignore[arg-type]
        assert [cause.name for cause in ranked(difference, found)] == expected


def test_another_commit_of_the_same_source_is_no_cause() -> None:
    then = {"code": {"source": "a", "commit": "1"}, "machine": {"threads": 2}}
    assert changed_parts(then, {"code": {"source": "a", "commit": "2"}, "machine": {}}) == {
        "machine": "threads 2 -> (none)"
    }
    other = {"code": {"source": "b", "commit": "2"}, "machine": {"threads": 2}}
    assert changed_parts(then, other) == {"code": "source a -> b; commit 1 -> 2"}
    assert changed_parts(None, other) == {}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.uint8))
def test_every_single_bit_changes_a_fingerprint(dtype: torch.dtype) -> None:
    flat = torch.arange(7, dtype=torch.uint8).repeat(4)
    before = fingerprint(flat.view(dtype)), folded_sum(flat)
    for byte in range(len(flat)):
        for bit in range(8):
            other = flat.clone()
            other[byte] ^= 1 << bit
            assert fingerprint(other.view(dtype)) != before[0]
            assert folded_sum(other) != before[1]


def test_the_folded_sum_is_the_one_of_its_definition() -> None:
    words = torch.tensor([3, -1, 1 << 62], dtype=torch.int64)
    total = 0
    for place, word in enumerate(words.tolist()):
        word &= (1 << 64) - 1
        total += (word ^ (word >> 32)) * (2 * place + 1) * 0x9E3779B97F4A7C15
    assert folded_sum(words.view(torch.uint8)) & (1 << 64) - 1 == total & (1 << 64) - 1
    # The sign bits of two words: a plain sum would not see both change.
    flipped = words ^ -(1 << 63) * torch.tensor([1, 1, 0])
    assert folded_sum(flipped.view(torch.uint8)) != folded_sum(words.view(torch.uint8))


def test_order_and_place_count_in_a_folded_sum() -> None:
    words = torch.tensor([1, 2, 0, 0], dtype=torch.int64)
    sums = {folded_sum(words.roll(i).view(torch.uint8)) for i in range(4)}
    assert len(sums) == 4


def test_the_groups_of_a_step_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [("s3-g10", "m9"), ("s3-g10", "m10"), ("s3-g9", "m0"), ("s3-g11", "m0")]
    played = [
        replace(rollout(), group_id=group, rollout_id=f"{group}-{member}")
        for group, member in names
    ]
    failed = replace(rollout(), group_id="s3-g9", rollout_id="s3-g9-m1-failed0")
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        store.add_group([*played, replace(failed, status=Status.FAILED)], step=3)
    with PastRun(tmp_path, RunConfig()) as run:
        groups = [[one.rollout_id for one in group] for group in run.groups(3)]
        assert groups == [["s3-g9-m0"], ["s3-g10-m9", "s3-g10-m10"], ["s3-g11-m0"]]
        with pytest.raises(ValueError, match="step 4 are not stored any more"):
            run.groups(4)
        assert run.entries[0].entry.rollout_id == "s3-g9-m0"
        assert len(choose(run, num=3)) == 3 and len(choose(run, num=0)) == 4
        with pytest.raises(ValueError, match="no stored rollout is called s9"):
            choose(run, ["s9"])


@pytest.mark.parametrize(
    ("spoilt", "stale", "trained"),
    [("train", "train", "abc"), ("drop", "wait", "bc"), ("train", "replace", "ac")],
)
def test_the_groups_of_a_step_are_those_that_it_was_made_of(
    spoilt: Remedy, stale: Literal["wait", "train", "replace"], trained: str, tmp_path: Path
) -> None:
    """Of a spoilt one, a stale one and one that has no fault."""
    sampled = {"a": [5], "b": [5, 4], "c": [5, 6]}  # by which versions, member by member
    one = rollout()
    played = [
        replace(
            one,
            group_id=group,
            rollout_id=f"{group}{i}",
            versions=[-1, -1, version, version, -1, version],
            branches=[],
        )
        for group, versions in sampled.items()
        for i, version in enumerate(versions)
    ]
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        store.add_group(played, step=6)
    batch = BatchPolicy(order="finish", spoilt=spoilt, stale=stale)
    rl = RLConfig(batch=batch, group_size=2, max_staleness=1)
    with PastRun(tmp_path, RunConfig(rl=rl)) as run:
        assert "".join(group[0].group_id for group in run.groups(6)) == trained


def test_options_belong_to_the_places_from_which_on_they_held(tmp_path: Path) -> None:
    """A run of 4 steps, resumed at step 2 with another rate, and again when it had ended, to have 6
    steps and another temperature."""
    history = RunHistory(tmp_path)
    events = [
        ("begun", "untrained", 0, {}),
        ("resumed", "rl", 2, {"rl.lr": (1e-5, 2e-5), "rollout.replicas": (1, 2)}),
        ("resumed", "rl", 3, {}),
        ("resumed", "done", 4, {"rl.steps": (4, 6), "rl.temperature": (1.0, 0.5)}),
    ]
    for kind, phase, step, changed in events:
        event = Event(
            event=kind, at="", phase=phase, step=step, changes=changed, origin="", command=""
        )
        history.append(event)
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        for number in range(4):
            store.put_fact(f"start/{number}", {"code": {"source": str(number)}})
    now = RunConfig(rl=RLConfig(lr=2e-5, steps=6, temperature=0.5))
    with PastRun(tmp_path, now) as run:
        held = [(one.begin, one.config.rl) for one in run.segments]
        assert [(begin, rl.lr, rl.steps, rl.temperature) for begin, rl in held] == [
            ((0, 0), 1e-5, 4, 1.0),
            ((RL, 2), 2e-5, 4, 1.0),
            ((RL, 4), 2e-5, 6, 0.5),
        ]
        assert run.segment((RL, 1)) == 0 and run.segment((RL, 3)) == 1 and run.segment((6, 0)) == 2
        places = [(2, 0), (RL, 2), (RL, 3), (RL, 4), (RL + 1, 0)]
        sources = [run.manifest(place)["code"]["source"] for place in places]
        assert sources == ["0", "1", "2", "3", "3"]
