"""Groups that are trained on again: which are kept and drawn, how their tokens are weighed, what a
step says of them, and a run that is killed."""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import train

from nanoengine.packing import make_micro_batches
from nanoengine.state.whole_engine import Engine
from nanorl.algorithms.recipes import named_spec
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import build_batch
from nanorl.flow.replay_groups import ReplayGroups, stored_ids, unpack, with_contents
from nanorl.flow.replay_policy import ReplayPolicy
from nanorl.observability.results import StepResult
from nanorl.options.phase_config import RLConfig
from nanorl.options.run_config import RunConfig
from nanorl.run.trainer import Trainer
from nanorl.types import Rollout, Status, TokenStats

TWO = ReplayPolicy(share=0.5, capacity=3, max_age=4, max_uses=2)


def rollout(group: str, member: int, reward: float, *, version: int = 0) -> Rollout:
    return Rollout(
        task_id=f"seven-{group}", group_id=group, rollout_id=f"{group}-m{member}",
        tokens=[1, 2, 3 + member], loss_mask=[0, 1, 1], logps=[0.0, -0.5, -0.25],
        versions=[-1, version, version], reward=reward,
    )  # fmt: skip


def group(name: str, *rewards: float, version: int = 0) -> list[Rollout]:
    return [rollout(name, i, reward, version=version) for i, reward in enumerate(rewards)]


def make(policy: ReplayPolicy = TWO, *, num_fresh: int = 2, **options: Any) -> ReplayGroups:
    given = {"seed": 0, "num_fresh": num_fresh, "store_keeps": True, **options}
    return ReplayGroups(policy, AlgorithmSpec(), **given)


def names(replay: ReplayGroups) -> list[str]:
    return [one.name for one in replay.kept]


# -- what is kept, drawn, dropped ------------------------------------------------------------------


def test_groups_with_a_signal_are_kept_with_the_share_that_earned_less_than_the_best() -> None:
    """By hand: equal rewards teach nothing; of graded ones the best is what counts."""
    replay = make(replace(TWO, capacity=9))
    fresh = [
        group("solved", 1, 1, 1, 1), group("rare", 0, 0, 1, 0), group("never", 0, 0, 0, 0),
        group("common", 1, 1, 0, 1), group("graded", 0.2, 0.9, 0.9, 0.1), group("below", -1, -2),
    ]  # fmt: skip
    replay.keep([*fresh, []], 0)
    kept = {one.name: one.rarity for one in replay.kept}
    assert kept == {"rare": 0.75, "common": 0.25, "graded": 0.5, "below": 0.5}


def test_lengths_make_no_group_rare() -> None:
    """With a reward of length any two members earn something unlike: a rare success still comes
    before a common one, and failures of several lengths are none."""
    replay = ReplayGroups(
        replace(TWO, capacity=9), AlgorithmSpec(length_coef=0.1),
        seed=0, num_fresh=2, store_keeps=True,
    )  # fmt: skip
    fresh = [
        group("rare", 0, 0, 1, 0), group("common", 1, 1, 0, 1), group("failures", 0, 0, 0, 0),
        group("solved", 1, 1, 1, 1),
    ]  # fmt: skip
    for members in fresh:
        for one, length in zip(members, (1, 2, 3, 4), strict=True):
            one.tokens, one.loss_mask = [1, *[2] * length], [0, *[1] * length]
            one.logps, one.versions = [0.0, *[-0.5] * length], [-1, *[0] * length]
    replay.keep(fresh, 0)
    assert {one.name: one.rarity for one in replay.kept} == {"rare": 0.75, "common": 0.25}


