"""Losses: one function of tokens for each name, and `make_loss`, which runs what a spec asks for.

Symbols: θ the policy being updated (`logp_T`, the only tensor with a gradient), o the trainer's
policy at the start of the optimizer batch, μ the policy that sampled, `r = π_θ/π_o`, `w = π_o/μ`.
All log-probs are nats of the tempered distribution. A loss of one token,

    weight · (correction(w) · loss(r, A) + kl_coef · KL − entropy_coef · entropy)

and of one that a tool answered with, observation_coef · share · (−log π_θ),
is summed over a micro-batch. Weights, which hold the mask, come from the whole optimizer batch
(aggregation.py), so that the sum does not depend on the split. Corrections answer for stale weights
and for numerical differences between two engines; if the old log-probs were not recomputed (o := μ)
w is 1 by definition: never apply one then. A NaN stays a NaN, so that the loss is refused: a
comparison alone would take it for a rejection.
Sources: PPO (arXiv 1707.06347), dual clip (1912.09729), DAPO (2503.14476), GSPO (2507.18071), SAPO
(2511.20347), CISPO (2506.13585), decoupled PPO (2110.00641), DPPO (2602.04879), Clip-Cov and KL-Cov
(2505.22617), ECHO (2605.24517), OPD (2306.13649), KL estimators (schulman.me/kl-approx).
Corrections name theirs (corrections.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from nanorl.algorithms.corrections import CORRECTIONS, veto
from nanorl.algorithms.divergences import binary_kl, binary_tv, kl
from nanorl.algorithms.loss_batch import LossBatch
from nanorl.algorithms.segments import required, segment_mean
from nanorl.algorithms.spec import AlgorithmSpec, is_own, load_own
from nanorl.algorithms.top_k import topk_kl

LossFn = Callable[[Tensor, LossBatch], tuple[Tensor, dict[str, Tensor]]]


def make_loss(spec: AlgorithmSpec) -> LossFn:
    """The function that the engine calls: `(logp_T, batch) -> (loss sum, statistics)`.

    Statistics are sums, so that those of micro-batches add: `x_sum` over `action_count` is the mean
    of x per action token (`batching.per_action_token`).
    """

    def token_loss(logp_T: Tensor, batch: LossBatch) -> tuple[Tensor, dict[str, Tensor]]:
        observed, told = _observed(spec, logp_T, batch)
        batch, logp_T = _masked(batch), torch.where(batch.mask_T.bool(), logp_T, 0.0)
        old_T = _old_logp(spec, logp_T, batch)
        if is_own(spec.loss):
            loss_T = load_own("loss", spec.loss)(logp_T, replace(batch, old_logp_T=old_T))
        else:
            loss_T = LOSSES[spec.loss](spec, logp_T, old_T, batch)
        correction_T = _correction(spec, old_T, batch)
        loss_T = loss_T * correction_T
        if spec.kl_coef:
            ref_T = required(batch.ref_logp_T, "ref_logp_T", "kl_coef")
            loss_T = loss_T + spec.kl_coef * kl(spec.kl_estimator, logp_T, ref_T, old_T)
        if spec.entropy_coef:
            entropy_T = required(batch.entropy_T, "entropy_T", "entropy_coef")
            loss_T = loss_T - spec.entropy_coef * entropy_T
        stats = _stats(spec, logp_T.detach(), old_T, correction_T, batch)
        return (batch.weight_T * loss_T).sum() + observed, stats | told

    return token_loss


def _observed(
    spec: AlgorithmSpec, logp_T: Tensor, batch: LossBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """ECHO's term, `λ·Σ share·(−log π_θ)` over the tokens of observations, and it without λ."""
    if not spec.observation_coef:
        return logp_T.new_zeros(()), {}
    share_T = required(batch.observation_T, "observation_T", "observation_coef")
    # Not a product of all: 0·inf would be NaN.
    loss = -(share_T * torch.where(share_T > 0, logp_T, 0.0)).sum()
    return spec.observation_coef * loss, {"observation_loss": loss.detach()}


