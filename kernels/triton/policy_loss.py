"""Triton kernels of `policy_loss`: per-token loss and gradient with partial sums, then one program
that adds the partials in order; before them, for gspo, one program a sequence for its ratio."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch

if TYPE_CHECKING:
    from kernels.policy_loss import PolicyLossInputs, PolicyLossOptions

_BLOCK = 512
_COLUMNS = 8  # loss, count, clipped, ratio, largest ratio, old KL, reference KL, unused


@triton.jit
def _expm1(x):
    """exp(x) − 1 without cancellation near 0, where a series to x⁹/9! is exact to fp32."""
    series = 1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8 * (1 + x / 9)))))
    series = x * (1 + x / 2 * (1 + x / 3 * series))
    return tl.where(tl.abs(x) < 0.5, series, tl.exp(x) - 1)


@triton.jit
def _k3(d):
    """exp(−d) − 1 + d, near 0 by its series from d²/2 on."""
    series = 1 - d / 6 * (1 - d / 7 * (1 - d / 8 * (1 - d / 9)))
    series = d * d / 2 * (1 - d / 3 * (1 - d / 4 * (1 - d / 5 * series)))
    return tl.where(tl.abs(d) < 0.5, series, tl.exp(-d) - 1 + d)


@triton.jit
def _load(ptr, at, inside, keep):
    """fp32, 0 where not kept: whatever lies there, NaN included, has no say."""
    return tl.where(keep, tl.load(ptr + at, inside, other=0.0).to(tl.float32), 0.0)


@triton.jit
def sequence_log_ratio_kernel(logp_ptr, old_ptr, mask_ptr, cu_ptr, mean_ptr, BLOCK: tl.constexpr):
    first = tl.load(cu_ptr + tl.program_id(0)).to(tl.int64)
    end = tl.load(cu_ptr + tl.program_id(0) + 1).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    count = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keep = (tl.load(mask_ptr + at, at < end, other=0) != 0) & (at < end)
        total += _load(logp_ptr, at, at < end, keep) - _load(old_ptr, at, at < end, keep)
        count += keep.to(tl.float32)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1.0)
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(mean_ptr + at, tl.zeros([BLOCK], dtype=tl.float32) + mean, at < end)


@triton.jit
def policy_loss_kernel(
    logp_ptr, old_ptr, advantage_ptr, mask_ptr, weight_ptr, ref_ptr, rollout_ptr, sequence_ptr,
    dlogp_ptr, partial_ptr, num_tokens, clip_low, clip_high, dual_clip, kl_coef, rollout_cap,
    IS_CISPO: tl.constexpr, HAS_DUAL_CLIP: tl.constexpr, IS_K2: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    keep = (tl.load(mask_ptr + at, inside, other=0) != 0) & inside
    logp = _load(logp_ptr, at, inside, keep)
    old = _load(old_ptr, at, inside, keep)
    advantage = _load(advantage_ptr, at, inside, keep)
    log_ratio = logp - old
    old_kl = _k3(log_ratio)
    if sequence_ptr is not None:
        log_ratio = _load(sequence_ptr, at, inside, keep)
    ratio = tl.exp(log_ratio)
    clipped = tl.minimum(tl.maximum(ratio, 1 - clip_low), 1 + clip_high) * advantage
    if IS_CISPO:
        loss, dlogp = -clipped * logp, -clipped
    else:
        gain = ratio * advantage
        loss = -tl.minimum(gain, clipped)
        has_gradient = gain <= clipped
        if HAS_DUAL_CLIP:
            bound = -dual_clip * advantage
            has_gradient = has_gradient & ((advantage >= 0) | (loss <= bound))
            loss = tl.where(advantage < 0, tl.minimum(loss, bound), loss)
        dlogp = tl.where(has_gradient, -gain, 0.0)
    if rollout_ptr is not None:
        weight = tl.minimum(tl.exp(old - _load(rollout_ptr, at, inside, keep)), rollout_cap)
        loss, dlogp = loss * weight, dlogp * weight
    ref_kl = tl.zeros([BLOCK], dtype=tl.float32)
    if ref_ptr is not None:
        d = logp - _load(ref_ptr, at, inside, keep)
        ref_kl = _k3(d)
        if IS_K2:
            loss, dlogp = loss + kl_coef * (d * d / 2), dlogp + kl_coef * d
        else:
            loss, dlogp = loss + kl_coef * ref_kl, dlogp - kl_coef * _expm1(-d)
    token_weight = keep.to(tl.float32)
    if weight_ptr is not None:
        token_weight = _load(weight_ptr, at, inside, keep)
    tl.store(dlogp_ptr + at, dlogp * token_weight, inside)
    is_up = (ratio > 1 + clip_high) & (advantage > 0)
    is_clipped = is_up | ((ratio < 1 - clip_low) & (advantage < 0))
    ratio = tl.where(keep, ratio, 0.0)
    out = partial_ptr + program * COLUMNS
    tl.store(out, tl.sum(loss * token_weight, 0))
    tl.store(out + 1, tl.sum(keep.to(tl.float32), 0))
    tl.store(out + 2, tl.sum((is_clipped & keep).to(tl.float32), 0))
    tl.store(out + 3, tl.sum(ratio, 0))
    tl.store(out + 4, tl.max(ratio, 0))
    tl.store(out + 5, tl.sum(old_kl, 0))
    tl.store(out + 6, tl.sum(ref_kl, 0))


@triton.jit
def _sum_column(partial_ptr, column, num_partials, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_partials, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + rows * COLUMNS + column, rows < num_partials, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def finish_policy_loss_kernel(
    partial_ptr, loss_ptr, scale_ptr, stats_ptr, num_partials, IS_MEAN: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    count = tl.maximum(_sum_column(partial_ptr, 1, num_partials, COLUMNS, BLOCK), 1.0)
    loss = _sum_column(partial_ptr, 0, num_partials, COLUMNS, BLOCK)
    scale = count * 0 + 1
    if IS_MEAN:
        scale = 1 / count
    tl.store(loss_ptr, loss * scale)
    tl.store(scale_ptr, scale)
    top = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_partials, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        part = tl.load(partial_ptr + rows * COLUMNS + 4, rows < num_partials, other=0.0)
        top = tl.maximum(top, part)
    tl.store(stats_ptr, _sum_column(partial_ptr, 2, num_partials, COLUMNS, BLOCK) / count)
    tl.store(stats_ptr + 1, _sum_column(partial_ptr, 3, num_partials, COLUMNS, BLOCK) / count)
    tl.store(stats_ptr + 2, tl.max(top, 0))
    tl.store(stats_ptr + 3, _sum_column(partial_ptr, 5, num_partials, COLUMNS, BLOCK) / count)
    tl.store(stats_ptr + 4, _sum_column(partial_ptr, 6, num_partials, COLUMNS, BLOCK) / count)


def forward(
    inputs: "PolicyLossInputs", options: "PolicyLossOptions"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss, its gradient by logp before the division by `1 / scale`, scale, and statistics."""
    logp, old, advantage, mask = (
        x.contiguous() for x in (inputs.logp, inputs.old_logp, inputs.advantage, inputs.mask)
    )
    weight, ref, rollout = (
        None if x is None else x.contiguous()
        for x in (inputs.weight, inputs.ref_logp, inputs.rollout_logp)
    )
    num_tokens, device = logp.shape[0], logp.device
    dlogp = torch.empty(num_tokens, dtype=torch.float32, device=device)
    num_programs = triton.cdiv(num_tokens, _BLOCK)
    partial = torch.empty(num_programs, _COLUMNS, dtype=torch.float32, device=device)
    loss, scale = (torch.empty((), dtype=torch.float32, device=device) for _ in range(2))
    stats = torch.empty(5, dtype=torch.float32, device=device)
    sequence = _sequence_log_ratio(logp, old, mask, inputs.cu_seqlens)
    dual_clip = options.dual_clip
    if num_tokens:
        launch(policy_loss_kernel, (num_programs,))(
            logp, old, advantage, mask, weight, ref, rollout, sequence, dlogp, partial,
            num_tokens, options.clip_low, options.clip_high,
            0.0 if dual_clip is None else dual_clip, options.kl_coef, options.rollout_cap,
            IS_CISPO=options.variant == "cispo", HAS_DUAL_CLIP=dual_clip is not None,
            IS_K2=options.kl_kind == "k2", BLOCK=_BLOCK, COLUMNS=_COLUMNS,
        )  # fmt: skip
    launch(finish_policy_loss_kernel, (1,))(
        partial, loss, scale, stats, num_programs, IS_MEAN=weight is None, COLUMNS=_COLUMNS,
        BLOCK=256,
    )  # fmt: skip
    return loss, dlogp, scale, stats


def _sequence_log_ratio(
    logp: Tensor, old: Tensor, mask: Tensor, cu_seqlens: Tensor | None
) -> Tensor | None:
    if cu_seqlens is None:
        return None
    mean = torch.empty(logp.shape, dtype=torch.float32, device=logp.device)
    if cu_seqlens.shape[0] > 1:
        launch(sequence_log_ratio_kernel, (cu_seqlens.shape[0] - 1,))(
            logp, old, mask, cu_seqlens, mean, BLOCK=_BLOCK
        )
    return mean