def test_of_too_many_the_commonest_successes_go_first_and_of_equals_the_oldest() -> None:
    replay = make()
    replay.keep([group("a", 0, 1), group("b", 1, 1, 1, 0)], 0)
    replay.keep([group("c", 0, 0, 0, 1, version=1), group("d", 1, 0, version=1)], 1)
    assert names(replay) == ["a", "c", "d"]  # b: only a quarter earned less
    replay.keep([group("e", 1, 0, version=2)], 2)
    assert names(replay) == ["c", "d", "e"]  # a, d and e are equals, a is the oldest


def test_a_group_is_dropped_by_the_age_of_its_first_token_and_by_its_uses() -> None:
    replay = make()
    mixed = group("a", 0, 1, version=3)
    mixed[0].versions[1] = 1  # one of its tokens is two versions older
    replay.keep([mixed, group("b", 0, 1, version=3)], 3)
    for step in (4, 5):
        assert len(replay.beside([], step)) == 2
        replay.keep([], step)
    assert names(replay) == []  # both were used twice
    replay = make(replace(TWO, max_uses=9))
    replay.keep([mixed, group("b", 0, 1, version=3)], 3)
    replay.keep([], 4)
    assert names(replay) == ["a", "b"]  # in step 5 its age is 5 - 1 = 4
    replay.keep([], 5)
    assert names(replay) == ["b"]


@pytest.mark.parametrize(
    ("share", "num_fresh", "expected"),
    [
        (0.25, 4, 1),
        (0.25, 3, 1),
        (0.25, 6, 2),
        (0.25, 24, 8),
        (0.5, 4, 4),
        (0.1, 9, 1),
        (0.1, 4, 0),
    ],
)
def test_the_share_is_of_the_whole_batch(share: float, num_fresh: int, expected: int) -> None:
    """By hand: 24 fresh ones and 8 replayed ones are 32, of which these are a quarter."""
    assert ReplayPolicy(share=share).num_groups(num_fresh) == expected


def test_what_is_drawn_is_a_function_of_seed_step_and_names_that_can_be_written_down() -> None:
    """The largest u^(1/w), with u of the SHA-256 of seed, step and name, and w what the group's
    other members did not earn."""
    replay = make(replace(TWO, capacity=9))
    num_zeros = {"a": 1, "b": 1, "c": 2, "d": 3, "e": 4}
    fresh = [group(name, 1, *[0] * num) for name, num in num_zeros.items()]
    replay.keep(fresh, 0)
    rarity = {"a": 0.5, "b": 0.5, "c": 2 / 3, "d": 0.75, "e": 0.8}

    def key(name: str) -> float:
        digest = hashlib.sha256(f"0/replay/3/{name}".encode()).digest()
        point = random.Random(int.from_bytes(digest[:8], "big") >> 1).random()
        return point ** (1 / rarity[name])

    expected = sorted(rarity, key=key, reverse=True)[:2]
    assert [one[0].group_id for one in replay.beside([], 3)] == expected
    other = make(replace(TWO, capacity=9))
    other.keep(fresh[::-1], 0)
    assert [one[0].group_id for one in other.beside([], 3)] == expected
    assert {one.name: one.uses for one in replay.kept} == {
        name: int(name in expected) for name in "abcde"
    }


def test_rare_successes_are_drawn_more_often_by_their_rarity() -> None:
    """One of two is drawn, of weights 0.75 and 0.25, in 3,000 steps: 0.75 ± 3 deviations."""
    replay = make(ReplayPolicy(share=0.5, max_age=1024, max_uses=10**6), num_fresh=1)
    replay.keep([group("rare", 0, 0, 0, 1), group("common", 1, 1, 1, 0)], 0)
    drawn = Counter(replay.beside([], step % 1000)[0][0].group_id for step in range(1000))
    assert abs(drawn["rare"] / 1000 - 0.75) < 3 * math.sqrt(0.75 * 0.25 / 1000)