def _masked(batch: LossBatch) -> LossBatch:
    """Zeros outside the mask, in the inputs: masking the loss would leave 0·inf in gradients."""
    is_action_T = batch.mask_T.bool()
    names = (
        *("old_logp_T", "rollout_logp_T", "advantage_T", "weight_T", "ref_logp_T", "chosen_T"),
        *("entropy_T", "staleness_T", "teacher_logp_T"),
    )
    masked: dict[str, Any] = {
        name: torch.where(is_action_T, value_T, 0.0)
        for name in names
        if (value_T := getattr(batch, name)) is not None
    }
    return replace(batch, **masked)


def _old_logp(spec: AlgorithmSpec, logp_T: Tensor, batch: LossBatch) -> Tensor:
    if spec.old_policy == "rollout":
        return batch.rollout_logp_T
    if spec.old_policy == "interpolated":
        staleness_T = required(batch.staleness_T, "staleness_T", "old_policy='interpolated'")
        return interpolated(logp_T.detach(), batch.rollout_logp_T, staleness_T)
    return logp_T.detach() if batch.old_logp_T is None else batch.old_logp_T


def interpolated(logp_T: Tensor, rollout_logp_T: Tensor, staleness_T: Tensor) -> Tensor:
    """`log π_o ≈ log μ + α(log π_θ − log μ)`, α = d/(d+1) for a token of d versions ago: o is one
    update behind θ, μ was d behind o (inclusionai.github.io/AReaL/algorithms/prox_approx.html).
    """
    alpha_T = staleness_T / (staleness_T + 1)
    return rollout_logp_T + alpha_T * (logp_T - rollout_logp_T)


def _correction(spec: AlgorithmSpec, old_T: Tensor, batch: LossBatch) -> Tensor:
    log_w_T = (old_T - batch.rollout_logp_T).detach()
    weight_T = CORRECTIONS[spec.resolved_correction](spec, log_w_T, batch)
    if spec.veto_below > 0:
        weight_T = weight_T * veto(log_w_T, *batch.segments, spec.veto_below)
    return weight_T


def _stats(
    spec: AlgorithmSpec, logp_T: Tensor, old_T: Tensor, correction_T: Tensor, batch: LossBatch
) -> dict[str, Tensor]:
    is_action_T = batch.mask_T.bool()
    if spec.loss == "gspo":
        ratio_T = gspo_ratio(logp_T, old_T, *batch.segments)
    else:
        ratio_T = (logp_T - old_T).exp()
    named = {
        "ratio_sum": ratio_T,
        "clip_fraction_sum": _is_clipped(spec, ratio_T, logp_T, old_T, batch),
        "old_kl_sum": kl("k3", logp_T, old_T),
        "correction_sum": correction_T,
        "rejected_fraction_sum": correction_T == 0,
    }
    if batch.ref_logp_T is not None:
        named["ref_kl_sum"] = kl("k3", logp_T, batch.ref_logp_T)
    if batch.entropy_T is not None:
        named["entropy_sum"] = batch.entropy_T.detach()
    stats = {
        name: torch.where(is_action_T, value_T.to(torch.float32), 0.0).sum()
        for name, value_T in named.items()
    }
    stats["action_count"] = is_action_T.sum()
    return stats


def _is_clipped(
    spec: AlgorithmSpec, ratio_T: Tensor, logp_T: Tensor, old_T: Tensor, batch: LossBatch
) -> Tensor:
    """The tokens that have left the trust region in the direction of their advantage."""
    if spec.loss in DIVERGENCES:
        return dppo_mask(spec.loss, logp_T, old_T, batch.advantage_T, spec.clip) == 0
    clip_low, clip_high = spec.clip
    is_up_T = (ratio_T > 1 + clip_high) & (batch.advantage_T > 0)
    is_down_T = (ratio_T < 1 - clip_low) & (batch.advantage_T < 0)
    return is_up_T | is_down_T


# Policy losses. None of them applies the mask, except where a sequence is reduced (GSPO).


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
    segments: tuple[Tensor, Tensor, int],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """The PPO clip on a sequence-level ratio. Sequences must be whole (`LossBatch.segments`)."""
    ratio_T = gspo_ratio(logp_T, old_logp_T, *segments)
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


