"""Pass@k training: a group is judged by the chance that one of k members succeeds (2508.10751).

A member is worth the mean, over all sets of k members that it is in, of whether the set has a
success. With G members of which W failed no set has to be drawn for that (the paper's analytical
derivation):

    P = 1 − C(W, k)/C(G, k),   σ = √(P·(1 − P))
    A = (1 − P)/(σ + δ)                               of a success
    A = (1 − P − C(W−1, k−1)/C(G−1, k−1))/(σ + δ)     of a failure

They add up to 0, and are all 0 where no set has a success, or every set has one (W < k): a task
that is solved often teaches no more. With k = 1 it is GRPO with the deviation of the whole group,
not of a sample. PKPO (arXiv 2505.15201) leaves out σ and takes any rewards.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import comb

import torch
from torch import Tensor

from nanorl.algorithms.modifier import Modifier
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.group_advantage import DELTA, compare, in_groups
from nanorl.grpo import AdvantageBatch
from nanorl.types import Rollout


class Successes(Modifier):
    """Compares rollouts by their success, and by nothing else that they earned (`pass_at_k`)."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        pass

    def earned(self, rollout: Rollout) -> Hashable:
        """Say whether it succeeded (`Rollout.is_success`)."""
        return rollout.is_success

    def reward(
        self, rollouts: Sequence[Rollout], batch: AdvantageBatch, max_tokens: int
    ) -> AdvantageBatch:
        """The batch with rewards of 1 and 0."""
        success_R = torch.tensor([float(one.is_success) for one in rollouts])
        return replace(batch, reward_R=success_R)


def pass_at_k(reward_R: Tensor, group_ids: Sequence[Hashable], k: int) -> Tensor:
    """The advantages above; 0 in a group of k members or fewer. ValueError for other rewards than 0
    and 1."""
    is_other_R = (reward_R != 0) & (reward_R != 1)
    if bool(is_other_R.any()):
        raise ValueError(
            f"reward {float(reward_R[is_other_R][0]):g}: advantage='pass_at_k' counts successes, "
            "so rewards must be 0 or 1; choose another advantage for graded ones"
        )
    group = in_groups(reward_R, group_ids)
    members = zip(group.size_R.tolist(), group.mean_R.tolist(), strict=True)
    counts = [(round(size), round(size * (1 - mean))) for size, mean in members]
    pairs = zip(counts, reward_R.tolist(), strict=True)
    found = [_advantage(size, failures, k, reward == 1) for (size, failures), reward in pairs]
    return reward_R.new_tensor(found)


def _advantage(size: int, num_failures: int, k: int, is_success: bool) -> float:
    if size <= k:
        return 0.0  # one set, or none: there is nothing to compare it with
    fails = comb(num_failures, k) / comb(size, k)
    sigma = (fails * (1 - fails)) ** 0.5
    if is_success:
        return fails / (sigma + DELTA)
    beside = comb(num_failures - 1, k - 1) / comb(size - 1, k - 1)  # that the others of it fail
    return (fails - beside) / (sigma + DELTA)


def pass_at_k_of_batch(spec: AlgorithmSpec, batch: AdvantageBatch) -> tuple[Tensor, None]:
    """`pass_at_k` with the k of the options."""
    return compare(lambda reward_R, ids: pass_at_k(reward_R, ids, spec.pass_k), spec, batch), None