def test_replayed_groups_stand_among_the_fresh_ones_so_that_minibatches_are_mixed() -> None:
    replay = make(replace(TWO, capacity=9), num_fresh=2)
    replay.keep([group("x", 0, 1), group("y", 0, 1)], 0)
    fresh = [group(name, 0, 1, version=1) for name in "abcd"]
    order = [one[0].group_id for one in replay.beside(fresh, 1)]
    assert [name for name in order if name in "abcd"] == list("abcd")
    # By hand: fresh ones at 1/8, 3/8, 5/8, 7/8 of the batch, replayed ones at 1/4 and 3/4.
    assert [i for i, name in enumerate(order) if name in "xy"] == [1, 4]


# -- checkpoints -----------------------------------------------------------------------------------


def test_a_state_names_what_the_store_has_and_holds_what_it_lets_go() -> None:
    stored = {one.rollout_id: one for one in group("a", 0, 1)}
    named, held = make(), make(store_keeps=False)
    for replay in (named, held):
        replay.keep([group("a", 0, 1)], 0)
        replay.beside([], 1)
    state = json.loads(json.dumps(named.state()))
    assert stored_ids(state) == ["a-m0", "a-m1"] and stored_ids(held.state()) == []
    assert len(json.dumps(state)) < 150
    for other, given, have in ((make(), state, stored), (make(), held.state(), {})):
        other.load(given, have)
        assert [(one.name, one.rarity, one.uses) for one in other.kept] == [("a", 0.5, 1)]
        assert list(other.kept[0].rollouts) == list(stored.values())
    assert make(store_keeps=False).state() == {"groups": []}


def test_a_run_that_begins_to_let_rollouts_go_holds_what_it_had_only_named() -> None:
    replay = make()
    replay.keep([group("a", 0, 1)], 0)
    other = make(store_keeps=False)
    other.load(replay.state(), {one.rollout_id: one for one in group("a", 0, 1)})
    assert unpack(other.state()["groups"][0]["content"]) == group("a", 0, 1)
    back = make()  # and one that came with its rollouts is not in the store later either
    back.load(other.state(), {})
    assert stored_ids(back.state()) == []


def test_rollouts_that_are_missing_are_named_and_not_passed_over() -> None:
    replay = make()
    replay.keep([group("a", 0, 1), group("b", 1, 0)], 0)
    with pytest.raises(ValueError, match=r"lacks 3 rollouts .* the first is a-m1: put the store"):
        make().load(replay.state(), {"a-m0": group("a", 0, 1)[0]})


def test_a_fork_takes_the_rollouts_along() -> None:
    replay = make()
    replay.keep([group("a", 0, 1), group("b", 1, 0)], 0)
    stored = {one.rollout_id: one for one in (*group("a", 0, 1), *group("b", 1, 0))}
    fork = make()
    fork.load(with_contents(replay.state(), stored), {})
    assert [list(one.rollouts) for one in fork.kept] == [list(one.rollouts) for one in replay.kept]
    assert with_contents(fork.state(), {}) == fork.state()


# -- weights ---------------------------------------------------------------------------------------


