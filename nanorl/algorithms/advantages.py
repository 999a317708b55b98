"""Advantages: how much better than expected each rollout, turn or token was.

Groups are found by `group_ids`, never by position: a batch may be shuffled, and groups may differ
in size. Suffixes: R rollouts, T packed tokens. `sequence_ids_T` says which rollout a token is of.
Left out: the critic that provides the values (an engine computes them).
Sources: GRPO (arXiv 2402.03300), Dr.GRPO (2503.20783), RLOO (2402.14740), REINFORCE++
(2501.03262), MaxRL (2602.02710), GAE (1506.02438).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from nanorl.algorithms.segments import index_by_id, segment_sum

DELTA = 1e-6


def _group_mean(reward_R: Tensor, group_ids: Sequence[Hashable]) -> tuple[Tensor, Tensor, Tensor]:
    """Per rollout: its group's mean, the group's size, and the dense group index."""
    if len(group_ids) != reward_R.numel():
        raise ValueError(f"{len(group_ids)} group ids for {reward_R.numel()} rewards: one each")
    index_R, num_groups = index_by_id(group_ids)
    index_R = index_R.to(reward_R.device)
    size_g = segment_sum(torch.ones_like(reward_R), index_R, num_groups)
    mean_g = segment_sum(reward_R, index_R, num_groups) / size_g
    return mean_g[index_R], size_g[index_R], index_R


def dr_grpo(reward_R: Tensor, group_ids: Sequence[Hashable]) -> Tensor:
    """`R − mean_g`."""
    return reward_R - _group_mean(reward_R, group_ids)[0]


def grpo(reward_R: Tensor, group_ids: Sequence[Hashable]) -> Tensor:
    """`(R − mean_g)/(std_g + δ)` with the sample standard deviation; a group of one gives 0."""
    mean_R, size_R, index_R = _group_mean(reward_R, group_ids)
    centred_R = reward_R - mean_R
    square_g = segment_sum(centred_R**2, index_R, int(index_R.max()) + 1 if len(index_R) else 0)
    std_R = (square_g[index_R] / (size_R - 1).clamp(min=1)).sqrt()
    return centred_R / (std_R + DELTA)


def rloo(reward_R: Tensor, group_ids: Sequence[Hashable]) -> Tensor:
    """`G/(G−1)·(R − mean_g)`: the baseline is the mean of the others; a group of one gives 0."""
    mean_R, size_R, _ = _group_mean(reward_R, group_ids)
    return (reward_R - mean_R) * size_R / (size_R - 1).clamp(min=1)


def maxrl(reward_R: Tensor, group_ids: Sequence[Hashable]) -> Tensor:
    """`(R − mean_g)/(mean_g + δ)`, for rewards that are not negative."""
    mean_R, _, _ = _group_mean(reward_R, group_ids)
    return (reward_R - mean_R) / (mean_R + DELTA)


def broadcast(advantage_R: Tensor, mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """Every action token gets its rollout's advantage; other tokens get 0."""
    return advantage_R[sequence_ids_T] * mask_T.to(advantage_R.dtype)


def whiten(value_T: Tensor, mask_T: Tensor, eps: float = 1e-8) -> Tensor:
    """Zero mean and unit (population) variance over the masked-in tokens of the whole batch."""
    mask_T = mask_T.to(value_T.dtype)
    count = mask_T.sum().clamp(min=1)
    centred_T = (value_T - (value_T * mask_T).sum() / count) * mask_T
    return centred_T / ((centred_T**2).sum() / count).sqrt().clamp(min=eps)


