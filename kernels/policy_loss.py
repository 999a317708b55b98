"""The policy-gradient loss and its gradient, from log-probs of the sampled tokens.

Per token, with r = exp(logp − old), A the advantage and c(r) = clamp(r, 1 − low, 1 + high):

    grpo, ppo, dapo   ℓ = −min(r·A, c(r)·A); where A < 0 at most −dual_clip·A
    gspo              the same with r = exp(mean over the sequence's action tokens of logp − old),
                      whose gradient by each token's logp is r; no dual clip
    cispo             ℓ = −c(r)·A·logp, c(r) without gradient

    loss = Σ weight · (min(old→rollout ratio, cap) · ℓ + kl_coef · KL)

The gradient is known token by token as soon as the loss is, so the forward pass writes both and
the backward pass is a multiplication. On a GPU: one launch over tokens, one that adds the partial
sums in order (and for gspo one before, over sequences).

`nanorl.algorithms.losses` defines the same losses for autograd; a test holds the two together.
Left out: SAPO, OPD and the corrections other than truncation, which only that module has.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kernels.backend import (
    Backend,
    check_bounds,
    check_floating,
    check_integers,
    check_tensors,
    compute_dtype,
    use_triton,
)

Variant = Literal["grpo", "ppo", "dapo", "gspo", "cispo"]
KLKind = Literal["k2", "k3"]
STATS = ("clip_fraction", "ratio_mean", "ratio_max", "old_kl", "ref_kl")


@dataclass(frozen=True)
class PolicyLossOptions:
    """What is constant over the tokens; the Triton kernel is compiled for it."""

    variant: Variant
    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_coef: float
    kl_kind: KLKind
    rollout_cap: float


@dataclass(frozen=True)
class PolicyLossInputs:
    """[T] tensors. `weight` is 0 outside the mask; `cu_seqlens` only where the variant needs it."""

    logp: Tensor
    old_logp: Tensor
    advantage: Tensor
    mask: Tensor
    weight: Tensor | None
    ref_logp: Tensor | None
    rollout_logp: Tensor | None
    cu_seqlens: Tensor | None


def policy_loss_ref(inputs: PolicyLossInputs, options: PolicyLossOptions) -> Tensor:
    """The definition, differentiable by autograd alone."""
    keep = inputs.mask.bool()
    wide = compute_dtype(inputs.logp.dtype)

    def masked(x: Tensor) -> Tensor:
        return torch.where(keep, x.to(wide), 0.0)

    logp, old, advantage = (masked(x) for x in (inputs.logp, inputs.old_logp, inputs.advantage))
    ratio = (logp - old).exp()
    if inputs.cu_seqlens is not None:
        ratio = _sequence_mean(logp - old, keep, inputs.cu_seqlens).detach().exp()
        ratio = ratio * (logp - logp.detach()).exp()
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    if options.variant == "cispo":
        loss = -clipped.detach() * advantage * logp
    else:
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        if options.dual_clip is not None:
            bound = torch.minimum(loss, -options.dual_clip * advantage)
            loss = torch.where(advantage < 0, bound, loss)
    if inputs.rollout_logp is not None:
        loss = loss * (old - masked(inputs.rollout_logp)).exp().clamp(max=options.rollout_cap)
    if inputs.ref_logp is not None:
        d = logp - masked(inputs.ref_logp)
        loss = loss + options.kl_coef * (d**2 / 2 if options.kl_kind == "k2" else _k3(d))
    if inputs.weight is None:
        return torch.where(keep, loss, 0.0).sum() / keep.sum().clamp(min=1)
    return (masked(inputs.weight) * loss).sum()


def _k3(d: Tensor) -> Tensor:
    return torch.expm1(-d) + d


def _sequence_mean(x_T: Tensor, keep_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean over the kept tokens of each token's sequence, [T]; 0 where a sequence keeps none."""
    lengths = cu_seqlens.diff().long()
    owner = torch.repeat_interleave(
        torch.arange(len(lengths), device=x_T.device), lengths, output_size=x_T.shape[0]
    )
    total = x_T.new_zeros(2, len(lengths))
    total.index_add_(1, owner, torch.stack([torch.where(keep_T, x_T, 0.0), keep_T.to(x_T.dtype)]))
    return (total[0] / total[1].clamp(min=1))[owner]


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logp, inputs, options, on_triton):
        run = _torch_forward
        if on_triton:
            from kernels.triton import policy_loss as triton_ops

            run = triton_ops.forward
        loss, dlogp, scale, stats = run(inputs, options)
        ctx.save_for_backward(dlogp, scale)
        ctx.dtype = logp.dtype
        ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    def backward(ctx, dloss, _):
        dlogp, scale = ctx.saved_tensors
        return (dlogp * (dloss * scale)).to(ctx.dtype), None, None, None


