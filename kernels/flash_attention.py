"""Causal attention over packed sequences (training), differentiable.

    o_t = softmax(scale · q_t · Kᵀ, keys of the same sequence up to t) · V

CPU: sequences of similar length are padded into one batch; a plan (`make_varlen_plan`) holds the
indices, so a micro-batch builds it once for all its layers. Blocks of 128 queries meet the keys
before them, with the arithmetic of `_attend.py`: no score matrix outlives its block, and the
backward pass keeps q, k and v alone.

Left out: windows, attention sinks, dropout. On a GPU this is torch's varlen attention for now; a
Triton forward and backward belong to a later change.

Legend: T tokens, H query heads, K key heads, G = H / K, B sequences, L padded keys, N = B · K,
D head_dim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from kernels._attend import (
    Scratch,
    bucket_by_length,
    key_multiple,
    probabilities,
    round_up,
    weighted_values,
)

QUERY_BLOCK = 128


def flash_attn_varlen_ref(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Sequence[int], softmax_scale: float
) -> Tensor:
    """The definition, one sequence at a time, differentiable by autograd alone."""
    group = q_THD.shape[1] // k_TKD.shape[1]
    outs = []
    for lo, hi in pairwise(cu_seqlens):
        q = q_THD[lo:hi].transpose(0, 1)
        k = k_TKD[lo:hi].transpose(0, 1).repeat_interleave(group, 0)
        v = v_TKD[lo:hi].transpose(0, 1).repeat_interleave(group, 0)
        future = torch.ones(hi - lo, hi - lo, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(future, -math.inf)
        outs.append((torch.softmax(scores, -1) @ v).transpose(0, 1))
    return torch.cat(outs)


@dataclass(frozen=True)
class _Bucket:
    """Sequences of similar length, padded to one rectangle."""

    num_seqs: int
    length: int
    gather: Tensor  # [num_seqs * length] the packed token of each cell (padding repeats a token)
    cells: Tensor  # [tokens] the cell of each of the bucket's tokens
    tokens: Tensor | None  # [tokens] their packed indices; None: all tokens, in order


@dataclass(frozen=True)
class VarlenPlan:
    """How packed sequences are laid out for CPU attention; built once a micro-batch."""

    buckets: list[_Bucket]
    num_tokens: int
    scratch: Scratch = field(default_factory=Scratch, repr=False, compare=False)


def make_varlen_plan(cu_seqlens: Tensor | Sequence[int], dtype: torch.dtype) -> VarlenPlan:
    """A plan for `flash_attn_varlen(..., plan=)` with q, k, v of this dtype."""
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    if not bounds or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens={bounds}: must start at 0 and never decrease")
    spans = [(lo, hi - lo) for lo, hi in pairwise(bounds) if hi > lo]
    multiple = key_multiple(dtype)
    buckets = []
    for members in bucket_by_length([n for _, n in spans], multiple):
        starts = torch.tensor([spans[i][0] for i in members]).unsqueeze(1)
        lengths = torch.tensor([spans[i][1] for i in members]).unsqueeze(1)
        length = round_up(int(lengths.max()), multiple)
        columns = torch.arange(length)
        gather = (starts + torch.minimum(columns, lengths - 1)).flatten()
        cells = (columns < lengths).flatten().nonzero().squeeze(1)
        tokens = None if len(members) == len(spans) else gather[cells]
        buckets.append(_Bucket(len(members), length, gather, cells, tokens))
    return VarlenPlan(buckets, bounds[-1])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        out = torch.empty_like(q)
        for bucket in plan.buckets:
            q_BKGLD, k_NLD, v_NLD = _padded(q, k, v, bucket)
            o = torch.empty_like(q_BKGLD)
            for lo in range(0, bucket.length, QUERY_BLOCK):
                hi = min(lo + QUERY_BLOCK, bucket.length)
                q_NRD = q_BKGLD[:, :, :, lo:hi].reshape(k_NLD.shape[0], -1, q.shape[2])
                p = _causal_probabilities(q_NRD, k_NLD, lo, hi, scale, plan.scratch)
                block = o[:, :, :, lo:hi]
                block.copy_(weighted_values(p, v_NLD[:, :hi], plan.scratch).view(block.shape))
            _scatter(out, bucket, o.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1))
        ctx.save_for_backward(q, k, v)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx, do):
        q, k, v = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for bucket in ctx.plan.buckets:
            padded = _padded(q, k, v, bucket)
            do_BKGLD = _to_heads(_gather_zero(do, bucket), k.shape[1])
            grads = _bucket_backward(*padded, do_BKGLD, bucket.length, ctx.scale, ctx.plan.scratch)
            dq_pad = grads[0].permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
            _scatter(dq, bucket, dq_pad)
            for out, grad in ((dk, grads[1]), (dv, grads[2])):
                grad = grad.unflatten(0, (bucket.num_seqs, -1)).transpose(1, 2).flatten(0, 1)
                _scatter(out, bucket, grad.to(out.dtype))
        return dq, dk, dv, None, None


def _bucket_backward(q_BKGLD, k_NLD, v_NLD, do_BKGLD, length, scale, scratch):
    """dq like q; dk and dv [N, L, D] summed in fp32."""
    wide = torch.promote_types(k_NLD.dtype, torch.float32)
    dq = torch.empty_like(q_BKGLD)
    dk = torch.zeros(k_NLD.shape, dtype=wide)
    dv = torch.zeros(k_NLD.shape, dtype=wide)
    for lo in range(0, length, QUERY_BLOCK):
        hi = min(lo + QUERY_BLOCK, length)
        rows = (k_NLD.shape[0], -1, k_NLD.shape[2])
        q_NRD = q_BKGLD[:, :, :, lo:hi].reshape(rows)
        do_NRD = do_BKGLD[:, :, :, lo:hi].reshape(rows)
        p = _causal_probabilities(q_NRD, k_NLD, lo, hi, scale, scratch)
        dp = scratch.take("scores", p.shape, k_NLD.dtype)
        torch.bmm(do_NRD, v_NLD[:, :hi].transpose(1, 2), out=dp)
        p_low = p if p.dtype == dp.dtype else scratch.take("p", p.shape, dp.dtype).copy_(p)
        dv[:, :hi] += torch.bmm(p_low.transpose(1, 2), do_NRD)
        dp = dp if dp.dtype == wide else scratch.take("wide", p.shape, wide).copy_(dp)
        ds = torch._softmax_backward_data(dp, p, -1, wide).mul_(scale)
        ds = ds if wide == k_NLD.dtype else scratch.take("scores", p.shape, k_NLD.dtype).copy_(ds)
        dk[:, :hi] += torch.bmm(ds.transpose(1, 2), q_NRD)
        block = dq[:, :, :, lo:hi]
        block.copy_(torch.bmm(ds, k_NLD[:, :hi]).view(block.shape))
    return dq, dk, dv


def _causal_probabilities(q_NRD, k_NLD, lo, hi, scale, scratch) -> Tensor:
    """Weights of the queries lo..hi over the keys 0..hi."""
    wide = torch.promote_types(q_NRD.dtype, torch.float32)
    future = torch.full((hi - lo, hi - lo), -math.inf, dtype=wide).triu_(1)
    grid = (q_NRD.shape[0], -1, hi - lo)
    return probabilities(q_NRD, k_NLD[:, :hi], future, grid, scale, scratch)


def _gather(x_THD: Tensor, bucket: _Bucket) -> Tensor:
    return x_THD.index_select(0, bucket.gather).unflatten(0, (bucket.num_seqs, bucket.length))


def _gather_zero(x_THD: Tensor, bucket: _Bucket) -> Tensor:
    """As `_gather`, with zeros in the padding."""
    out = x_THD.new_zeros(bucket.num_seqs * bucket.length, *x_THD.shape[1:])
    out[bucket.cells] = x_THD if bucket.tokens is None else x_THD[bucket.tokens]
    return out.unflatten(0, (bucket.num_seqs, bucket.length))


def _scatter(out_THD: Tensor, bucket: _Bucket, cells_NHD: Tensor) -> None:
    if bucket.tokens is None:
        torch.index_select(cells_NHD, 0, bucket.cells, out=out_THD)
    else:
        out_THD.index_copy_(0, bucket.tokens, cells_NHD.index_select(0, bucket.cells))


def _to_heads(x_BLHD: Tensor, num_kv: int) -> Tensor:
    """[B, K, G, L, D]."""
    return x_BLHD.unflatten(2, (num_kv, -1)).permute(0, 2, 3, 1, 4)


def _padded(q: Tensor, k: Tensor, v: Tensor, bucket: _Bucket) -> tuple[Tensor, Tensor, Tensor]:
    """q as [B, K, G, L, D]; k and v as [N, L, D]."""
    k_NLD = _gather(k, bucket).transpose(1, 2).flatten(0, 1)
    v_NLD = _gather(v, bucket).transpose(1, 2).flatten(0, 1)
    return _to_heads(_gather(q, bucket), k.shape[1]), k_NLD, v_NLD


def flash_attn_varlen(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    max_seqlen: int,
    *,
    softmax_scale: float | None = None,
    plan: VarlenPlan | None = None,
) -> Tensor:
    """Causal grouped-query attention inside each packed sequence; returns o [T, H, D].

    `cu_seqlens` is [sequences + 1], starting at 0 and ending at T. `softmax_scale` defaults to
    head_dim ** -0.5. `plan` is `make_varlen_plan(cu_seqlens, dtype)` (CPU only); it owns scratch
    memory, so one plan serves one thread.
    """
    check_heads(q_THD, k_TKD, v_TKD)
    scale = softmax_scale if softmax_scale is not None else q_THD.shape[-1] ** -0.5
    if q_THD.is_cuda:
        return _varlen_cuda(q_THD, k_TKD, v_TKD, cu_seqlens, max_seqlen, scale)
    plan = plan if plan is not None else make_varlen_plan(cu_seqlens, q_THD.dtype)
    if plan.num_tokens != q_THD.shape[0]:
        raise ValueError(
            f"cu_seqlens: ends at {plan.num_tokens}, must end at the {q_THD.shape[0]} tokens of q"
        )
    return _Attention.apply(q_THD.contiguous(), k_TKD.contiguous(), v_TKD.contiguous(), plan, scale)


def _varlen_cuda(q, k, v, cu_seqlens, max_seqlen, scale) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    cu = torch.as_tensor(cu_seqlens, dtype=torch.int32, device=q.device)
    out = varlen_attn(q, k, v, cu, cu, max_seqlen, max_seqlen, scale=scale, window_size=(-1, 0))
    return out[0] if isinstance(out, tuple) else out


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 3 or k.dim() != 3:
        raise ValueError(f"q, k: must be [tokens, heads, head_dim], got {q.dim()}-d, {k.dim()}-d")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ValueError(
            f"k, v: shapes {tuple(k.shape)}, {tuple(v.shape)} must be equal and match q "
            f"{tuple(q.shape)} in tokens and head_dim"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q: {q.shape[1]} heads must be a multiple of k's {k.shape[1]}")
