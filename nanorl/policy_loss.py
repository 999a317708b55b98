"""The loss of a token, and `PolicyLoss`, the callback with which an engine computes a batch's.

Symbols: θ the policy being updated (`logp_T`, the only tensor with a gradient), o the trainer's
policy at the start of the optimizer batch, μ the policy that sampled, `r = π_θ/π_o`, `w = π_o/μ`.
All log-probs are nats of the tempered distribution. What is summed over a micro-batch is

    weight · correction(w) · loss(r, A)

Weights, which hold the mask, come from the whole optimizer batch, so that the sum does not depend
on the split. Corrections answer for stale weights and for numerical differences between two
engines. A NaN stays a NaN, so that the loss is refused: a comparison alone would take it for a
rejection.
Sources: PPO (arXiv 1707.06347), dual clip (1912.09729), TIS (fengyao.notion.site/off-policy-rl), k3
(schulman.me/kl-approx).
Left out: other losses and corrections (algorithms/registry.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from nanoengine.packing import MicroBatch
from nanorl.grpo import GRPO, Field, LossBatch, part

OldPolicy = Callable[[Tensor, LossBatch], Tensor]
"""(log π_θ, batch) -> log π_o."""

Correction = Callable[[GRPO, Tensor, LossBatch], Tensor]
"""(spec, log w, batch) -> the weight of every token."""


@dataclass(frozen=True)
class PolicyLoss:
    """The engine's callback for an algorithm: a SUM over a micro-batch, and summed statistics. It
    holds nothing but the spec, so it travels to the ranks of an engine."""

    spec: GRPO
    is_exact: bool = False
    """The policy is expected to say of the tokens what it said when it sampled them, bit for bit:
    the step that follows a rollout on the same processor."""

    def foreseen_logp(self, micro: MicroBatch) -> Tensor | None:
        """The log-probs of the rollouts, where they are those of the policy (ForeseeingLoss): on a
        CPU."""
        # Elsewhere the kernels of the two engines differ by rounding errors.
        if not (self.is_exact and self.spec.is_foreseeable and micro.ids_N.device.type == "cpu"):
            return None
        return micro.fields_T[Field.ROLLOUT_LOGP]

    def __call__(
        self, logp_T: Tensor, entropy_T: Tensor | None, micro: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # A field `ref_logp` of the samples is `ref_logp_T` here, and so on.
        own: dict[str, Any] = {
            name: value_T
            for field, value_T in micro.fields_T.items()
            if (name := f"{field}_T") in _READ
        }
        # Observations have a loss of their own (ECHO): they are no action tokens.
        mask_T, observation_T = micro.loss_mask_T, own.get("observation_T")
        batch = LossBatch(
            **own,
            mask_T=mask_T if observation_T is None else mask_T * (observation_T == 0),
            sequence_ids_T=micro.local_ids_T,
            num_sequences=len(micro.index),
            top_logp_TK=micro.own_top_logp_TK,
            teacher_top_logp_TK=micro.top_logp_TK,
            entropy_T=entropy_T,
        )
        return make_loss(self.spec)(logp_T, batch)


_READ = frozenset(one.name for one in fields(LossBatch))

LossFn = Callable[[Tensor, LossBatch], tuple[Tensor, dict[str, Tensor]]]


def make_loss(spec: GRPO) -> LossFn:
    """The function `(logp_T, batch) -> (loss sum, statistics)` of an algorithm.

    Statistics are sums, so that those of micro-batches add: `x_sum` over `action_count` is the mean
    of x per action token (`batch_metrics.per_action_token`).
    """
    loss_of: ClippedLoss = part("loss", spec.loss)(spec)
    old_of: OldPolicy = part("old_policy", spec.old_policy)
    correct: Correction = part("correction", spec.resolved_correction)

    def token_loss(logp_T: Tensor, batch: LossBatch) -> tuple[Tensor, dict[str, Tensor]]:
        terms = spec.terms(logp_T, batch)
        batch, logp_T = _masked(batch), torch.where(batch.mask_T.bool(), logp_T, 0.0)
        old_T = old_of(logp_T, batch)
        # Numbers, not functions of θ: w weighs what θ learns, and is not learnt itself.
        log_w_T = (old_T - batch.rollout_logp_T).detach()
        correction_T = spec.correct(correct(spec, log_w_T, batch), log_w_T, batch)
        loss_T = loss_of(logp_T, old_T, batch) * correction_T
        # Regularisers hold wherever the tokens come from, so they are not corrected.
        loss_T = spec.token_loss(loss_T, logp_T, old_T, batch)
        loss = (batch.weight_T * loss_T).sum()
        stats = _stats(loss_of, logp_T.detach(), old_T, correction_T, batch)
        for more, told in terms:
            loss, stats = loss + more, stats | told
        return loss, stats

    return token_loss


def recomputed(logp_T: Tensor, batch: LossBatch) -> Tensor:
    """The trainer's policy as the batch came: θ itself until the first update."""
    # Its ratio is 1 then, but with a gradient: that of plain REINFORCE.
    return logp_T.detach() if batch.old_logp_T is None else batch.old_logp_T


