"""Other centres of the clip than the trainer's policy as the batch came."""

from __future__ import annotations

from torch import Tensor

from nanorl.algorithms.segments import required
from nanorl.grpo import LossBatch


def of_rollout(logp_T: Tensor, batch: LossBatch) -> Tensor:
    """o := μ. It drops every stale token that has drifted past the clip, so it learns less the
    staler the data."""
    return batch.rollout_logp_T


def between(logp_T: Tensor, batch: LossBatch) -> Tensor:
    """`interpolated` by the staleness of each token."""
    staleness_T = required(batch.staleness_T, "staleness_T", "old_policy='interpolated'")
    return interpolated(logp_T.detach(), batch.rollout_logp_T, staleness_T)


def interpolated(logp_T: Tensor, rollout_logp_T: Tensor, staleness_T: Tensor) -> Tensor:
    """`log π_o ≈ log μ + α(log π_θ − log μ)`, α = d/(d+1) for a token of d versions ago: o is one
    update behind θ, μ was d behind o (inclusionai.github.io/AReaL/algorithms/prox_approx.html).
    """
    alpha_T = staleness_T / (staleness_T + 1)
    return rollout_logp_T + alpha_T * (logp_T - rollout_logp_T)
