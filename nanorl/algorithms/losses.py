"""Losses per token, to be minimised; `aggregation` turns them into one number.

Symbols: θ the policy being updated (`logp_T`, the only tensor with a gradient), o the trainer's
policy at the start of the optimizer batch, μ the policy that sampled, `r = π_θ/π_o`. All log-probs
are nats of the tempered distribution. Nothing here applies the mask, except where a sequence is
reduced (GSPO): masked-out tokens get weight 0 later.
Sources: PPO (arXiv 1707.06347), dual clip (1912.09729), DAPO (2503.14476), GSPO (2507.18071), SAPO
(2511.20347), CISPO (2506.13585), decoupled PPO (2110.00641), KL estimators (schulman.me/kl-approx).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanorl.algorithms.segments import segment_mean, segment_sum


def reinforce(logp_T: Tensor, advantage_T: Tensor) -> Tensor:
    """`−A·log π_θ`."""
    return -advantage_T * logp_T


def clipped(
    ratio_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """`−min(r·A, clip(r)·A)`; with `dual_clip` c, where A < 0 at most `−c·A`."""
    bounded_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = -torch.minimum(ratio_T * advantage_T, bounded_T * advantage_T)
    if dual_clip is None:
        return loss_T
    return torch.where(advantage_T < 0, torch.minimum(loss_T, -dual_clip * advantage_T), loss_T)


def ppo(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Tensor:
    """PPO and GRPO; DAPO is the same with `clip_high=0.28`."""
    ratio_T = (logp_T - old_logp_T).exp()
    return clipped(
        ratio_T, advantage_T, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )


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
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    num_sequences: int,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """The PPO clip on a sequence-level ratio. Sequences must be whole."""
    ratio_T = gspo_ratio(logp_T, old_logp_T, mask_T, sequence_ids_T, num_sequences)
    return clipped(ratio_T, advantage_T, clip_low=clip_low, clip_high=clip_high)


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


def opd(logp_T: Tensor, rollout_logp_T: Tensor, teacher_logp_T: Tensor) -> Tensor:
    """`−sg[log π_T − log π_θ]·π_θ/μ`: the expected gradient is that of KL(π_θ‖π_T)."""
    gain_T = (teacher_logp_T - logp_T).detach()
    return -gain_T * (logp_T - rollout_logp_T).exp()


def kl(kind: str, logp_T: Tensor, ref_logp_T: Tensor, old_logp_T: Tensor | None = None) -> Tensor:
    """Estimators of KL(π_θ‖π_ref) from sampled tokens, `d = log π_θ − log π_ref`.

    As *values*: k1 = d (unbiased), k2 = d²/2, k3 = e^{−d} − 1 + d (unbiased, not negative).
    As *loss terms* their expected gradients differ: k1 gives 0, k2 the gradient of KL(π‖ref), k3
    that of KL(ref‖π), and rk3 = r·k3 (needs `old_logp_T`) again that of KL(π‖ref).
    """
    d_T = logp_T - ref_logp_T
    if kind == "k1":
        return d_T
    if kind == "k2":
        return d_T**2 / 2
    k3_T = torch.expm1(-d_T) + d_T
    if kind == "k3":
        return k3_T
    if kind == "rk3" and old_logp_T is not None:
        return (logp_T - old_logp_T).exp() * k3_T
    raise ValueError(f"kind={kind!r}: choose k1, k2, k3, or rk3 with old_logp_T")


def value_loss(
    value_T: Tensor, old_value_T: Tensor, return_T: Tensor, *, clip: float = 0.2
) -> Tensor:
    """`½·max((V − Ret)², (clip(V, V_o ± ε) − Ret)²)`."""
    bounded_T = torch.maximum(torch.minimum(value_T, old_value_T + clip), old_value_T - clip)
    return 0.5 * torch.maximum((value_T - return_T) ** 2, (bounded_T - return_T) ** 2)


# Off-policy corrections: weights from `w = π_o/μ`, the trainer's policy over the sampling one.
#
# They answer for stale weights and for numerical differences between two engines. If the old
# log-probs were not recomputed (o := μ) w is 1 by definition: never apply one then.
# A NaN stays a NaN, so that the loss is refused: a comparison alone would take it for a rejection.
# Sources: TIS (fengyao.notion.site/off-policy-rl), MIS and geometric rejection (Liu et al. 2025,
# "When speed kills stability"), IcePop (arXiv 2510.18855).


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
