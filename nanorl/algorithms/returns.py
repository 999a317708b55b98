"""Advantages of tokens, from the rewards that follow each of them: REINFORCE++ and PPO's GAE.

Sources: REINFORCE++ (arXiv 2501.03262), GAE (1506.02438). Suffixes: S token sequences, T packed
tokens. Left out: the critic that provides the values (an engine computes them).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from nanorl.algorithms.advantages import dr_grpo
from nanorl.algorithms.segments import required
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.algorithms.turn_rewards import turn_token_rewards, turns_of
from nanorl.group_advantage import compare
from nanorl.grpo import AdvantageBatch


def whiten(value_T: Tensor, mask_T: Tensor, eps: float = 1e-8) -> Tensor:
    """Zero mean and unit (population) variance over the masked-in tokens of the whole batch.

    `(x − mean)/sqrt(variance + eps)`, as in verl: values that differ by rounding errors stay
    near 0. In fp64, so exactly 0 where all values are equal fp32 numbers.
    """
    is_action_T = mask_T.bool()
    value_A = value_T[is_action_T].double()
    if not value_A.numel():
        return torch.zeros_like(value_T)
    centred_A = value_A - value_A.mean()
    white_A = centred_A / (centred_A.square().mean() + eps).sqrt()
    return torch.zeros_like(value_T).masked_scatter(is_action_T, white_A.to(value_T.dtype))


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


def outcome_rewards(reward_S: Tensor, mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """The reward of each sequence placed on its last action token."""
    return reward_S[sequence_ids_T] * last_action_tokens(mask_T, sequence_ids_T).to(reward_S.dtype)


def kl_penalised(
    reward_T: Tensor, old_logp_T: Tensor, ref_logp_T: Tensor, mask_T: Tensor, coef: float
) -> Tensor:
    """`r − β·k1` on every action token, `k1 = log π_o − log π_ref`."""
    return reward_T - coef * torch.where(mask_T.bool(), old_logp_T - ref_logp_T, 0.0)


def reinforce_pp(
    reward_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, *, gamma: float = 1.0
) -> Tensor:
    """Discounted return over action tokens only, then whitened globally. The KL penalty, if any,
    is in the rewards already (`kl_penalised`)."""
    zero_T = torch.zeros_like(reward_T)
    return_T, _ = gae(reward_T, zero_T, mask_T, sequence_ids_T, gamma=gamma, lam=1.0)
    return whiten(return_T, mask_T)


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


def reinforce_pp_of_batch(
    spec: AlgorithmSpec, batch: AdvantageBatch
) -> tuple[Tensor, Tensor | None]:
    mask_T, ids_T = batch.mask_T, batch.sequence_ids_T
    return reinforce_pp(token_rewards(spec, batch), mask_T, ids_T, gamma=spec.gamma), None


def reinforce_pp_baseline_of_batch(
    spec: AlgorithmSpec, batch: AdvantageBatch
) -> tuple[Tensor, Tensor | None]:
    """`R − mean_g` on every action token, then whitened globally; KL is a separate k2 loss."""
    return whiten(compare(dr_grpo, spec, batch), batch.mask_T), None


def gae_of_batch(spec: AlgorithmSpec, batch: AdvantageBatch) -> tuple[Tensor, Tensor | None]:
    mask_T, ids_T = batch.mask_T, batch.sequence_ids_T
    value_T = required(batch.value_T, "value_T", "advantage='gae'")
    reward_T = token_rewards(spec, batch)
    advantage_T, return_T = gae(reward_T, value_T, mask_T, ids_T, gamma=spec.gamma, lam=spec.lam)
    return whiten(advantage_T, mask_T) if spec.whiten_gae else advantage_T, return_T


def token_rewards(spec: AlgorithmSpec, batch: AdvantageBatch) -> Tensor:
    """Rewards at the tokens that earned them, less the KL penalty if there is one."""
    mask_T, ids_T = batch.mask_T, batch.sequence_ids_T
    if spec.reward_level == "outcome":
        ids_S = batch.rollout_ids_S
        reward_S = batch.reward_R if ids_S is None else batch.reward_R[ids_S]
        reward_T = outcome_rewards(reward_S, mask_T, ids_T)
    else:
        reward_T = turn_token_rewards(turns_of(batch), ids_T)
    if spec.kl_reward_coef:
        old_T = required(batch.old_logp_T, "old_logp_T", "kl_reward_coef")
        ref_T = required(batch.ref_logp_T, "ref_logp_T", "kl_reward_coef")
        reward_T = kl_penalised(reward_T, old_T, ref_T, mask_T, spec.kl_reward_coef)
    return reward_T