def truncated(spec: GRPO, log_w_T: Tensor, batch: LossBatch) -> Tensor:
    """`tis` with the spec's cap."""
    return tis(log_w_T, spec.correction_cap)


def tis(log_w_T: Tensor, cap: float) -> Tensor:
    """`min(w, C)`."""
    # Clamped before the exponential, which would overflow for a token that μ held impossible.
    return log_w_T.clamp(max=math.log(cap)).exp()


class ClippedLoss:
    """PPO's and GRPO's loss of a token, `−min(r·A, clip(r)·A)`, and what the log says of it. Other
    losses are subclasses. None of them applies the mask, except where a sequence is reduced."""

    def __init__(self, spec: Any) -> None:
        """`spec` is a GRPO, or the `AlgorithmSpec` that has the options of a subclass."""
        self.spec = spec

    def __call__(self, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """[T] with the gradient of `logp_T`."""
        low, high = self.spec.clip
        bound = self.spec.dual_clip
        A_T = batch.advantage_T
        return ppo(logp_T, old_T, A_T, clip_low=low, clip_high=high, dual_clip=bound)

    def ratio(self, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """[T] r, the ratio that is clipped."""
        return (logp_T - old_T).exp()

    def is_clipped(
        self, ratio_T: Tensor, logp_T: Tensor, old_T: Tensor, batch: LossBatch
    ) -> Tensor:
        """The tokens that have left the trust region in the direction of their advantage."""
        low, high = self.spec.clip
        is_up_T = (ratio_T > 1 + high) & (batch.advantage_T > 0)
        is_down_T = (ratio_T < 1 - low) & (batch.advantage_T < 0)
        return is_up_T | is_down_T


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
    # The minimum is pessimistic: a ratio that moved the way A wants gains nothing beyond the clip,
    # while one that moved the other way keeps its whole gradient, and can come back.
    loss_T = -torch.minimum(ratio_T * advantage_T, bounded_T * advantage_T)
    if dual_clip is None:
        return loss_T
    # With A < 0 the minimum has no bound: one token that θ has made far likelier could rule a step.
    return torch.where(advantage_T < 0, torch.minimum(loss_T, -dual_clip * advantage_T), loss_T)


def k3(logp_T: Tensor, other_logp_T: Tensor) -> Tensor:
    """`e^{−d} − 1 + d`, d = log π_θ − log π_other: an estimate of KL(π_θ‖π_other) from the tokens
    that π_θ sampled, unbiased and never negative."""
    d_T = logp_T - other_logp_T
    return torch.expm1(-d_T) + d_T


def _masked(batch: LossBatch) -> LossBatch:
    """Zeros outside the mask, in the inputs: masking the loss would leave 0·inf in gradients."""
    is_action_T = batch.mask_T.bool()
    masked: dict[str, Any] = {
        name: torch.where(is_action_T, value_T, 0.0)
        for name in _MASKED
        if (value_T := getattr(batch, name)) is not None
    }
    return replace(batch, **masked)


_MASKED = (
    *("old_logp_T", "rollout_logp_T", "advantage_T", "weight_T", "ref_logp_T", "chosen_T"),
    *("entropy_T", "staleness_T", "teacher_logp_T"),
)


def _stats(
    loss: ClippedLoss, logp_T: Tensor, old_T: Tensor, correction_T: Tensor, batch: LossBatch
) -> dict[str, Tensor]:
    # Sums over action tokens, so that those of micro-batches and ranks add.
    is_action_T = batch.mask_T.bool()
    ratio_T = loss.ratio(logp_T, old_T, batch)
    named = {
        "ratio_sum": ratio_T,
        "clip_fraction_sum": loss.is_clipped(ratio_T, logp_T, old_T, batch),
        "old_kl_sum": k3(logp_T, old_T),
        "correction_sum": correction_T,
        "rejected_fraction_sum": correction_T == 0,
    }
    if batch.ref_logp_T is not None:
        named["ref_kl_sum"] = k3(logp_T, batch.ref_logp_T)
    if batch.entropy_T is not None:
        named["entropy_sum"] = batch.entropy_T.detach()
    stats = {
        name: torch.where(is_action_T, value_T.to(torch.float32), 0.0).sum()
        for name, value_T in named.items()
    }
    stats["action_count"] = is_action_T.sum()
    return stats
