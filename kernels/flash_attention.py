"""Causal attention over packed sequences (training), differentiable.

    o_t = softmax(scale · q_t · Kᵀ, keys of the same sequence up to t) · V

CPU: sequences of similar length are padded into one batch; a plan (`make_varlen_plan`) holds the
indices, so a micro-batch builds it once for all its layers. Padding never changes a bit:

* bf16 runs torch's fused CPU attention, which gives a query the same bits for any batch, padding,
  chunk and thread count as long as the number of keys is a multiple of 16;
* fp32 runs two batched matmuls and a softmax, because the fused kernel is not invariant there.
  The matmuls are, given at least 4 rows and a product with V cut into blocks of exactly 128 keys
  that are added in order.

`attend_masked` is that arithmetic for any mask; paged attention uses it, so decoding repeats the
trainer's bits. The backward pass saves q, k and v (bf16 also o and lse), all of them packed.

Left out: windows, attention sinks, dropout. On a GPU this is torch's varlen attention for now; a
Triton forward and backward belong to a later change.

Legend: T tokens, H query heads, K key heads, G = H / K, B sequences, L padded keys, Q padded
queries, D head_dim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

KEY_BLOCK = 128
"""fp32 keys are padded to this, and P·V is summed in blocks of it."""

_MIN_ROWS = 4
_MAX_SCORES = 1 << 24  # fp32 scores held at a time: 64 MB


def key_multiple(dtype: torch.dtype) -> int:
    """The number of keys is padded to a multiple of this, for bit-invariance."""
    return 16 if dtype in (torch.bfloat16, torch.float16) else KEY_BLOCK


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def flash_attn_varlen_ref(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Sequence[int], softmax_scale: float
) -> Tensor:
    """The definition, one sequence at a time, differentiable by autograd alone."""
    group = q_THD.shape[1] // k_TKD.shape[1]
    outs = []
    for lo, hi in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
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


def make_varlen_plan(cu_seqlens: Tensor | Sequence[int], dtype: torch.dtype) -> VarlenPlan:
    """A plan for `flash_attn_varlen(..., plan=)` with q, k, v of this dtype."""
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    if not bounds or bounds[0] != 0 or any(a > b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise ValueError(f"cu_seqlens={bounds}: must start at 0 and never decrease")
    spans = [(lo, hi - lo) for lo, hi in zip(bounds, bounds[1:], strict=False) if hi > lo]
    multiple = key_multiple(dtype)
    buckets = []
    for members in bucket_by_length([n for _, n in spans], multiple):
        starts = torch.tensor([spans[i][0] for i in members])
        lengths = torch.tensor([spans[i][1] for i in members])
        length = round_up(int(lengths.max()), multiple)
        columns = torch.arange(length)
        is_real = columns < lengths.unsqueeze(1)
        gather = (starts.unsqueeze(1) + torch.minimum(columns, lengths.unsqueeze(1) - 1)).flatten()
        cells = is_real.flatten().nonzero().squeeze(1)
        tokens = None if len(members) == len(spans) else gather[cells]
        buckets.append(_Bucket(len(members), length, gather, cells, tokens))
    return VarlenPlan(buckets, bounds[-1])


def bucket_by_length(lengths: Sequence[int], multiple: int) -> list[list[int]]:
    """Splits indices into groups whose padded lengths differ by at most a third.

    A group keeps the order of its members; a batch that fits one group keeps the batch's order.
    """
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        padded = round_up(lengths[i], multiple)
        if not groups or padded * 3 < longest * 2:
            groups.append([])
            longest = padded
        groups[-1].append(i)
    return [sorted(g) for g in groups]


def attend_masked(
    q_BQHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, mask_B1QL: Tensor, softmax_scale: float
) -> Tensor:
    """Attention of padded sequences under an additive mask; returns [B, Q, H, D]. No autograd.

    Rows must be 1 or at least 4 queries (`plan`s see to it), L a multiple of `key_multiple`.
    """
    if q_BQHD.dtype in (torch.bfloat16, torch.float16):
        return _attend_fused(q_BQHD, k_BLKD, v_BLKD, mask_B1QL, softmax_scale)
    return _attend_exact(q_BQHD, k_BLKD, v_BLKD, mask_B1QL, softmax_scale)


def _attend_fused(q_BQHD, k_BLKD, v_BLKD, mask_B1QL, scale) -> Tensor:
    num_seqs, num_queries, num_heads, head_dim = q_BQHD.shape
    num_kv = k_BLKD.shape[2]
    k, v = k_BLKD.transpose(1, 2), v_BLKD.transpose(1, 2)
    if num_queries == 1:  # the heads of a group become rows: no expanded copy of k and v
        q = q_BQHD.view(num_seqs, num_kv, num_heads // num_kv, head_dim)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1QL, scale=scale)
        return o.reshape(num_seqs, 1, num_heads, head_dim)
    o = F.scaled_dot_product_attention(
        q_BQHD.transpose(1, 2), k, v, attn_mask=mask_B1QL, scale=scale, enable_gqa=True
    )
    return o.transpose(1, 2)


def _attend_exact(q_BQHD, k_BLKD, v_BLKD, mask_B1QL, scale) -> Tensor:
    num_seqs, num_queries, num_heads, head_dim = q_BQHD.shape
    num_kv, num_keys = k_BLKD.shape[2], k_BLKD.shape[1]
    group = num_heads // num_kv
    k = k_BLKD.transpose(1, 2).reshape(num_seqs * num_kv, num_keys, head_dim)
    v = v_BLKD.transpose(1, 2).reshape(num_seqs * num_kv, num_keys, head_dim)
    step = max(4, _MAX_SCORES // (num_seqs * num_heads * num_keys) // 4 * 4)
    outs = []
    for lo in range(0, num_queries, step):
        lo = max(0, min(lo, num_queries - _MIN_ROWS))  # the last piece also has 4 rows
        q = q_BQHD[:, lo : lo + step].unflatten(2, (num_kv, group)).permute(0, 2, 3, 1, 4)
        n = q.shape[3]
        q = q.reshape(num_seqs * num_kv, group * n, head_dim)
        if group * n < _MIN_ROWS:
            q = F.pad(q, (0, 0, 0, _MIN_ROWS - group * n))
        scores = torch.bmm(q * scale, k.transpose(1, 2))
        grid = (num_seqs, num_heads, n) if group * n >= _MIN_ROWS else (num_seqs, -1, 1)
        scores.view(*grid, num_keys).add_(mask_B1QL[:, :, lo : lo + step])
        o = weighted_values(torch.softmax(scores, -1), v)[:, : group * n]
        o = o.reshape(num_seqs, num_kv, group, n, head_dim).permute(0, 3, 1, 2, 4).flatten(2, 3)
        outs.append(o[:, sum(x.shape[1] for x in outs) - lo :])
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def weighted_values(p_NRL: Tensor, v_NLD: Tensor) -> Tensor:
    """P · V, summed over blocks of 128 keys in order."""
    out = torch.bmm(p_NRL[:, :, :KEY_BLOCK], v_NLD[:, :KEY_BLOCK])
    for lo in range(KEY_BLOCK, v_NLD.shape[1], KEY_BLOCK):
        out += torch.bmm(p_NRL[:, :, lo : lo + KEY_BLOCK], v_NLD[:, lo : lo + KEY_BLOCK])
    return out


class _FusedAttention(torch.autograd.Function):
    """bf16: torch's fused CPU forward and backward on padded copies that are not kept."""

    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        out = torch.empty_like(q)
        lses = []
        for bucket in plan.buckets:
            o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_padded_qkv(q, k, v, bucket), 0.0, True, scale=scale
            )
            lses.append(lse)
            _scatter(out, bucket, o.transpose(1, 2).flatten(0, 1))
        ctx.save_for_backward(q, k, v, out, *lses)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx, do):
        q, k, v, out, *lses = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for bucket, lse in zip(ctx.plan.buckets, lses, strict=True):
            do_pad = _gather_zero(do, bucket).transpose(1, 2)
            o_pad = _gather(out, bucket).transpose(1, 2)
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                do_pad, *_padded_qkv(q, k, v, bucket), o_pad, lse, 0.0, True, scale=ctx.scale
            )
            dq_pad, dk_pad, dv_pad = (g.transpose(1, 2).flatten(0, 1) for g in grads)
            _scatter(dq, bucket, dq_pad)
            _scatter(dk, bucket, _sum_groups(dk_pad, k.shape[1]))
            _scatter(dv, bucket, _sum_groups(dv_pad, k.shape[1]))
        return dq, dk, dv, None, None


