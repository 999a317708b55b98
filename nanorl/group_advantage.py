"""Advantages: how much better than the rest of its group each rollout was (GRPO, arXiv 2402.03300).

Groups are found by `group_ids`, never by position: a batch may be shuffled, and groups may differ
in size. Suffixes: R rollouts, S token sequences, T packed tokens.
Left out: all other estimators (algorithms/registry.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanorl.grpo import GRPO, AdvantageBatch, GroupEstimator, part

DELTA = 1e-6
"""What keeps a division from 0."""

Estimator = Callable[[GRPO, AdvantageBatch], tuple[Tensor, Tensor | None]]
"""(spec, batch) -> ([T] advantages, [T] returns, the targets of a critic, or None)."""


def compute_advantages(spec: GRPO, batch: AdvantageBatch) -> tuple[Tensor, Tensor | None]:
    """`(advantage_T, return_T)`; returns (the critic's targets) only for "gae"."""
    estimate: Estimator = part("advantage", spec.advantage)
    advantage_T, return_T = estimate(spec, batch)
    return spec.advantages(batch, advantage_T), return_T


def of_groups(spec: GRPO, batch: AdvantageBatch) -> tuple[Tensor, None]:
    """`grpo` of the whole batch."""
    return compare(grpo, spec, batch), None


def compare(estimator: GroupEstimator, spec: GRPO, batch: AdvantageBatch) -> Tensor:
    """[T] What the estimator says of whole rollouts, or of what the spec compares instead, on their
    action tokens."""
    if (compared_T := spec.compare(estimator, batch)) is not None:
        return compared_T
    advantage_R = estimator(batch.reward_R, batch.group_ids)
    return broadcast(advantage_R, batch.mask_T, batch.rollout_of_token)


def grpo(reward_R: Tensor, group_ids: Sequence[Hashable]) -> Tensor:
    """`(R − mean_g)/(std_g + δ)` with the sample standard deviation; a group of one gives 0."""
    group = in_groups(reward_R, group_ids)
    square_g = segment_sum(group.centred_R**2, group.index_R, group.num_groups)
    # A lone member has centred reward 0: the clamp only keeps its 0/0 from being NaN.
    std_R = (square_g[group.index_R] / (group.size_R - 1).clamp(min=1)).sqrt()
    return (group.centred_R / (std_R + DELTA)).to(reward_R.dtype)


def broadcast(advantage_R: Tensor, mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """Every action token gets its rollout's advantage; other tokens get 0."""
    return advantage_R[sequence_ids_T] * mask_T.to(advantage_R.dtype)


class Groups(NamedTuple):
    """Every rollout beside its group, in fp64."""

    centred_R: Tensor  # reward less the group's mean
    mean_R: Tensor
    size_R: Tensor
    index_R: Tensor  # which group, 0 .. num_groups − 1
    num_groups: int


def in_groups(reward_R: Tensor, group_ids: Sequence[Hashable]) -> Groups:
    """The rewards by group. `ValueError` unless each has an id."""
    if len(group_ids) != reward_R.numel():
        raise ValueError(f"{len(group_ids)} group ids for {reward_R.numel()} rewards: one each")
    index_R, num_groups = index_by_id(group_ids)
    index_R = index_R.to(reward_R.device)
    # Sums of fp32 rewards are exact in fp64. In fp32 the mean of equal rewards may differ from them
    # by a rounding error, which a division by a deviation of 0 + δ makes an advantage.
    wide_R = reward_R.double()
    size_g = segment_sum(torch.ones_like(wide_R), index_R, num_groups)
    mean_R = (segment_sum(wide_R, index_R, num_groups) / size_g)[index_R]
    return Groups(wide_R - mean_R, mean_R, size_g[index_R], index_R, num_groups)


def segment_sum(value_T: Tensor, segment_ids_T: Tensor, num_segments: int) -> Tensor:
    """Sum of the values of each segment, shape [num_segments], differentiable."""
    total_S = value_T.new_zeros(num_segments)
    return total_S.index_add(0, segment_ids_T, value_T)


def index_by_id(ids: Sequence[Hashable]) -> tuple[Tensor, int]:
    """Dense indices of arbitrary keys, in order of first appearance, and how many there are."""
    order: dict[Hashable, int] = {}
    index = [order.setdefault(key, len(order)) for key in ids]
    return torch.tensor(index, dtype=torch.long), len(order)
