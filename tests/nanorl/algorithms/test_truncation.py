"""Rollouts that were cut off: compared with the others of their group, and without a loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gradient_cases import checked_gradient

from nanorl.algorithms.batch_scoring import Scoring
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.algorithms.truncation import masked
from nanorl.batching import TrainBatch, build_batch
from nanorl.grpo import Field
from nanorl.types import Branch, Rollout, Status, TurnSpan

CUT = (Status.TRUNCATED_TURN, Status.TRUNCATED_CONTEXT)


def rollout(
    member: int, reward: float, actions: int, status: Status, group: str = "g", turns: int = 1
) -> Rollout:
    """A prompt of two tokens, then turns of so many sampled ones, each answered by a token."""
    own = ([1] * actions + [0]) * turns
    spans = [
        TurnSpan(
            action_start=start, action_end=start + actions, observation_end=start + actions + 1
        )
        for start in range(2, 2 + len(own), actions + 1)
    ]
    return Rollout(
        task_id=group,
        group_id=group,
        rollout_id=f"{group}-m{member}",
        tokens=list(range(len(own) + 2)),
        loss_mask=[0, 0, *own],
        logps=[0.0, 0.0, *(-0.5 * m for m in own)],
        versions=[-1, -1, *(0 if m else -1 for m in own)],
        turn_spans=spans,
        reward=reward,
        status=status,
    )


def batch_of(rollouts: list[Rollout], num_minibatches: int = 1, **options: Any) -> TrainBatch:
    spec = AlgorithmSpec(mask_truncated=True, **options)
    return build_batch([rollouts], spec, max_tokens=64, version=0, num_minibatches=num_minibatches)


def found(batch: TrainBatch, name: Field) -> dict[str, float]:
    """The number of each rollout's first sampled token."""
    pairs = zip(batch.places, batch.samples, strict=True)
    return {place[0]: sample.fields[name][sample.loss_mask.index(1)] for place, sample in pairs}


@pytest.mark.parametrize("status", CUT)
def test_the_reward_counts_in_the_group_and_the_tokens_nowhere(status: Status) -> None:
    """Rewards 1, 0, 0: the mean is 1/3. The third, of 5 tokens, was cut off; 2 + 3 are left."""
    rollouts = [
        rollout(0, 1.0, 2, Status.FINISHED),
        rollout(1, 0.0, 3, Status.FINISHED),
        rollout(2, 0.0, 5, status),
    ]
    batch = batch_of(rollouts, advantage="dr_grpo")
    assert found(batch, Field.ADVANTAGE) == {
        "g-m0": pytest.approx(2 / 3),
        "g-m1": pytest.approx(-1 / 3),
    }
    assert found(batch, Field.WEIGHT) == {name: pytest.approx(1 / 5) for name in ("g-m0", "g-m1")}
    assert batch.metrics["num_masked_rollouts"] == 1
    assert batch.metrics["num_rollouts"] == 3 and batch.metrics["num_trained_rollouts"] == 2
    assert (batch.metrics["trained_tokens"], batch.metrics["action_tokens"]) == (5, 10)
    # Off, it learns as the others do.
    plain = build_batch([rollouts], AlgorithmSpec(advantage="dr_grpo"), max_tokens=64, version=0)
    assert found(plain, Field.WEIGHT) == {f"g-m{i}": pytest.approx(1 / 10) for i in range(3)}


def test_all_turns_of_a_rollout_that_was_cut_off_are_masked() -> None:
    cut = rollout(0, 1.0, 2, Status.TRUNCATED_TURN, turns=3)
    cut.branches = [Branch(tokens=[1, 2], loss_mask=[0, 1], logps=[0, -1], versions=[-1, 0])]
    batch = batch_of([cut, rollout(1, 0.0, 2, Status.FINISHED, turns=2)], entropy_coef=0.1)
    assert {place[0] for place in batch.places} == {"g-m1"}
    assert [sum(one.loss_mask) for one in masked(cut).sequences] == [0, 0]
    assert sum(cut.loss_mask) == 6 and sum(cut.branches[0].loss_mask) == 1, "the caller's is as was"


def test_no_term_of_any_option_reaches_what_was_cut_off() -> None:
    """A critic, an entropy bonus, a KL and ECHO: none has a sample of it."""
    rollouts = [
        rollout(0, 1.0, 2, Status.TRUNCATED_CONTEXT, turns=2),
        rollout(1, 0.0, 2, Status.FINISHED, turns=2),
    ]
    scored = Scoring(
        reference=lambda samples: [one_each(sample.tokens) for sample in samples],
        values=lambda samples: [one_each(sample.tokens) for sample in samples],
    )
    spec = AlgorithmSpec(
        mask_truncated=True, advantage="gae", entropy_coef=0.1, kl_coef=0.1, observation_coef=0.1
    )
    batch = build_batch([rollouts], spec, max_tokens=64, version=0, scoring=scored)
    assert [place[0] for place in batch.places] == ["g-m1"]
    assert len(batch.critic_samples) == 1
    assert batch.metrics["observed_tokens"] == 2


