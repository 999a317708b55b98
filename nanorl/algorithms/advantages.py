"""Advantages of rollouts against the others of their group, beyond GRPO's (group_advantage.py).

Sources: Dr.GRPO (arXiv 2503.20783), RLOO (2402.14740), MaxRL (2602.02710), OPO (2505.23585), GDPO
(2601.05242). Suffixes: R rollouts, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.group_advantage import (
    DELTA,
    Estimator,
    broadcast,
    compare,
    grpo,
    in_groups,
    segment_sum,
)
from nanorl.grpo import GRPO, AdvantageBatch, GroupEstimator


def dr_grpo(reward_R: Tensor, group_ids: Sequence[Hashable]) -> Tensor:
    """`R − mean_g`."""
    return in_groups(reward_R, group_ids).centred_R.to(reward_R.dtype)


def rloo(reward_R: Tensor, group_ids: Sequence[Hashable]) -> Tensor:
    """`G/(G−1)·(R − mean_g)`: the baseline is the mean of the others; a group of one gives 0."""
    group = in_groups(reward_R, group_ids)
    factor_R = group.size_R / (group.size_R - 1).clamp(min=1)
    return (group.centred_R * factor_R).to(reward_R.dtype)


def maxrl(reward_R: Tensor, group_ids: Sequence[Hashable]) -> Tensor:
    """`(R − mean_g)/(mean_g + δ)`. `ValueError` for a negative reward: a mean near or below 0 would
    give advantages without bound, or of the wrong sign."""
    if bool((reward_R < 0).any()):
        raise ValueError(
            f"reward {float(reward_R.min()):g}: advantage='maxrl' divides by the mean of a group, "
            "so rewards must be 0 or more; shift them, or choose another advantage"
        )
    group = in_groups(reward_R, group_ids)
    return (group.centred_R / (group.mean_R + DELTA)).to(reward_R.dtype)


def opo(reward_R: Tensor, group_ids: Sequence[Hashable], length_R: Tensor) -> Tensor:
    """`R − Σ l·R/Σ l` over the group: the baseline of least variance where the gradient of a
    rollout grows with the number l of its action tokens. A group without any: `R − mean_g`."""
    group = in_groups(reward_R, group_ids)
    sums = (group.index_R, group.num_groups)
    total_g = segment_sum(length_R.double(), *sums)
    # Of centred rewards, so that equal ones give exactly 0.
    drift_g = segment_sum(length_R.double() * group.centred_R, *sums) / total_g.clamp(min=1)
    return (group.centred_R - drift_g[group.index_R]).to(reward_R.dtype)


def gdpo(
    parts: Mapping[str, Tensor], weights: Mapping[str, float], group_ids: Sequence[Hashable]
) -> Tensor:
    """`grpo` of each part of the reward alone, summed by weight, then `(x − mean)/(std + δ)` over
    all rollouts of the batch. Rewards that are added first would give a rare part no say beside a
    common one of the same sum. Parts and result are [R]."""
    apart = [weight * grpo(parts[name], group_ids).double() for name, weight in weights.items()]
    total_R = torch.stack(apart).sum(0)
    centred_R = total_R - total_R.mean()
    std = (centred_R.square().sum() / max(len(total_R) - 1, 1)).sqrt()
    return (centred_R / (std + DELTA)).to(next(iter(parts.values())).dtype)


def _compared(estimator: GroupEstimator) -> Estimator:
    """An estimator that compares the members of a group, for every action token of a batch."""

    def advantages(spec: GRPO, batch: AdvantageBatch) -> tuple[Tensor, None]:
        return compare(estimator, spec, batch), None

    return advantages


DR_GRPO, RLOO, MAXRL = _compared(dr_grpo), _compared(rloo), _compared(maxrl)


def opo_of_batch(spec: GRPO, batch: AdvantageBatch) -> tuple[Tensor, None]:
    """`opo` with the number of action tokens of each rollout."""
    rollouts = (batch.rollout_of_token, batch.reward_R.numel())
    length_R = segment_sum(batch.mask_T.double(), *rollouts)
    return compare(lambda reward_R, ids: opo(reward_R, ids, length_R), spec, batch), None


def gdpo_of_batch(spec: AlgorithmSpec, batch: AdvantageBatch) -> tuple[Tensor, None]:
    """`gdpo` of the parts that `reward_parts` names."""
    if batch.reward_parts is None:
        raise ValueError("reward_parts is missing: advantage='gdpo' reads it")
    advantage_R = gdpo(batch.reward_parts, spec.part_weights, batch.group_ids)
    return broadcast(advantage_R, batch.mask_T, batch.rollout_of_token), None


def none_of_batch(spec: GRPO, batch: AdvantageBatch) -> tuple[Tensor, None]:
    """0 everywhere: nothing is learnt from rewards."""
    zero_R = torch.zeros_like(batch.reward_R)
    return broadcast(zero_R, batch.mask_T, batch.rollout_of_token), None
