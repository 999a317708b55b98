"""Tokens chosen by their covariance, `(A − mean A)·(log π − mean log π)`, means over the batch.

Where it is large an update makes a likely token likelier, and entropy falls (arXiv 2505.22617). The
choice is made once, over the whole optimizer batch, by the log-probs that it was sampled with, and
depends neither on the order of the tokens nor on a seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.packing import Sample
from nanorl.algorithms.modifier import Modifier
from nanorl.algorithms.segments import required
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import with_field
from nanorl.grpo import AdvantageBatch, Field, LossBatch
from nanorl.policy_loss import ClippedLoss, clipped


class ChosenTokens(Modifier):
    """Marks the tokens that the loss treats in its own way."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.spec = spec

    def mark(
        self, samples: list[Sample], batch: AdvantageBatch, advantage_T: Tensor
    ) -> list[Sample]:
        """The samples with 1 in `Field.CHOSEN` for those."""
        assert batch.old_logp_T is not None, "the trainer's, or those of the rollouts"
        chosen_T = choose_by_covariance(self.spec, advantage_T, batch.old_logp_T, batch.mask_T)
        lengths = [len(sample.tokens) for sample in samples]
        return with_field(samples, Field.CHOSEN, chosen_T.split(lengths))


class ClipCov(ClippedLoss):
    """`clip_cov`: such tokens learn nothing."""

    def __call__(self, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """[T] with the gradient of `logp_T`."""
        low, high = self.spec.clip
        chosen_T = required(batch.chosen_T, "chosen_T", "loss='clip_cov'")
        A_T = batch.advantage_T
        return clip_cov(logp_T, old_T, A_T, chosen_T, clip_low=low, clip_high=high)


class KLCov(ClippedLoss):
    """`kl_cov`: such tokens may not move far."""

    def __call__(self, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """[T] with the gradient of `logp_T`."""
        chosen_T = required(batch.chosen_T, "chosen_T", "loss='kl_cov'")
        coef = self.spec.covariance_kl_coef
        return kl_cov(logp_T, old_T, batch.advantage_T, chosen_T, coef=coef)


def clip_cov(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantage_T: Tensor,
    chosen_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """PPO without the chosen tokens."""
    ratio_T = (logp_T - old_logp_T).exp()
    return (1 - chosen_T) * clipped(ratio_T, advantage_T, clip_low=clip_low, clip_high=clip_high)


def kl_cov(
    logp_T: Tensor, old_logp_T: Tensor, advantage_T: Tensor, chosen_T: Tensor, *, coef: float = 1.0
) -> Tensor:
    """`−r·A`, on the chosen tokens `+ coef·|log r|`, which acts from a batch's second step on."""
    log_ratio_T = logp_T - old_logp_T
    return -log_ratio_T.exp() * advantage_T + coef * chosen_T * log_ratio_T.abs()


def choose_by_covariance(
    spec: AlgorithmSpec, advantage_T: Tensor, logp_T: Tensor, mask_T: Tensor
) -> Tensor:
    """fp32 [T], 1 for the tokens that clip_cov (any, of a band) or kl_cov (those with the largest)
    chooses; at least one where there is any to choose from."""
    is_action_T = mask_T.bool()
    advantage_A, logp_A = advantage_T[is_action_T].double(), logp_T[is_action_T].double()
    covariance_A = (advantage_A - advantage_A.mean()) * (logp_A - logp_A.mean())
    rank_A = -covariance_A
    if spec.loss == "clip_cov":
        in_band_A = (covariance_A > spec.covariance_low) & (covariance_A < spec.covariance_high)
        rank_A = torch.where(in_band_A, _scattered(logp_A, advantage_A), torch.inf)
    chosen_A = lowest(rank_A, spec.chosen_share)
    return torch.zeros_like(mask_T).masked_scatter(is_action_T, chosen_A.to(mask_T.dtype))


def lowest(rank_A: Tensor, share: float) -> Tensor:
    """[A] 1 for the share with the lowest finite ranks, ties included; at least one where there is
    any."""
    count = max(int(share * len(rank_A)), 1)
    chosen_A = torch.zeros_like(rank_A)
    if len(rank_A) and torch.isfinite(last := rank_A.kthvalue(min(count, len(rank_A))).values):
        chosen_A[rank_A <= last] = 1.0
    elif len(rank_A):
        chosen_A[torch.isfinite(rank_A)] = 1.0
    return chosen_A


def _scattered(*values: Tensor) -> Tensor:
    """Numbers in 0..1 that look drawn at random, but follow from the bits of the values alone: the
    choice may depend neither on the order of the tokens nor on a seed."""
    mixed = torch.zeros_like(values[0], dtype=torch.int64)
    for value in values:
        mixed = (mixed ^ value.float().view(torch.int32).long()) * 0x9E3779B1 % 2**32
        mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77 % 2**32
    return (mixed ^ (mixed >> 13)).double() / 2**32