def test_a_replayed_token_is_weighed_by_the_policy_over_the_one_that_sampled_it() -> None:
    """200 batches of a fresh group and a replayed one, against fp64 numpy: the loss of a token is
    -min(π_o/μ, 2)·A/N, and so is its gradient by log π; of a fresh one π_o/μ is 1."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        groups, expected, moved = [], [], []
        for name, version in (("fresh", 5), ("old", int(rng.integers(0, 5)))):
            rewards = rng.permutation([0.0, 1.0, *rng.integers(0, 2, 2)])
            members = group(name, *map(float, rewards), version=version)
            advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            for one, advantage in zip(members, advantages, strict=True):
                mu = np.float32(rng.uniform(-3, 0, 2)).astype(np.float64)
                drift = np.zeros(2) if version == 5 else rng.normal(0, 1, 2)
                one.logps[1:] = mu.tolist()
                moved.append([0.0, *(mu + drift)])
                expected.append(-np.minimum(np.exp(drift), 2) * advantage / 16)
            groups.append(members)
        batch = build_batch(groups, AlgorithmSpec(), max_tokens=8, version=5)
        played = [one.rollout_id for members in groups for one in members]
        kept = [i for i, name in enumerate(played) if any(batch.stats[name].values["advantage"][0])]
        (micro,) = make_micro_batches(batch.samples, 1000, share_prefix=False)
        for name, value in list(micro.fields_T.items()):
            micro.fields_T[name] = value.double()
        wanted = np.array([moved[i][1:] for i in kept]).ravel()
        is_action = micro.loss_mask_T.bool()
        logp_T = torch.zeros(len(is_action), dtype=torch.float64)
        logp_T[is_action] = torch.from_numpy(wanted)
        logp_T.requires_grad_()
        loss, _ = batch.loss_fn(logp_T, None, micro)
        (grad_T,) = torch.autograd.grad(loss, logp_T)
        by_hand = np.array([expected[i] for i in kept]).ravel()
        np.testing.assert_allclose(grad_T[is_action].numpy(), by_hand, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(float(loss.detach()), by_hand.sum(), rtol=1e-4, atol=1e-5)


# -- steps -----------------------------------------------------------------------------------------

REPLAY: dict[str, Any] = {"tasks_per_step": 2, "replay": ReplayPolicy(share=0.5)}


def replay_of(**options: Any) -> ReplayGroups:
    rl = RLConfig(**{**REPLAY, **options})
    return ReplayGroups(
        rl.replay, rl.algorithm, seed=0, num_fresh=rl.tasks_per_step, store_keeps=False
    )


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.export_state()}


def are_equal(one: Engine, other: Engine) -> bool:
    there = weights(other)
    return all(torch.equal(value, there[name]) for name, value in weights(one).items())


def test_a_step_counts_its_fresh_rollouts_as_fresh_and_the_replayed_ones_as_replayed() -> None:
    steps, _ = train(kept=replay_of(), steps=5, **REPLAY)
    seen: set[str] = set()
    for step in steps:
        metrics, own = step.metrics, [one for members in step.groups for one in members]
        assert len(own) == metrics["num_rollouts"] == 2 * 4
        assert {version for one in own for version in one.versions} == {-1, step.step}
        assert metrics["reward"] == sum(one.reward for one in own) / 8 == metrics["success"]
        assert metrics["action_tokens"] == sum(one.num_action_tokens for one in own)
        num_teaching = sum(len({one.reward for one in members}) > 1 for members in step.groups)
        assert metrics["groups_with_signal"] == num_teaching
        assert metrics["num_trained_rollouts"] == 4 * num_teaching
        again = [one for members in step.replayed for one in members]
        assert metrics["replayed_groups"] == len(step.replayed) <= 2
        assert metrics["replayed_rollouts"] == len(again)
        assert metrics["replayed_tokens"] == sum(len(one.tokens) for one in again)
        if again:
            ages = [step.step - members[0].version for members in step.replayed]
            assert metrics["replayed_age_mean"] == sum(ages) / len(ages) >= 1
            assert metrics["replayed_success"] == sum(one.reward for one in again) / len(again)
            assert metrics["staleness_max"] == max(ages)  # of what was trained on
        assert {one.rollout_id for one in again} <= seen  # each was a fresh one of an earlier step
        assert not step.token_stats.keys() & {one.rollout_id for one in again}
        assert step.token_stats.keys() == {one.rollout_id for one in own} or not step.token_stats
        assert metrics["logp_gap_max"] == 0.0 and metrics["logp_gap_tokens"] > 0
        seen |= {one.rollout_id for one in own}
    assert sum(step.metrics["replayed_groups"] for step in steps) > 3


def test_what_was_counted_in_a_replayed_episode_alone_is_no_metric_of_the_step() -> None:
    replay = make(num_fresh=1)
    old = group("a", 0, 1)
    old[0].metrics["num_calls"] = 3.0
    replay.keep([old], 0)
    fresh = group("b", 1, 1, version=1)
    replay.beside([fresh], 1)
    learnt: dict[str, Any] = {
        "num_rollouts": 4.0, "success": 0.75, "env/num_calls": 0.75, "num_trained_rollouts": 2.0,
        "loss": 0.5,
    }  # fmt: skip
    stats = {
        one.rollout_id: TokenStats(values={"advantage": [[0.0, x, x]]})
        for one, x in zip([*old, *fresh], (-0.7, 0.7, 0.0, 0.0), strict=True)
    }
    replay.finish(1, [fresh], learnt, stats)
    assert "env/num_calls" not in learnt and learnt["loss"] == 0.5
    assert learnt["num_rollouts"] == 2 and learnt["success"] == 1.0
    assert learnt["num_trained_rollouts"] == 0.0 and learnt["replayed_success"] == 0.5
    assert learnt["replayed_age_mean"] == 1.0 and learnt["replay_kept"] == 1.0
    assert sorted(stats) == ["b-m0", "b-m1"]


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_rollouts_that_were_cut_off_are_masked_and_counted_where_they_are_fresh(
    entropy_coef: float,
) -> None:
    """Also where rollouts without an advantage are trained on, for another term's sake."""
    spec = AlgorithmSpec(mask_truncated=True, entropy_coef=entropy_coef)
    replay = ReplayGroups(TWO, spec, seed=0, num_fresh=1, store_keeps=True)
    old, fresh = group("a", 0, 1, 0, 1), group("b", 0, 1, 0, 1, version=1)
    for one in (*old[:2], fresh[0]):
        one.status = Status.TRUNCATED_TURN
    replay.keep([old], 0)
    batch = build_batch(replay.beside([fresh], 1), spec, max_tokens=8, version=1)
    learnt = dict(batch.metrics)
    assert (learnt["num_trained_rollouts"], learnt["num_masked_rollouts"]) == (5, 3)
    replay.finish(1, [fresh], learnt, batch.stats)
    assert (learnt["num_trained_rollouts"], learnt["num_masked_rollouts"]) == (3, 1)


