"""Kimi k1.5's length reward: among the members of a group, short is better (arXiv 2501.12599).

    λ = 1/2 − (l − min l)/(max l − min l)   over all members, l the tokens that the policy sampled
    R += coef · λ          of a member that succeeded
    R += coef · min(0, λ)  of one that did not: short failures earn nothing by it

Where all members are of the same length it is 0. Left out: the paper's warm-up, in which the first
part of training has no such reward: begin with it in a fork of a run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanorl.algorithms.modifier import Modifier
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.group_advantage import index_by_id
from nanorl.grpo import AdvantageBatch
from nanorl.types import Rollout


class LengthReward(Modifier):
    """`length_coef`: the reward falls with the length among the group."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.coef = spec.length_coef

    def earned(self, rollout: Rollout) -> Hashable:
        """The total, and the length: members that differ in either have unlike rewards."""
        return rollout.total_reward, num_sampled(rollout)

    def reward(
        self, rollouts: Sequence[Rollout], batch: AdvantageBatch, max_tokens: int
    ) -> AdvantageBatch:
        """The batch with the length reward in its rewards."""
        length_R = torch.tensor([num_sampled(one) for one in rollouts])
        is_success_R = torch.tensor([one.is_success for one in rollouts])
        shift_R = length_reward(length_R, is_success_R, batch.group_ids)
        return replace(batch, reward_R=batch.reward_R + self.coef * shift_R)


def num_sampled(rollout: Rollout) -> int:
    """The tokens that the policy sampled in all sequences, those that are masked too."""
    # By versions: a mask may have been cleared since (truncation.py).
    return sum(version >= 0 for one in rollout.sequences for version in one.versions)


def length_reward(length_R: Tensor, is_success_R: Tensor, group_ids: Sequence[Hashable]) -> Tensor:
    """[R] fp32, λ of the successes and `min(0, λ)` of the others."""
    index_R, num_groups = index_by_id(group_ids)
    length_R = length_R.double()
    nothing_g = length_R.new_zeros(num_groups)
    least_g = nothing_g.scatter_reduce(0, index_R, length_R, "amin", include_self=False)
    most_g = nothing_g.scatter_reduce(0, index_R, length_R, "amax", include_self=False)
    spread_R = (most_g - least_g)[index_R]
    share_R = (length_R - least_g[index_R]) / spread_R.clamp(min=1)
    lam_R = torch.where(spread_R > 0, 0.5 - share_R, 0.0)
    return torch.where(is_success_R, lam_R, lam_R.clamp(max=0.0)).float()
