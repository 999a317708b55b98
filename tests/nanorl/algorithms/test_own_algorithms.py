"""Advantages and losses from a user's file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import build_batch
from nanorl.types import Rollout

FILE = """
import torch

def centred(reward_R, group_ids):
    return reward_R - reward_R.mean()

def by_place(batch):
    return torch.arange(batch.mask_T.numel(), dtype=torch.float32)

def short(batch):
    return torch.zeros(1)

def plain(logp_T, batch):
    return -batch.advantage_T * (logp_T - batch.old_logp_T).exp()

broken = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def groups() -> list[list[Rollout]]:
    def one(member: int, reward: float) -> Rollout:
        return Rollout(
            task_id="t", group_id="g", rollout_id=f"m{member}", tokens=[1, 2, 3],
            loss_mask=[0, 1, 1], logps=[0.0, -1.0, -2.0], versions=[-1, 0, 0], reward=reward,
        )  # fmt: skip

    return [[one(0, 1.0), one(1, 0.0)]]


def advantages(spec: AlgorithmSpec) -> list[list[float]]:
    batch = build_batch(groups(), spec, max_tokens=8, version=0)
    return [sample.fields["advantage"] for sample in batch.samples]


def test_an_advantage_of_groups_or_of_the_whole_batch(mine: Path) -> None:
    spec = AlgorithmSpec(advantage=f"{mine}:centred")
    assert advantages(spec) == [[0.0, 0.5, 0.5], [0.0, -0.5, -0.5]]
    spec = AlgorithmSpec(advantage=f"{mine}:by_place")
    assert advantages(spec) == [[0.0, 1.0, 2.0], [0.0, 4.0, 5.0]]
    with pytest.raises(ValueError, match=r"short: it returned a tensor of shape \[1\]"):
        advantages(AlgorithmSpec(advantage=f"{mine}:short"))


def test_a_loss_of_yours_has_the_gradient_that_it_says(mine: Path) -> None:
    """At the policy that sampled, `plain` is PPO without its clip."""
    gradients = []
    for loss in (f"{mine}:plain", "ppo"):
        spec = AlgorithmSpec(loss=loss, advantage="dr_grpo")
        batch = build_batch(groups(), spec, max_tokens=8, version=0)
        from nanoengine.packing import make_micro_batches

        (micro,) = make_micro_batches(batch.samples, max_tokens=64)
        logp_T = micro.fields_T["rollout_logp"].clone().requires_grad_()
        total, _ = batch.loss_fn(logp_T, None, micro)
        total.backward()
        gradients.append(logp_T.grad)
    assert torch.equal(gradients[0], gradients[1]) and gradients[0].abs().sum() > 0


def test_what_cannot_be_found_is_refused_by_name(mine: Path) -> None:
    with pytest.raises(ValueError, match=r"--rl.algorithm.loss .*mine.py:nothing: .* no 'nothing'"):
        AlgorithmSpec(loss=f"{mine}:nothing")
    with pytest.raises(ValueError, match=r"mine.py:broken: 3 is none; write a function"):
        AlgorithmSpec(loss=f"{mine}:broken")
    with pytest.raises(
        ValueError, match=r"it defines more than one; name the one, .*mine.py:centred"
    ):
        AlgorithmSpec(loss=str(mine))
    with pytest.raises(ValueError, match="choose one of reinforce, ppo"):
        AlgorithmSpec(loss="nope")


def test_rewards_of_turns_belong_to_the_outcome_unless_turns_are_rewarded_by_themselves() -> None:
    ((first, second),) = groups()
    for rollout in (first, second):
        rollout.reward, rollout.turn_rewards = 1.0, []
    second.turn_rewards = [-0.25]
    batch = build_batch(
        [[first, second]], AlgorithmSpec(advantage="dr_grpo"), max_tokens=8, version=0
    )
    assert [s.fields["advantage"][1] for s in batch.samples] == [0.125, -0.125]
    assert batch.metrics["groups_with_signal"] == 1.0