def last_action_tokens(mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """1 at the last action token of every sequence that has one, else 0; fp32."""
    action = mask_T.nonzero().squeeze(-1)
    last_T = torch.zeros(mask_T.numel(), dtype=torch.float32, device=mask_T.device)
    if action.numel():
        owner = sequence_ids_T[action]
        is_last = torch.ones_like(owner, dtype=torch.bool)
        is_last[:-1] = owner[1:] != owner[:-1]
        last_T[action[is_last]] = 1.0
    return last_T


def outcome_rewards(reward_R: Tensor, mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """The rollout's reward placed on its last action token."""
    return reward_R[sequence_ids_T] * last_action_tokens(mask_T, sequence_ids_T).to(reward_R.dtype)


def reinforce_pp(
    reward_T: Tensor,
    k1_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    *,
    gamma: float = 1.0,
    kl_coef: float = 0.0,
) -> Tensor:
    """Discounted return of `reward − β·k1` over action tokens only, then whitened globally."""
    gain_T = reward_T - kl_coef * k1_T
    zero_T = torch.zeros_like(gain_T)
    return_T, _ = gae(gain_T, zero_T, mask_T, sequence_ids_T, gamma=gamma, lam=1.0)
    return whiten(return_T, mask_T)


def reinforce_pp_baseline(
    reward_R: Tensor, group_ids: Sequence[Hashable], mask_T: Tensor, sequence_ids_T: Tensor
) -> Tensor:
    """`R − mean_g` on every action token, then whitened globally; KL is a separate k2 loss."""
    return whiten(broadcast(dr_grpo(reward_R, group_ids), mask_T, sequence_ids_T), mask_T)


def gae(
    reward_T: Tensor,
    value_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns on each sequence compressed to its action tokens.

    The value after an action token is that of the next *action* token: tool output in between
    neither discounts nor bootstraps. Both results are 0 outside the mask.
    """
    lengths = sequence_ids_T.unique_consecutive(return_counts=True)[1]
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return kernels.gae(reward_T, value_T, cu_seqlens, gamma, lam, mask_T=mask_T)


def distill(
    advantage_T: Tensor, old_logp_T: Tensor, teacher_logp_T: Tensor, mask_T: Tensor, coef: float
) -> Tensor:
    """On-policy distillation: `A − λ·(log π_o − log π_T)` on every sampled token."""
    return advantage_T - coef * (old_logp_T - teacher_logp_T) * mask_T.to(advantage_T.dtype)


def turn_advantages(
    turn_rewards: Sequence[Sequence[float]], group_ids: Sequence[Hashable], *, gamma: float = 1.0
) -> list[list[float]]:
    """Advantages of every turn of every rollout, from rewards that sit on turns.

    A turn that every member of the group has is compared by return-to-go at that turn. Later turns
    would be compared with the few members that live so long, which is biased: they get the outcome
    advantage (the rollout's whole return minus the group's mean).
    """
    returns = [_returns_to_go(rewards, gamma) for rewards in turn_rewards]
    result = [[0.0] * len(turns) for turns in returns]
    index_R, num_groups = index_by_id(group_ids)
    for group in range(num_groups):
        members = (index_R == group).nonzero().flatten().tolist()
        outcomes = {r: returns[r][0] if returns[r] else 0.0 for r in members}
        outcome_mean = sum(outcomes.values()) / len(members)
        shared = min(len(returns[r]) for r in members)
        for k in range(max(len(returns[r]) for r in members)):
            baseline = sum(returns[r][k] for r in members) / len(members) if k < shared else 0.0
            for r in members:
                if k < shared:
                    result[r][k] = returns[r][k] - baseline
                elif k < len(returns[r]):
                    result[r][k] = outcomes[r] - outcome_mean
    return result


def _returns_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    returns, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        returns.append(later)
    return returns[::-1]


def has_signal(is_correct_R: Tensor, group_ids: Sequence[Hashable]) -> Tensor:
    """DAPO's dynamic sampling: True for rollouts of groups with 0 < number correct < G."""
    mean_R, _, _ = _group_mean(is_correct_R.to(torch.float64), group_ids)
    return (mean_R > 0) & (mean_R < 1)


def overlong_penalty(length_R: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft penalty: 0 up to `max_length − buffer`, then linear to −1 at `max_length`."""
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer}: must be in 1..max_length={max_length}")
    over_R = length_R.to(torch.float32) - (max_length - buffer)
    return -(over_R / buffer).clamp(0.0, 1.0)
