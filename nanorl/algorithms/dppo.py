"""DPPO: a trust region of distances between probabilities, not of ratios (arXiv 2602.04879)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from nanorl.algorithms.divergences import binary_kl, binary_tv
from nanorl.grpo import LossBatch
from nanorl.policy_loss import ClippedLoss


class DPPO(ClippedLoss):
    """`dppo`: tokens that are too far from the old policy, and would go farther, learn no more."""

    divergence: str

    def __call__(self, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """[T] with the gradient of `logp_T`."""
        mask_T = dppo_mask(self.divergence, logp_T, old_T, batch.advantage_T, self.spec.clip)
        return dppo(logp_T, old_T, batch.advantage_T, mask_T)

    def is_clipped(
        self, ratio_T: Tensor, logp_T: Tensor, old_T: Tensor, batch: LossBatch
    ) -> Tensor:
        """The tokens that the mask leaves out."""
        A_T = batch.advantage_T
        return dppo_mask(self.divergence, logp_T, old_T, A_T, self.spec.clip) == 0


class DPPOByProbability(DPPO):
    """Measures the total variation of (the token, all others)."""

    divergence = "dppo_tv"


class DPPOByNats(DPPO):
    """Measures the KL of the same."""

    divergence = "dppo_kl"


DIVERGENCES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"dppo_tv": binary_tv, "dppo_kl": binary_kl}
)
"""(log μ, log π_θ) -> how far they are apart at a token, by `GRPO.loss`."""


def dppo_mask(
    loss: str,
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantage_T: Tensor,
    clip: tuple[float, float],
) -> Tensor:
    """0 for tokens that are farther from the old policy than `clip` (falling, rising) and that
    their advantage would move farther, else 1."""
    with torch.no_grad():
        distance_T = DIVERGENCES[loss](old_logp_T, logp_T)
        is_up_T = (advantage_T > 0) & (logp_T > old_logp_T) & (distance_T > clip[1])
        is_down_T = (advantage_T < 0) & (logp_T < old_logp_T) & (distance_T > clip[0])
        return (~(is_up_T | is_down_T)).to(logp_T.dtype)


def dppo(logp_T: Tensor, old_logp_T: Tensor, advantage_T: Tensor, mask_T: Tensor) -> Tensor:
    """`−M·sg[min(r, 20)]·A·log π_θ`: the mask is the trust region, the ratio only weighs."""
    ratio_T = (logp_T.detach() - old_logp_T).clamp(max=math.log(DPPO_CAP)).exp()
    return -mask_T * ratio_T * advantage_T * logp_T


DPPO_CAP = 20.0  # of a weight, as in the authors' code
