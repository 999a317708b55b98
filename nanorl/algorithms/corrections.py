"""Off-policy corrections: weights from `w = π_o/μ`, the trainer's policy over the sampling one.

They answer for stale weights and for numerical differences between two engines. If the old
log-probs were not recomputed (o := μ) w is 1 by definition: never apply one then.
A NaN stays a NaN, so that the loss is refused: a comparison alone would take it for a rejection.
Sources: TIS (fengyao.notion.site/off-policy-rl), MIS and geometric rejection (Liu et al. 2025,
"When speed kills stability"), IcePop (arXiv 2510.18855).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanorl.algorithms.segments import segment_mean, segment_sum


def tis(log_w_T: Tensor, cap: float) -> Tensor:
    """`min(w, C)`."""
    return log_w_T.clamp(max=math.log(cap)).exp()


def mis(log_w_T: Tensor, cap: float) -> Tensor:
    """`w·1[w ≤ C]`."""
    return torch.where(log_w_T > math.log(cap), -torch.inf, log_w_T).exp()


def icepop(log_w_T: Tensor, low: float, high: float) -> Tensor:
    """`w·1[a ≤ w ≤ b]`."""
    is_rejected_T = (log_w_T < math.log(low)) | (log_w_T > math.log(high))
    return torch.where(is_rejected_T, -torch.inf, log_w_T).exp()


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
