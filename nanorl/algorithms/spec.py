"""`AlgorithmSpec`: one frozen record that says which algorithm this is; `make_loss` runs it.

`compute_advantages` (advantage_batch.py) and `token_weights` (aggregation.py) run once on the whole
optimizer batch; the function of `make_loss(spec)` runs on every micro-batch and returns a sum.
Published recipes by name: recipes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nanorl.algorithms import corrections, losses
from nanorl.algorithms.aggregation import AGGREGATIONS, Aggregation

Advantage = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "gae", "none"
]
Loss = Literal["reinforce", "ppo", "gspo", "sapo", "cispo", "decoupled_ppo", "opd"]
Correction = Literal["none", "tis", "mis", "icepop", "sequence_tis", "geometric"]
KLEstimator = Literal["k2", "k3", "rk3"]


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """Everything that decides a gradient, given rollouts."""

    advantage: Advantage = "grpo"
    """How rewards become advantages; "none" gives 0 (pure distillation)."""
    loss: Loss = "ppo"
    """The per-token policy loss."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number, over the whole optimizer batch."""
    constant_length: int | None = None
    """Tokens that aggregation "constant" divides by; needed there and nowhere else."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 − clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = 3.0
    """Bound c on the loss of negative advantages (ppo only); None turns it off."""
    tau_positive: float = 1.0
    """SAPO's temperature for positive advantages."""
    tau_negative: float = 1.05
    """SAPO's temperature for the others."""
    kl_coef: float = 0.0
    """Weight of the KL loss to the reference policy."""
    kl_estimator: KLEstimator = "k2"
    """k2 and rk3 give the gradient of KL(π‖ref), k3 that of KL(ref‖π)."""
    kl_reward_coef: float = 0.0
    """β of the k1 penalty inside the rewards of "reinforce_pp"."""
    distill_coef: float = 0.0
    """λ of `A −= λ(log π_o − log π_T)`; the teacher is the reference policy."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus on action tokens."""
    gamma: float = 1.0
    """Discount per action token."""
    lam: float = 0.95
    """λ of generalised advantage estimation."""
    old_policy: Literal["recomputed", "rollout"] = "recomputed"
    """Whose log-probs the ratio is against: the trainer's, or (o := μ) those of the rollout."""
    correction: Correction = "none"
    """Off-policy correction on w = π_o/μ."""
    correction_cap: float = 2.0
    """C of tis, mis and sequence_tis."""
    correction_low: float = 0.5
    """Lower bound a of icepop and geometric."""
    correction_high: float = 2.0
    """Upper bound b of icepop and geometric."""
    veto_below: float = 0.0
    """Drop a sequence if any token has w below this (1e-4 is usual); 0 turns it off."""
    dynamic_sampling: bool = False
    """Train only on groups with some but not all members correct."""
    overlong_buffer: int = 0
    """Tokens before the length limit in which the soft penalty grows to −1; 0 turns it off."""

    def __post_init__(self) -> None:
        _check_choice("advantage", self.advantage, get_args(Advantage))
        _check_choice("loss", self.loss, get_args(Loss))
        _check_choice("aggregation", self.aggregation, AGGREGATIONS)
        _check_choice("correction", self.correction, get_args(Correction))
        _check_choice("old_policy", self.old_policy, ("recomputed", "rollout"))
        if self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator='k1': its gradient is 0 in expectation; choose k2, k3 or rk3"
            )
        _check_choice("kl_estimator", self.kl_estimator, get_args(KLEstimator))
        _check_numbers(self)
        uses_w = self.correction != "none" or self.veto_below > 0 or self.loss == "decoupled_ppo"
        if self.old_policy == "rollout" and uses_w:
            raise ValueError(
                "old_policy='rollout' makes w = π_o/μ = 1: set correction='none', veto_below=0 and "
                "a loss other than decoupled_ppo, or old_policy='recomputed'"
            )
        if self.loss in ("decoupled_ppo", "opd") and self.correction != "none":
            raise ValueError(
                f"loss={self.loss!r} already weighs by the sampling policy: "
                f"correction={self.correction!r} would apply it twice; set correction='none'"
            )
        if (self.aggregation == "constant") != (self.constant_length is not None):
            raise ValueError(
                f"constant_length={self.constant_length} with aggregation={self.aggregation!r}: "
                "give it exactly with 'constant'"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probs of a reference (or teacher) policy are read."""
        coefs = (self.kl_coef, self.kl_reward_coef, self.distill_coef)
        return self.loss == "opd" or any(coef != 0 for coef in coefs)

    @property
    def compares_old_to_reference(self) -> bool:
        """Whether the advantages read the old policy's log-probs."""
        return self.kl_reward_coef != 0 or self.distill_coef != 0

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def needs_old_logp(self) -> bool:
        """Whether the trainer must recompute log-probs before the update."""
        return self.old_policy == "recomputed"


@dataclass(frozen=True, kw_only=True)
class LossBatch:
    """One micro-batch, packed. Sequences are whole; all tensors are [T] and without gradient,
    except `entropy_T`, which is of the policy being updated."""

    old_logp_T: Tensor
    rollout_logp_T: Tensor
    advantage_T: Tensor
    mask_T: Tensor
    weight_T: Tensor
    """From `token_weights` over the whole optimizer batch; it holds the mask."""
    sequence_ids_T: Tensor
    """0 .. num_sequences−1 within this micro-batch."""
    num_sequences: int
    ref_logp_T: Tensor | None = None
    entropy_T: Tensor | None = None


LossFn = Callable[[Tensor, LossBatch], tuple[Tensor, dict[str, Tensor]]]


def make_loss(spec: AlgorithmSpec) -> LossFn:
    """The function that the engine calls: `(logp_T, batch) -> (loss sum, statistics)`.

    Statistics reduce over micro-batches by name: `*_sum` and `*_count` add, `*_max` take the
    maximum. See `summarise`.
    """

    def token_loss(logp_T: Tensor, batch: LossBatch) -> tuple[Tensor, dict[str, Tensor]]:
        batch, logp_T = _masked(batch), torch.where(batch.mask_T.bool(), logp_T, 0.0)
        old_T = batch.rollout_logp_T if spec.old_policy == "rollout" else batch.old_logp_T
        loss_T = _policy_loss(spec, logp_T, old_T, batch)
        correction_T = _correction(spec, old_T, batch)
        loss_T = loss_T * correction_T
        if spec.kl_coef:
            ref_T = required(batch.ref_logp_T, "ref_logp_T", "kl_coef")
            loss_T = loss_T + spec.kl_coef * losses.kl(spec.kl_estimator, logp_T, ref_T, old_T)
        if spec.entropy_coef:
            entropy_T = required(batch.entropy_T, "entropy_T", "entropy_coef")
            loss_T = loss_T - spec.entropy_coef * entropy_T
        return (batch.weight_T * loss_T).sum(), _stats(
            spec, logp_T.detach(), old_T, correction_T, batch
        )

    return token_loss


def summarise(stats: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Statistics of all micro-batches as means per action token, and maxima."""
    total: dict[str, float] = {}
    for part in stats:
        for name, value in part.items():
            held = total.get(name)
            number = float(value)
            if held is None:
                total[name] = number
            else:
                total[name] = max(held, number) if name.endswith("_max") else held + number
    count = max(total.pop("action_count", 0.0), 1.0)
    return {
        name.removesuffix("_sum"): value / count if name.endswith("_sum") else value
        for name, value in total.items()
    }


def _masked(batch: LossBatch) -> LossBatch:
    """Zeros outside the mask, in the inputs: masking the loss would leave 0·inf in gradients."""
    is_action_T = batch.mask_T.bool()
    names = ("old_logp_T", "rollout_logp_T", "advantage_T", "weight_T", "ref_logp_T", "entropy_T")
    masked: dict[str, Any] = {
        name: torch.where(is_action_T, value_T, 0.0)
        for name in names
        if (value_T := getattr(batch, name)) is not None
    }
    return replace(batch, **masked)


def _policy_loss(spec: AlgorithmSpec, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
    advantage_T = batch.advantage_T
    clip = {"clip_low": spec.clip_low, "clip_high": spec.clip_high}
    if spec.loss == "reinforce":
        return losses.reinforce(logp_T, advantage_T)
    if spec.loss == "ppo":
        return losses.ppo(logp_T, old_T, advantage_T, **clip, dual_clip=spec.dual_clip)
    if spec.loss == "gspo":
        mask_T, ids_T = batch.mask_T, batch.sequence_ids_T
        return losses.gspo(logp_T, old_T, advantage_T, mask_T, ids_T, batch.num_sequences, **clip)
    if spec.loss == "sapo":
        taus = {"tau_positive": spec.tau_positive, "tau_negative": spec.tau_negative}
        return losses.sapo(logp_T, old_T, advantage_T, **taus)
    if spec.loss == "cispo":
        return losses.cispo(logp_T, old_T, advantage_T, **clip)
    if spec.loss == "decoupled_ppo":
        return losses.decoupled_ppo(logp_T, old_T, batch.rollout_logp_T, advantage_T, **clip)
    teacher_T = required(batch.ref_logp_T, "ref_logp_T", "loss='opd'")
    return losses.opd(logp_T, batch.rollout_logp_T, teacher_T)


def _correction(spec: AlgorithmSpec, old_T: Tensor, batch: LossBatch) -> Tensor:
    """The weight of every token from w = π_o/μ; ones where nothing corrects."""
    log_w_T = (old_T - batch.rollout_logp_T).detach()
    segments = (batch.mask_T, batch.sequence_ids_T, batch.num_sequences)
    bounds = (spec.correction_low, spec.correction_high)
    weight_T = torch.ones_like(log_w_T)
    if spec.correction == "tis":
        weight_T = corrections.tis(log_w_T, spec.correction_cap)
    elif spec.correction == "mis":
        weight_T = corrections.mis(log_w_T, spec.correction_cap)
    elif spec.correction == "icepop":
        weight_T = corrections.icepop(log_w_T, *bounds)
    elif spec.correction == "sequence_tis":
        weight_T = corrections.sequence_tis(log_w_T, *segments, spec.correction_cap)
    elif spec.correction == "geometric":
        weight_T = corrections.geometric_rejection(log_w_T, *segments, *bounds)
    if spec.veto_below > 0:
        weight_T = weight_T * corrections.veto(log_w_T, *segments, spec.veto_below)
    return weight_T


def _stats(
    spec: AlgorithmSpec, logp_T: Tensor, old_T: Tensor, correction_T: Tensor, batch: LossBatch
) -> dict[str, Tensor]:
    is_action_T = batch.mask_T.bool()
    segments = (batch.mask_T, batch.sequence_ids_T, batch.num_sequences)
    if spec.loss == "gspo":
        ratio_T = losses.gspo_ratio(logp_T, old_T, *segments)
    else:
        ratio_T = (logp_T - old_T).exp()
    is_up_T = (ratio_T > 1 + spec.clip_high) & (batch.advantage_T > 0)
    is_down_T = (ratio_T < 1 - spec.clip_low) & (batch.advantage_T < 0)
    gap_T = (old_T - batch.rollout_logp_T).abs()
    named = {
        "ratio_sum": ratio_T,
        "clip_fraction_sum": is_up_T | is_down_T,
        "old_kl_sum": losses.kl("k3", logp_T, old_T),
        "logp_gap_sum": gap_T,
        "correction_sum": correction_T,
        "rejected_fraction_sum": correction_T == 0,
    }
    if batch.ref_logp_T is not None:
        named["ref_kl_sum"] = losses.kl("k3", logp_T, batch.ref_logp_T)
    if batch.entropy_T is not None:
        named["entropy_sum"] = batch.entropy_T.detach()
    stats = {
        name: torch.where(is_action_T, value_T.to(torch.float32), 0.0).sum()
        for name, value_T in named.items()
    }
    zero_T = torch.zeros_like(gap_T)
    stats["logp_gap_max"] = torch.cat([torch.where(is_action_T, gap_T, zero_T), zero_T[:1]]).amax()
    stats["action_count"] = is_action_T.sum()
    return stats


def required(value: Tensor | None, name: str, reason: str) -> Tensor:
    if value is None:
        raise ValueError(f"{name} is missing: {reason} reads it")
    return value


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(choices)}")


def _check_numbers(spec: AlgorithmSpec) -> None:
    if not 0 <= spec.clip_low < 1:
        raise ValueError(f"clip_low={spec.clip_low}: must be in [0, 1)")
    if spec.clip_high < 0:
        raise ValueError(f"clip_high={spec.clip_high}: must not be negative")
    if spec.dual_clip is not None and spec.dual_clip <= 1:
        raise ValueError(f"dual_clip={spec.dual_clip}: must be above 1, or None")
    for name in ("gamma", "lam"):
        if not 0 <= getattr(spec, name) <= 1:
            raise ValueError(f"{name}={getattr(spec, name)}: must be in [0, 1]")
    for name in ("tau_positive", "tau_negative", "correction_cap", "correction_low"):
        if getattr(spec, name) <= 0:
            raise ValueError(f"{name}={getattr(spec, name)}: must be positive")
    if spec.correction_high < spec.correction_low:
        raise ValueError(
            f"correction_high={spec.correction_high}: must be at least "
            f"correction_low={spec.correction_low}"
        )
    if not 0 <= spec.veto_below < 1:
        raise ValueError(f"veto_below={spec.veto_below}: must be in [0, 1); 1e-4 is usual")
    for name in ("kl_coef", "kl_reward_coef", "distill_coef", "entropy_coef", "overlong_buffer"):
        if getattr(spec, name) < 0:
            raise ValueError(f"{name}={getattr(spec, name)}: must not be negative")