DIVERGENCES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"dppo_tv": binary_tv, "dppo_kl": binary_kl}
)
"""(log μ, log π_θ) -> how far they are apart at a token, by `AlgorithmSpec.loss`."""


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


def _dppo(spec: AlgorithmSpec, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
    mask_T = dppo_mask(spec.loss, logp_T, old_T, batch.advantage_T, spec.clip)
    return dppo(logp_T, old_T, batch.advantage_T, mask_T)


def _opd(spec: AlgorithmSpec, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
    is_reference = batch.teacher_logp_T is None
    teacher_T = batch.ref_logp_T if is_reference else batch.teacher_logp_T
    return opd(logp_T, batch.rollout_logp_T, required(teacher_T, "ref_logp_T", "loss='opd'"))


def _opd_topk(spec: AlgorithmSpec, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
    own_TK = required(batch.top_logp_TK, "top_logp_TK", "loss='opd_topk'")
    teacher_TK = required(batch.teacher_top_logp_TK, "teacher_top_logp_TK", "loss='opd_topk'")
    return topk_kl(spec.distill_kl, own_TK, teacher_TK)


LOSSES: Mapping[str, Callable[[AlgorithmSpec, Tensor, Tensor, LossBatch], Tensor]] = (
    MappingProxyType(
        {
            "reinforce": lambda spec, logp_T, old_T, batch: reinforce(logp_T, batch.advantage_T),
            "ppo": lambda spec, logp_T, old_T, batch: ppo(
                logp_T,
                old_T,
                batch.advantage_T,
                clip_low=spec.clip[0],
                clip_high=spec.clip[1],
                dual_clip=spec.dual_clip,
            ),
            "gspo": lambda spec, logp_T, old_T, batch: gspo(
                logp_T,
                old_T,
                batch.advantage_T,
                batch.segments,
                clip_low=spec.clip[0],
                clip_high=spec.clip[1],
            ),
            "sapo": lambda spec, logp_T, old_T, batch: sapo(
                logp_T,
                old_T,
                batch.advantage_T,
                tau_positive=spec.tau_positive,
                tau_negative=spec.tau_negative,
            ),
            "cispo": lambda spec, logp_T, old_T, batch: cispo(
                logp_T, old_T, batch.advantage_T, clip_low=spec.clip[0], clip_high=spec.clip[1]
            ),
            "dppo_tv": lambda spec, logp_T, old_T, batch: _dppo(spec, logp_T, old_T, batch),
            "dppo_kl": lambda spec, logp_T, old_T, batch: _dppo(spec, logp_T, old_T, batch),
            "clip_cov": lambda spec, logp_T, old_T, batch: clip_cov(
                logp_T,
                old_T,
                batch.advantage_T,
                required(batch.chosen_T, "chosen_T", "loss='clip_cov'"),
                clip_low=spec.clip[0],
                clip_high=spec.clip[1],
            ),
            "kl_cov": lambda spec, logp_T, old_T, batch: kl_cov(
                logp_T,
                old_T,
                batch.advantage_T,
                required(batch.chosen_T, "chosen_T", "loss='kl_cov'"),
                coef=spec.covariance_kl_coef,
            ),
            "decoupled_ppo": lambda spec, logp_T, old_T, batch: decoupled_ppo(
                logp_T,
                old_T,
                batch.rollout_logp_T,
                batch.advantage_T,
                clip_low=spec.clip[0],
                clip_high=spec.clip[1],
            ),
            "opd": _opd,
            "opd_topk": _opd_topk,
        }
    )
)
"""(spec, log π_θ, log π_o, batch) -> the loss of every token, by `AlgorithmSpec.loss`."""


# Terms beside the policy loss: KL, and the loss of the critic.


def value_loss(
    value_T: Tensor, old_value_T: Tensor, return_T: Tensor, *, clip: float = 0.2
) -> Tensor:
    """`½·max((V − Ret)², (clip(V, V_o ± ε) − Ret)²)`."""
    bounded_T = torch.maximum(torch.minimum(value_T, old_value_T + clip), old_value_T - clip)
    return 0.5 * torch.maximum((value_T - return_T) ** 2, (bounded_T - return_T) ** 2)
