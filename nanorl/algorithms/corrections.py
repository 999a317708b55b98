"""Corrections beyond `tis`: weights from `w = π_o/μ`, for stale data and engines that differ.

A NaN stays a NaN, so that the loss is refused: a comparison alone would take it for a rejection.
Sources: MIS and geometric rejection (Liu et al. 2025, "When speed kills stability"), IcePop (arXiv
2510.18855), KPop (ringtech.notion.site/kpop).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanorl.algorithms.divergences import binary_kl
from nanorl.algorithms.modifier import Modifier
from nanorl.algorithms.segments import segment_mean, segments_of
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.group_advantage import segment_sum
from nanorl.grpo import LossBatch
from nanorl.policy_loss import tis


def mis(log_w_T: Tensor, cap: float) -> Tensor:
    """`w·1[w ≤ C]`."""
    return torch.where(log_w_T > math.log(cap), -torch.inf, log_w_T).exp()


def icepop(log_w_T: Tensor, low: float, high: float) -> Tensor:
    """`w·1[a ≤ w ≤ b]`."""
    is_rejected_T = (log_w_T < math.log(low)) | (log_w_T > math.log(high))
    return torch.where(is_rejected_T, -torch.inf, log_w_T).exp()


def kpop(log_w_T: Tensor, rollout_logp_T: Tensor, most: float) -> Tensor:
    """`w` where the binary KL between o and μ is at most φ nats in both directions, else 0."""
    old_logp_T = rollout_logp_T + log_w_T
    there_T = binary_kl(old_logp_T, rollout_logp_T)
    back_T = binary_kl(rollout_logp_T, old_logp_T)
    return torch.where((there_T > most) | (back_T > most), -torch.inf, log_w_T).exp()


def sequence_tis(
    log_w_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, num_sequences: int, cap: float
) -> Tensor:
    """`min(Π w, C)` of the token's sequence, over its action tokens."""
    log_w_S = segment_sum(log_w_T * mask_T.to(log_w_T.dtype), sequence_ids_T, num_sequences)
    return tis(log_w_S, cap)[sequence_ids_T]


def geometric_rejection(
    log_w_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    num_sequences: int,
    low: float,
    high: float,
) -> Tensor:
    """1 for sequences with `a ≤ exp(mean log w) ≤ b`, else 0."""
    mean_S = segment_mean(log_w_T, mask_T, sequence_ids_T, num_sequences)
    is_rejected_S = (mean_S < math.log(low)) | (mean_S > math.log(high))
    kept_S = torch.where(is_rejected_S, 0.0, torch.where(mean_S.isnan(), mean_S, 1.0))
    return kept_S[sequence_ids_T]


def veto(
    log_w_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    num_sequences: int,
    threshold: float = 1e-4,
) -> Tensor:
    """0 for every token of a sequence in which any action token has `w < threshold`, else 1."""
    is_bad_T = (log_w_T < math.log(threshold)) & mask_T.bool()
    bad_S = segment_sum(is_bad_T.to(log_w_T.dtype), sequence_ids_T, num_sequences)
    return (bad_S == 0).to(log_w_T.dtype)[sequence_ids_T]


# By the names of `CORRECTIONS` (policy_loss.py), with the bounds of the spec.


def none(spec: AlgorithmSpec, log_w_T: Tensor, batch: LossBatch) -> Tensor:
    """1."""
    return torch.ones_like(log_w_T)


def masked(spec: AlgorithmSpec, log_w_T: Tensor, batch: LossBatch) -> Tensor:
    """`mis`."""
    return mis(log_w_T, spec.correction_cap)


def bounded(spec: AlgorithmSpec, log_w_T: Tensor, batch: LossBatch) -> Tensor:
    """`icepop`."""
    return icepop(log_w_T, *spec.bounds)


def near(spec: AlgorithmSpec, log_w_T: Tensor, batch: LossBatch) -> Tensor:
    """`kpop`."""
    return kpop(log_w_T, batch.rollout_logp_T, spec.correction_kl)


def truncated_sequences(spec: AlgorithmSpec, log_w_T: Tensor, batch: LossBatch) -> Tensor:
    """`sequence_tis`."""
    return sequence_tis(log_w_T, *segments_of(batch), spec.correction_cap)


def kept_sequences(spec: AlgorithmSpec, log_w_T: Tensor, batch: LossBatch) -> Tensor:
    """`geometric_rejection`."""
    return geometric_rejection(log_w_T, *segments_of(batch), *spec.bounds)


class Veto(Modifier):
    """`veto_below`: drops a sequence in which any token has a smaller w."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.threshold = spec.veto_below

    def correct(self, weight_T: Tensor, log_w_T: Tensor, batch: LossBatch) -> Tensor:
        """The weights, 0 in such sequences."""
        return weight_T * veto(log_w_T, *segments_of(batch), self.threshold)