class _ExactAttention(torch.autograd.Function):
    """fp32 and fp64: matmuls over blocks of 128 queries and the keys before them."""

    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        out = torch.empty_like(q)
        for bucket in plan.buckets:
            q_BKGLD, k_NLD, v_NLD = _grouped(q, k, v, bucket)
            o = torch.empty_like(q_BKGLD)
            for lo in range(0, bucket.length, KEY_BLOCK):
                p, _ = _probabilities(q_BKGLD, k_NLD, lo, scale)
                o_block = weighted_values(p, v_NLD[:, : lo + KEY_BLOCK])
                block = o[:, :, :, lo : lo + KEY_BLOCK]
                block.copy_(o_block.view(block.shape))
            _scatter(out, bucket, o.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1))
        ctx.save_for_backward(q, k, v)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx, do):
        q, k, v = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for bucket in ctx.plan.buckets:
            q_BKGLD, k_NLD, v_NLD = _grouped(q, k, v, bucket)
            do_BKGLD = _gather_zero(do, bucket).unflatten(2, q_BKGLD.shape[1:3])
            do_BKGLD = do_BKGLD.permute(0, 2, 3, 1, 4)
            dq_pad = torch.empty_like(q_BKGLD)
            dk_pad, dv_pad = torch.zeros_like(k_NLD), torch.zeros_like(v_NLD)
            for lo in range(0, bucket.length, KEY_BLOCK):
                hi = lo + KEY_BLOCK
                p, q_rows = _probabilities(q_BKGLD, k_NLD, lo, ctx.scale)
                do_rows = do_BKGLD[:, :, :, lo:hi].reshape(q_rows.shape)
                dv_pad[:, :hi] += torch.bmm(p.transpose(1, 2), do_rows)
                dp = torch.bmm(do_rows, v_NLD[:, :hi].transpose(1, 2))
                ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
                dk_pad[:, :hi] += torch.bmm(ds.transpose(1, 2), q_rows)
                block = dq_pad[:, :, :, lo:hi]
                block.copy_(torch.bmm(ds, k_NLD[:, :hi]).mul_(ctx.scale).view(block.shape))
            _scatter(dq, bucket, dq_pad.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1))
            kv_shape = (bucket.num_seqs, k.shape[1], bucket.length, k.shape[2])
            _scatter(dk, bucket, dk_pad.view(kv_shape).transpose(1, 2).flatten(0, 1))
            _scatter(dv, bucket, dv_pad.view(kv_shape).transpose(1, 2).flatten(0, 1))
        return dq, dk, dv, None, None


