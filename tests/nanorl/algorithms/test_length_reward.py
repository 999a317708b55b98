"""Kimi k1.5's length reward: by hand, against numpy, and in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gradient_cases import checked_gradient

from nanorl.algorithms.length_reward import length_reward
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import TrainBatch, build_batch
from nanorl.grpo import Field
from nanorl.types import Branch, Rollout, Status


def rollout(member: int, reward: float, actions: int, group: str = "g") -> Rollout:
    return Rollout(
        task_id=group,
        group_id=group,
        rollout_id=f"{group}-m{member}",
        tokens=list(range(actions + 3)),
        loss_mask=[0, 0, *[1] * actions, 0],
        logps=[0.0, 0.0, *[-1.0] * actions, 0.0],
        versions=[-1, -1, *[0] * actions, -1],
        reward=reward,
    )


def batch_of(rollouts: list[Rollout], **options: Any) -> TrainBatch:
    spec = AlgorithmSpec(advantage="dr_grpo", length_coef=0.2, entropy_coef=0.1, **options)
    return build_batch([rollouts], spec, max_tokens=64, version=0)


def advantages(batch: TrainBatch) -> list[float]:
    return [one.fields[Field.ADVANTAGE][2] for one in batch.samples]


def test_the_reward_by_hand() -> None:
    """Lengths 2, 4, 6 and 10 of one group: λ = 1/2, 1/4, 0, -1/2. The second failed, and so did
    the last; the group beside has one length."""
    got = length_reward(
        torch.tensor([2, 4, 6, 10, 7, 7]),
        torch.tensor([True, False, True, False, True, False]),
        ["a", "a", "a", "a", "b", "b"],
    )
    assert got.tolist() == [0.5, 0.0, 0.0, -0.5, 0.0, 0.0]
    lone = length_reward(torch.tensor([3]), torch.tensor([True]), ["a"])
    assert lone.tolist() == [0.0]


def test_against_numpy() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        num = int(rng.integers(1, 30))
        ids, length = rng.integers(0, 4, num), rng.integers(0, 40, num)
        success = rng.random(num) < 0.5
        expected = np.zeros(num)
        for one in set(ids.tolist()):
            mine = length[ids == one].astype(float)
            if mine.max() > mine.min():
                lam = 0.5 - (mine - mine.min()) / (mine.max() - mine.min())
                expected[ids == one] = np.where(success[ids == one], lam, np.minimum(lam, 0))
        got = length_reward(torch.tensor(length), torch.tensor(success), ids.tolist())
        assert got.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_the_batch_adds_it_by_its_weight() -> None:
    """Rewards 1, 1, .5 of 1, 3 and 5 tokens: λ = 1/2, 0, -1/2, times 0.2, are 1.1, 1 and 0.4."""
    batch = batch_of([rollout(0, 1.0, 1), rollout(1, 1.0, 3), rollout(2, 0.5, 5)])
    mean = (1.1 + 1.0 + 0.4) / 3
    assert advantages(batch) == pytest.approx([1.1 - mean, 1.0 - mean, 0.4 - mean])


def test_only_a_reward_of_one_is_a_success() -> None:
    """The short member with 0.9 gets nothing, the long one is punished as ever."""
    batch = batch_of([rollout(0, 0.9, 1), rollout(1, 0.9, 3)])
    assert advantages(batch) == pytest.approx([0.05, -0.05])


def test_the_length_is_what_the_policy_sampled_in_all_sequences() -> None:
    """Members of 2 and 4 tokens, the first with a sub-agent of 4 more: it is the longer one."""
    first, second = rollout(0, 1.0, 2), rollout(1, 1.0, 4)
    first.branches = [
        Branch(
            tokens=[0, 1, 2, 3, 4],
            loss_mask=[0, 1, 1, 1, 1],
            logps=[0.0, *[-1.0] * 4],
            versions=[-1, *[0] * 4],
        )
    ]
    batch = build_batch(
        [[first, second]],
        AlgorithmSpec(advantage="dr_grpo", length_coef=0.2),
        max_tokens=64,
        version=0,
    )
    assert [one.fields[Field.ADVANTAGE][2] for one in batch.samples] == pytest.approx(
        [-0.1, -0.1, 0.1]
    )


def test_what_was_cut_off_has_its_length_though_it_is_masked() -> None:
    """3 and 5 tokens are left with λ = 1/2 and 1/4 beside the 7 that were cut off."""
    cut = rollout(2, 0.0, 7)
    cut.status = Status.TRUNCATED_TURN
    batch = batch_of([rollout(0, 1.0, 3), rollout(1, 1.0, 5), cut], mask_truncated=True)
    rewards = [1.1, 1.0, -0.1]
    assert len(batch.samples) == 2
    assert advantages(batch) == pytest.approx([one - sum(rewards) / 3 for one in rewards[:2]])


def test_successes_of_unlike_lengths_are_a_signal() -> None:
    alike = [rollout(m, 1.0, 3, "a") for m in range(2)]
    unlike = [rollout(m, 1.0, 3 + m, "b") for m in range(2)]
    spec = AlgorithmSpec(length_coef=0.1, dynamic_sampling=True)
    batch = build_batch([alike, unlike], spec, max_tokens=64, version=0)
    assert [one.group for one in batch.samples] == ["b", "b"]
    assert batch.metrics["groups_with_signal"] == 1


def test_the_gradient_is_that_of_the_rewards_that_were_changed() -> None:
    """Two successes of 1 and 3 tokens: A = ±0.1, and a quarter of the weight is each token's."""
    spec = AlgorithmSpec(advantage="dr_grpo", loss="reinforce", length_coef=0.2)
    rollouts = [rollout(0, 1.0, 1), rollout(1, 1.0, 3)]
    short, long = checked_gradient(build_batch([rollouts], spec, max_tokens=64, version=0))
    assert short.tolist() == pytest.approx([0, 0, -0.1 / 4, 0])
    assert long.tolist() == pytest.approx([0, 0, *[0.1 / 4] * 3, 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length_coef": -0.1}, "length_coef=-0.1: must be 0 or more"),
        ({"advantage": "maxrl"}, "length_coef=0.1: advantage='maxrl' divides by the mean"),
        ({"advantage": "pass_at_k"}, "length_coef=0.1: advantage='pass_at_k' counts successes"),
        ({"advantage": "gdpo", "reward_parts": ("a",)}, "length_coef=0.1: advantage='gdpo' reads"),
        ({"advantage": "none", "loss": "opd"}, "length_coef=0.1: advantage='none' reads no"),
        ({"reward_level": "turn"}, "length_coef=0.1: it is part of the outcome"),
    ],
)
def test_what_would_not_read_it_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmSpec(**{"length_coef": 0.1, **options})