def _torch_forward(
    inputs: PolicyLossInputs, options: PolicyLossOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss, its gradient by logp before the division by `1 / scale`, scale, and STATS."""
    keep = inputs.mask.bool()
    wide = compute_dtype(inputs.logp.dtype)

    def masked(x: Tensor) -> Tensor:
        return torch.where(keep, x.to(wide), 0.0)

    logp, old, advantage = (masked(x) for x in (inputs.logp, inputs.old_logp, inputs.advantage))
    log_ratio = logp - old
    if inputs.cu_seqlens is None:
        ratio = log_ratio.exp()
    else:
        ratio = _sequence_mean(log_ratio, keep, inputs.cu_seqlens).exp()
    loss, dlogp = _policy_term(ratio, logp, advantage, options)
    if inputs.rollout_logp is not None:
        weight = (old - masked(inputs.rollout_logp)).exp().clamp_(max=options.rollout_cap)
        loss, dlogp = loss.mul_(weight), dlogp.mul_(weight)
    ref_kl = torch.zeros_like(logp)
    if inputs.ref_logp is not None:
        d = logp - masked(inputs.ref_logp)
        ref_kl = _k3(d)
        is_k2 = options.kl_kind == "k2"
        loss.add_(d.square().div_(2) if is_k2 else ref_kl, alpha=options.kl_coef)
        dlogp.add_(d if is_k2 else -torch.expm1(-d), alpha=options.kl_coef)
    count = keep.sum().clamp_(min=1).to(wide)
    weight, scale = keep.to(wide), count.reciprocal()
    if inputs.weight is not None:
        weight, scale = masked(inputs.weight), torch.ones_like(count)
    is_up = (ratio > 1 + options.clip_high) & (advantage > 0)
    is_clipped = is_up | ((ratio < 1 - options.clip_low) & (advantage < 0))
    kept_ratio = torch.where(keep, ratio, 0.0)
    means = torch.stack(
        [(is_clipped & keep).sum(), kept_ratio.sum(), _k3(log_ratio).sum(), ref_kl.sum()]
    )
    clip_fraction, mean, old_kl, kl = means.div_(count).unbind()
    top = torch.cat([kept_ratio, kept_ratio.new_zeros(1)]).amax()
    stats = torch.stack([clip_fraction, mean, top, old_kl, kl]).to(torch.float32)
    return (loss * weight).sum() * scale, dlogp.mul_(weight), scale, stats


def _policy_term(
    ratio: Tensor, logp: Tensor, advantage: Tensor, options: PolicyLossOptions
) -> tuple[Tensor, Tensor]:
    """Loss of the variant and its gradient by logp, as d ratio / d logp = ratio."""
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high).mul_(advantage)
    if options.variant == "cispo":
        return -clipped * logp, clipped.neg_()
    gain = ratio * advantage
    loss = -torch.minimum(gain, clipped)
    has_gradient = gain <= clipped
    if options.dual_clip is not None:
        bound = -options.dual_clip * advantage
        has_gradient &= (advantage >= 0) | (loss <= bound)
        loss = torch.where(advantage < 0, torch.minimum(loss, bound), loss)
    return loss, torch.where(has_gradient, -gain, 0.0)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k2",
    rollout_cap: float = 2.0,
    variant: Variant = "grpo",
    backend: Backend = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, statistics) of [T] packed tokens; differentiable by `logprobs`.

    `mask` is true at sampled tokens; outside it every input may be anything, NaN included. Without
    `weights` the loss is the mean over the mask, with them (`nanorl`'s `token_weights`) the sum of
    weight times loss. `rollout_logprobs` turns on truncated importance sampling, capped at
    `rollout_cap` (inf: decoupled PPO). "gspo" needs `cu_seqlens` int32 [sequences + 1].

    Statistics are fp32 scalars on the device, means over the mask except `ratio_max`:
    `clip_fraction`, `ratio_mean`, `old_kl` and `ref_kl` (the k3 estimates).
    """
    options = PolicyLossOptions(
        variant, clip_low, clip_high, None if variant == "gspo" else dual_clip, kl_coef, kl_kind,
        rollout_cap,
    )  # fmt: skip
    _check_options(options)
    segments = cu_seqlens if variant == "gspo" else None
    inputs = PolicyLossInputs(
        logprobs, old_logprobs, advantages, mask, weights, ref_logprobs, rollout_logprobs, segments
    )
    _check(inputs, options)
    on_triton = use_triton(backend, logprobs)
    floats = {"old_logprobs": old_logprobs, "advantages": advantages, "weights": weights}
    floats |= {"ref_logprobs": ref_logprobs, "rollout_logprobs": rollout_logprobs}
    check_tensors(logprobs, "logprobs", on_triton, mask=mask, cu_seqlens=segments, **floats)
    check_floating(**floats)
    if segments is not None:
        check_integers(cu_seqlens=segments)
        check_bounds("cu_seqlens", segments, len(logprobs))
    loss, stats = _PolicyLoss.apply(logprobs, inputs, options, on_triton)
    return loss, dict(zip(STATS, stats.unbind(), strict=True))


def _check_options(options: PolicyLossOptions) -> None:
    if options.variant not in get_args(Variant):
        raise ValueError(f"variant={options.variant!r}: choose one of {get_args(Variant)}")
    if options.kl_kind not in get_args(KLKind):
        raise ValueError(f"kl_kind={options.kl_kind!r}: choose one of {get_args(KLKind)}")
    if not 0 <= options.clip_low < 1 or options.clip_high < 0:
        raise ValueError(
            f"clip_low={options.clip_low}, clip_high={options.clip_high}: must be in [0, 1) and "
            "not negative"
        )
    if options.dual_clip is not None and options.dual_clip <= 1:
        raise ValueError(f"dual_clip={options.dual_clip}: must be above 1, or None")
    if not options.rollout_cap > 0:
        raise ValueError(f"rollout_cap={options.rollout_cap}: must be positive; inf never caps")


def _check(inputs: PolicyLossInputs, options: PolicyLossOptions) -> None:
    if inputs.logp.dim() != 1:
        raise ValueError(f"logprobs: must be [tokens], got shape {tuple(inputs.logp.shape)}")
    named = {
        "old_logprobs": inputs.old_logp,
        "advantages": inputs.advantage,
        "mask": inputs.mask,
        "weights": inputs.weight,
        "ref_logprobs": inputs.ref_logp,
        "rollout_logprobs": inputs.rollout_logp,
    }
    for name, value in named.items():
        if value is not None and value.shape != inputs.logp.shape:
            raise ValueError(
                f"{name}: shape {tuple(value.shape)} must be logprobs' {tuple(inputs.logp.shape)}"
            )
    if options.variant == "gspo" and inputs.cu_seqlens is None:
        raise ValueError("cu_seqlens is missing: variant='gspo' has one ratio a sequence")
    if inputs.ref_logp is None and options.kl_coef != 0:
        raise ValueError(f"ref_logprobs is missing: kl_coef={options.kl_coef} reads it")