def one_each(tokens: list[int]) -> torch.Tensor:
    return -torch.ones(len(tokens))


def test_the_gradient_is_that_of_the_rollouts_that_ended() -> None:
    rollouts = [
        rollout(0, 1.0, 2, Status.FINISHED),
        rollout(1, 0.0, 1, Status.FINISHED),
        rollout(2, 1.0, 3, Status.TRUNCATED_TURN),
    ]
    first, second = checked_gradient(batch_of(rollouts, advantage="dr_grpo", loss="reinforce"))
    assert first.tolist() == pytest.approx([0, 0, *[-1 / 3 / 3] * 2, 0])
    assert second.tolist() == pytest.approx([0, 0, 2 / 3 / 3, 0])


BY_HAND = {
    # 1, 2 and 3 tokens of task a, the third cut off, and 4 of b.
    "token_mean": [1 / 7, 1 / 7, 1 / 7],
    "seq_mean_token_mean": [1 / 4, 1 / 8, 1 / 16],
    "seq_mean_token_sum": [1 / 4, 1 / 4, 1 / 4],
    "constant": [1 / 40, 1 / 40, 1 / 40],
    "prompt_mean": [1 / 6, 1 / 6, 1 / 8],
}


@pytest.mark.parametrize("aggregation", sorted(BY_HAND))
def test_denominators_count_the_rollout_and_none_of_its_tokens(aggregation: str) -> None:
    rollouts = [
        rollout(0, 1.0, 1, Status.FINISHED, "a"),
        rollout(1, 0.0, 2, Status.FINISHED, "a"),
        rollout(2, 0.5, 3, Status.TRUNCATED_TURN, "a"),
        rollout(0, 1.0, 4, Status.FINISHED, "b"),
    ]
    length = 10 if aggregation == "constant" else None
    options: dict[str, Any] = {"aggregation": aggregation, "constant_length": length}
    batch = batch_of(rollouts, entropy_coef=0.1, **options)
    weights = found(batch, Field.WEIGHT)
    assert list(weights.values()) == pytest.approx(BY_HAND[aggregation])


def test_against_numpy() -> None:
    """GRPO's advantages of all rewards, the token mean of each minibatch over what is left."""
    rng = np.random.default_rng(7)
    num_masked = 0
    for _ in range(200):
        num_groups, size = int(rng.integers(1, 4)), int(rng.integers(2, 5))
        rewards = rng.integers(0, 3, (num_groups, size)) / 2
        lengths = rng.integers(1, 7, (num_groups, size))
        is_cut = rng.random((num_groups, size)) < 0.4
        rollouts = [
            rollout(m, rewards[g, m], int(lengths[g, m]), status, f"g{g}")
            for g in range(num_groups)
            for m in range(size)
            for status in [CUT[int(rng.integers(2))] if is_cut[g, m] else Status.FINISHED]
        ]
        minibatches = 2 if num_groups > 1 else 1
        batch = batch_of(rollouts, minibatches, entropy_coef=0.1)
        deviation = rewards.std(1, ddof=1, keepdims=True)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (deviation + 1e-6)
        half = np.arange(num_groups) * minibatches // num_groups
        expected_A, expected_W = {}, {}
        for g in range(num_groups):
            beside = half == half[g]
            tokens = lengths[beside][~is_cut[beside]].sum()
            for m in np.flatnonzero(~is_cut[g]):
                expected_A[f"g{g}-m{m}"] = pytest.approx(advantages[g, m], abs=1e-6)
                expected_W[f"g{g}-m{m}"] = pytest.approx(1 / tokens)
        assert found(batch, Field.ADVANTAGE) == expected_A
        assert found(batch, Field.WEIGHT) == expected_W
        assert batch.metrics["num_masked_rollouts"] == is_cut.sum()
        num_masked += int(is_cut.sum())
    assert num_masked > 200


def test_a_batch_of_nothing_but_cut_off_rollouts_trains_on_none() -> None:
    cut = [rollout(m, float(m), 2, Status.TRUNCATED_TURN) for m in range(2)]
    batch = batch_of(cut)
    assert batch.samples == [] and len(batch.probe) == 2
    assert batch.metrics["num_masked_rollouts"] == 2


def test_a_failure_is_not_cut_off() -> None:
    """A program that broke down is the policy's doing, and so is a rollout that ended early."""
    kept = [replace(rollout(m, float(m), 2, Status.FINISHED), error="it broke") for m in range(2)]
    assert len(batch_of(kept).samples) == 2


def test_opo_weighs_the_members_by_the_tokens_that_learn() -> None:
    """Lengths 1, 3 and none of the third, whose reward of 1 has no say in the baseline."""
    rollouts = [
        rollout(0, 1.0, 1, Status.FINISHED),
        rollout(1, 0.0, 3, Status.FINISHED),
        rollout(2, 1.0, 4, Status.TRUNCATED_TURN),
    ]
    advantages = found(batch_of(rollouts, advantage="opo"), Field.ADVANTAGE)
    assert advantages == {"g-m0": pytest.approx(0.75), "g-m1": pytest.approx(-0.25)}
