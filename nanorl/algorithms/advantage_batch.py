"""Advantages of one whole optimizer batch, as an `AlgorithmSpec` asks for them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanorl.algorithms import advantages
from nanorl.algorithms.spec import AlgorithmSpec, required


@dataclass(frozen=True, kw_only=True)
class AdvantageBatch:
    """The whole optimizer batch, packed: R rollouts, one sequence each, T tokens."""

    reward_R: Tensor
    group_ids: Sequence[Hashable]
    mask_T: Tensor
    sequence_ids_T: Tensor
    old_logp_T: Tensor | None = None
    ref_logp_T: Tensor | None = None
    value_T: Tensor | None = None


def compute_advantages(spec: AlgorithmSpec, batch: AdvantageBatch) -> tuple[Tensor, Tensor | None]:
    """`(advantage_T, return_T)`; returns (the critic's targets) only for "gae"."""
    advantage_T, return_T = _base_advantages(spec, batch)
    if spec.distill_coef:
        old_T = required(batch.old_logp_T, "old_logp_T", "distill_coef")
        ref_T = required(batch.ref_logp_T, "ref_logp_T", "distill_coef")
        advantage_T = advantages.distill(advantage_T, old_T, ref_T, batch.mask_T, spec.distill_coef)
    return advantage_T, return_T


def _base_advantages(spec: AlgorithmSpec, batch: AdvantageBatch) -> tuple[Tensor, Tensor | None]:
    mask_T, ids_T = batch.mask_T, batch.sequence_ids_T
    by_group = {
        "grpo": advantages.grpo,
        "dr_grpo": advantages.dr_grpo,
        "rloo": advantages.rloo,
        "maxrl": advantages.maxrl,
    }
    if spec.advantage in by_group:
        advantage_R = by_group[spec.advantage](batch.reward_R, batch.group_ids)
        return advantages.broadcast(advantage_R, mask_T, ids_T), None
    if spec.advantage == "reinforce_pp_baseline":
        return (
            advantages.reinforce_pp_baseline(batch.reward_R, batch.group_ids, mask_T, ids_T),
            None,
        )
    reward_T = advantages.outcome_rewards(batch.reward_R, mask_T, ids_T)
    if spec.advantage == "none":
        return torch.zeros_like(reward_T), None
    if spec.kl_reward_coef:
        old_T = required(batch.old_logp_T, "old_logp_T", "kl_reward_coef")
        ref_T = required(batch.ref_logp_T, "ref_logp_T", "kl_reward_coef")
        reward_T = advantages.kl_penalised(reward_T, old_T, ref_T, mask_T, spec.kl_reward_coef)
    if spec.advantage == "reinforce_pp":
        return advantages.reinforce_pp(reward_T, mask_T, ids_T, gamma=spec.gamma), None
    value_T = required(batch.value_T, "value_T", "advantage='gae'")
    advantage_T, return_T = advantages.gae(
        reward_T, value_T, mask_T, ids_T, gamma=spec.gamma, lam=spec.lam
    )
    return advantages.whiten(advantage_T, mask_T) if spec.whiten_gae else advantage_T, return_T
