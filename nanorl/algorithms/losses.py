"""Losses of a token beyond PPO's clip (policy_loss.py), each a formula and the class that names it.

Sources: GSPO (arXiv 2507.18071), SAPO (2511.20347), CISPO (2506.13585), decoupled PPO (2110.00641),
value loss (1707.06347). Those with a file of their own: geometric_mean.py, dppo.py, covariance.py,
distillation.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanorl.algorithms.segments import segment_mean, segments_of
from nanorl.grpo import LossBatch
from nanorl.policy_loss import ClippedLoss, clipped, ppo


class Reinforce(ClippedLoss):
    """`reinforce`: no ratio and no clip."""

    def __call__(self, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """[T] with the gradient of `logp_T`."""
        return reinforce(logp_T, batch.advantage_T)


def reinforce(logp_T: Tensor, advantage_T: Tensor) -> Tensor:
    """`−A·log π_θ`."""
    return -advantage_T * logp_T


class GSPO(ClippedLoss):
    """`gspo`: one ratio for a whole sequence."""

    def __call__(self, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """[T] with the gradient of `logp_T`."""
        low, high = self.spec.clip
        A_T = batch.advantage_T
        return gspo(logp_T, old_T, A_T, segments_of(batch), clip_low=low, clip_high=high)

    def ratio(self, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """[T] that of the token's sequence."""
        return gspo_ratio(logp_T, old_T, *segments_of(batch))


def gspo_ratio(
    logp_T: Tensor,
    old_logp_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    num_sequences: int,
) -> Tensor:
    """`sg[s]·π_θ/sg[π_θ]` with `s = exp(mean over action tokens of log r)` of the sequence."""
    mean_S = segment_mean(logp_T.detach() - old_logp_T, mask_T, sequence_ids_T, num_sequences)
    return mean_S.exp()[sequence_ids_T] * (logp_T - logp_T.detach()).exp()


def gspo(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantage_T: Tensor,
    segments: tuple[Tensor, Tensor, int],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """The PPO clip on a sequence-level ratio. Sequences must be whole (`segments_of`)."""
    ratio_T = gspo_ratio(logp_T, old_logp_T, *segments)
    return clipped(ratio_T, advantage_T, clip_low=clip_low, clip_high=clip_high)


class SAPO(ClippedLoss):
    """`sapo`: a soft gate instead of the clip."""

    def __call__(self, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """[T] with the gradient of `logp_T`."""
        taus = {"tau_positive": self.spec.tau_positive, "tau_negative": self.spec.tau_negative}
        return sapo(logp_T, old_T, batch.advantage_T, **taus)


def sapo(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantage_T: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Tensor:
    """`−(4/τ)·σ(τ(r−1))·A`: a soft gate instead of a clip, of slope 1 at r = 1."""
    ratio_T = (logp_T - old_logp_T).exp()
    tau_T = torch.where(advantage_T > 0, ratio_T.new_tensor(tau_positive), tau_negative)
    return -(4 / tau_T) * torch.sigmoid(tau_T * (ratio_T - 1)) * advantage_T


class CISPO(ClippedLoss):
    """`cispo`: the weight is clipped, so no token loses its gradient."""

    def __call__(self, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """[T] with the gradient of `logp_T`."""
        low, high = self.spec.clip
        return cispo(logp_T, old_T, batch.advantage_T, clip_low=low, clip_high=high)


def cispo(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """`−sg[clip(r)]·A·log π_θ`: the weight is clipped, no token loses its gradient."""
    ratio_T = (logp_T.detach() - old_logp_T).exp().clamp(1 - clip_low, 1 + clip_high)
    return -ratio_T * advantage_T * logp_T


class DecoupledPPO(ClippedLoss):
    """`decoupled_ppo`: what is stale is weighed apart from the clip."""

    def __call__(self, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """[T] with the gradient of `logp_T`."""
        low, high = self.spec.clip
        mu_T, A_T = batch.rollout_logp_T, batch.advantage_T
        return decoupled_ppo(logp_T, old_T, mu_T, A_T, clip_low=low, clip_high=high)


def decoupled_ppo(
    logp_T: Tensor,
    old_logp_T: Tensor,
    rollout_logp_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """`−sg[π_o/μ]·min(r·A, clip(r)·A)`: μ only weighs, o is what the clip is around."""
    weight_T = (old_logp_T - rollout_logp_T).detach().exp()
    return weight_T * ppo(
        logp_T, old_logp_T, advantage_T, clip_low=clip_low, clip_high=clip_high, dual_clip=None
    )


def value_loss(
    value_T: Tensor, old_value_T: Tensor, return_T: Tensor, *, clip: float = 0.2
) -> Tensor:
    """`½·max((V − Ret)², (clip(V, V_o ± ε) − Ret)²)`."""
    bounded_T = torch.maximum(torch.minimum(value_T, old_value_T + clip), old_value_T - clip)
    return 0.5 * torch.maximum((value_T - return_T) ** 2, (bounded_T - return_T) ** 2)
