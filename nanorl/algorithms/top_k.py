"""Distillation from the k tokens that a teacher holds likeliest, and all others as one.

The sampled token alone says little of where two policies differ. The k likeliest tokens of the
teacher and one bucket for the rest are a distribution of k + 1 events, so the KL between two such
is exact, never negative, and at most that of the whole vocabularies (data processing inequality).
On-policy distillation: arXiv 2306.13649; the bucket: SDPO (arXiv 2601.20802) and its code.
"""

from __future__ import annotations

import torch
from torch import Tensor

TAIL = 1e-7
"""The least probability of the bucket that is told from 0: fp32 knows no smaller 1 − p."""


def with_tail(logp_TK: Tensor) -> Tensor:
    """[T, K + 1]: the log-probs, and last that of all tokens that are not among them."""
    total_T1 = logp_TK.logsumexp(-1, keepdim=True).clamp(max=-TAIL)
    return torch.cat([logp_TK, torch.log(-torch.expm1(total_T1))], -1)


def topk_kl(kind: str, logp_TK: Tensor, teacher_logp_TK: Tensor) -> Tensor:
    """[T] KL(π_θ‖π_T) (`kind` "reverse") or KL(π_T‖π_θ) ("forward") in nats over the K tokens and
    the bucket, with the gradient of every log π_θ."""
    own, theirs = with_tail(logp_TK), with_tail(teacher_logp_TK)
    if kind == "reverse":
        return (own.exp() * (own - theirs)).sum(-1)
    return (theirs.exp() * (theirs - own)).sum(-1)