def test_replay_leaves_tasks_seeds_and_tries_as_they_are_and_changes_what_is_learnt() -> None:
    without, first = train(steps=4)
    replayed, second = train(kept=replay_of(), steps=4, **REPLAY)
    ids = [[[one.rollout_id for one in g] for g in step.groups] for step in without]
    assert ids == [[[one.rollout_id for one in g] for g in step.groups] for step in replayed]
    assert [one.tokens for g in without[0].groups for one in g] == [
        one.tokens for g in replayed[0].groups for one in g
    ]
    assert not are_equal(first, second)


def test_a_run_that_finds_nothing_worth_keeping_has_the_bits_of_one_without_replay() -> None:
    spec = AlgorithmSpec(entropy_coef=0.01)  # else nothing is learnt at all
    _, without = train(lambda ids: 0.0, steps=3, algorithm=spec)
    steps, empty = train(
        lambda ids: 0.0, kept=replay_of(algorithm=spec), steps=3, algorithm=spec, **REPLAY
    )
    assert are_equal(without, empty)
    assert [step.metrics["replay_kept"] for step in steps] == [0.0] * 3


@pytest.mark.parametrize("store_keeps", [True, False])
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path, store_keeps: bool) -> None:
    """A checkpoint after step 3; it dies in step 5."""

    class Killed(Exception):  # noqa: N818 - named as what happened
        pass

    def fresh() -> ReplayGroups:
        rl = RLConfig(**REPLAY)
        return ReplayGroups(rl.replay, rl.algorithm, seed=0, num_fresh=2, store_keeps=store_keeps)

    whole, expected = train(kept=fresh(), steps=8, **REPLAY)
    saved: dict[str, Any] = {}
    stored: dict[str, Rollout] = {}

    def after(trainer: Trainer, engine: Engine, result: StepResult) -> None:
        stored.update({one.rollout_id: one for members in result.groups for one in members})
        if result.step == 5 and "step" in saved and not saved.get("is_over"):
            saved["is_over"] = True
            raise Killed
        if result.step == 3:
            engine.save(tmp_path, {})
            state = json.loads(json.dumps(trainer.state))
            saved.update(step=4, state=state, checkpoint=tmp_path)

    with pytest.raises(Killed):
        train(kept=fresh(), steps=8, after=after, **REPLAY)
    state = saved["state"]["replay"]
    assert bool(stored_ids(state)) == store_keeps
    replay = fresh()
    lasting = {name: one for name, one in stored.items() if int(name[1]) < 4 and store_keeps}
    replay.load(state, lasting)
    rest, engine = train(kept=replay, steps=8, after=after, saved=saved, **REPLAY)
    assert are_equal(engine, expected)
    for one, other in zip(whole[4:], rest, strict=True):
        assert [g[0].group_id for g in one.replayed] == [g[0].group_id for g in other.replayed]
    assert sum(len(step.replayed) for step in rest) > 3