def _probabilities(q_BKGLD, k_NLD, lo, scale) -> tuple[Tensor, Tensor]:
    """softmax of one block of queries over the keys up to its end, and the scaled queries."""
    hi = lo + KEY_BLOCK
    q = q_BKGLD[:, :, :, lo:hi] * scale
    q_rows = q.reshape(k_NLD.shape[0], -1, q.shape[-1])
    scores = torch.bmm(q_rows, k_NLD[:, :hi].transpose(1, 2))
    future = torch.full((KEY_BLOCK, KEY_BLOCK), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    scores.view(k_NLD.shape[0], -1, KEY_BLOCK, hi)[..., lo:] += future
    return torch.softmax(scores, -1), q_rows


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


def _padded_qkv(q, k, v, bucket) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, L, D] views, k and v repeated to the query heads."""
    group = q.shape[1] // k.shape[1]

    def expand(x: Tensor) -> Tensor:
        x = _gather(x, bucket).transpose(1, 2)
        return x if group == 1 else x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)

    return _gather(q, bucket).transpose(1, 2), expand(k), expand(v)


def _sum_groups(x_NHD: Tensor, num_kv: int) -> Tensor:
    group = x_NHD.shape[1] // num_kv
    if group == 1:
        return x_NHD
    return x_NHD.unflatten(1, (num_kv, group)).sum(2, dtype=torch.float32).to(x_NHD.dtype)


def _grouped(q, k, v, bucket) -> tuple[Tensor, Tensor, Tensor]:
    """q as [B, K, G, L, D]; k and v as [B·K, L, D]."""
    group = q.shape[1] // k.shape[1]
    q_BKGLD = _gather(q, bucket).unflatten(2, (k.shape[1], group)).permute(0, 2, 3, 1, 4)
    k_NLD = _gather(k, bucket).transpose(1, 2).flatten(0, 1)
    v_NLD = _gather(v, bucket).transpose(1, 2).flatten(0, 1)
    return q_BKGLD.contiguous(), k_NLD.contiguous(), v_NLD.contiguous()


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
    head_dim ** -0.5. `plan` is `make_varlen_plan(cu_seqlens, dtype)` (CPU only).
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
    is_half = q_THD.dtype in (torch.bfloat16, torch.float16)
    function = _FusedAttention if is_half else _ExactAttention
    return function.apply(q_THD.contiguous(), k_TKD.contiguous(), v_TKD.contiguous(), plan, scale)


def _varlen_cuda(q, k, v, cu_seqlens, max_seqlen, scale) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    cu = torch.as_tensor(cu_seqlens, dtype=torch.int32, device=q.device)
    return varlen_attn(q, k, v, cu, cu, max_seqlen, max_seqlen, scale=scale, window_size=(-1, 0))


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 3 or k.dim() != 3:
        raise ValueError(
            f"q, k: must be [tokens, heads, head_dim], got {q.dim()}-d and {k.dim()}-d"
        )
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ValueError(
            f"k, v: shapes {tuple(k.shape)}, {tuple(v.shape)} must be equal and match q "
            f"{tuple(q.shape)} in tokens and head_dim"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q: {q.shape[1]} heads must be a multiple of k's {k.shape[1]}")