def test_an_asynchronous_run_may_replay_too() -> None:
    options = {**REPLAY, "max_staleness": 1}
    steps, _ = train(kept=replay_of(), steps=6, **options)
    assert sum(step.metrics["replayed_groups"] for step in steps) > 3
    for step in steps:
        assert step.metrics.get("logp_gap_max", 0.0) == 0.0
        assert step.metrics["staleness_max"] <= 1 + 8


def test_a_run_without_replay_imports_nothing_of_it() -> None:
    program = (
        "import sys, nanorl.run.rl_phase, nanorl.run.trainer, nanorl.run.continuation\n"
        "assert 'nanorl.flow.replay_policy' in sys.modules\n"
        "print([name for name in sys.modules if 'replay_groups' in name or 'replay_state' in name])"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "[]"


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (named_spec("ppo"), "advantage gae: its critic"),
        (named_spec("reinforce_pp"), "advantage reinforce_pp: its baseline"),
        (named_spec("opd"), "loss opd: the teacher"),
        (AlgorithmSpec(distill_coef=0.1), "distill-coef 0.1: the teacher"),
        (named_spec("sdft"), "hindsight solution: its teacher"),
        (AlgorithmSpec(reward_level="turn", turn_peers="batch"), "turn-peers batch: fresh turns"),
    ],
)
def test_what_cannot_learn_from_old_groups_is_refused_by_name(
    spec: AlgorithmSpec, named: str
) -> None:
    with pytest.raises(ValueError, match=rf"--rl.replay.share 0.25 with --rl.algorithm.{named}"):
        RLConfig(algorithm=spec, replay=ReplayPolicy(share=0.25))


def test_a_share_that_is_no_group_or_that_nothing_answers_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"share 0.05 with --rl.tasks-per-step 4: that is not one"):
        RLConfig(replay=ReplayPolicy(share=0.05))
    with pytest.raises(ValueError, match=r"--rl.replay.share 0.6: must be at most 0.5"):
        ReplayPolicy(share=0.6)
    with pytest.raises(ValueError, match=r"--rl.replay.share 0.25: nothing answers for stale"):
        RLConfig(algorithm=AlgorithmSpec(correction="none"), replay=ReplayPolicy(share=0.25))
    with pytest.raises(ValueError, match=r"a step has 81920 rollouts"):
        RLConfig(tasks_per_step=512, group_size=128, replay=ReplayPolicy(share=0.2))
    rl = RLConfig(replay=ReplayPolicy(share=0.25))
    assert not rl.is_on_policy and rl.is_synchronous and RLConfig().is_on_policy
    assert RunConfig(deterministic=True, rl=rl).rl is rl  # no clock has a say
