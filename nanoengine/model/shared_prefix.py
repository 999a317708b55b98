"""Attention over trees of packed segments: a prompt that several completions share is read once.

A segment continues the segment named in `prefix_of_S` (-1: none). Its queries see all keys of its
ancestors and its own keys up to themselves, which is what they would see in a sequence of their
own. In GRPO all members of a group share the prompt, so the linear layers, which are nearly all of
the work, run over the prompt once instead of once a member.

CPU: each segment becomes one row of a batch whose keys are [ancestors, own] gathered side by side
and whose queries are its own alone, so no work goes into masked pairs of different branches. The
keys of a query lie where they would in the unshared sequence, hence the output has the same bits
as `flash_attn_varlen` of that sequence (see kernels/flash_attention.py for why). The gradient of
a shared key is summed over branches in fp32.

Left out: a GPU kernel; `supports_shared_prefix` says where this can run.

Legend: N rows, H query heads, K key heads, D head_dim, B segments of a bucket, Q padded queries,
L padded keys, S segments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.flash_attention import attend_masked, bucket_by_length, key_multiple, round_up

_QUERY_MULTIPLE = 4  # the fp32 matmuls are row-invariant from 4 rows on


def supports_shared_prefix(device: torch.device | str) -> bool:
    return torch.device(device).type == "cpu"


@dataclass(frozen=True)
class _Side:
    """How the rows of one side (queries or keys) lie in a bucket's rectangle."""

    shape: tuple[int, int]  # segments, padded length
    gather: Tensor  # [B * length] the row of each cell; padding repeats the segment's last
    cells: Tensor  # [rows] the cells that are no padding
    rows: Tensor  # [rows] their rows

    def pad(self, x_NHD: Tensor) -> Tensor:
        """[B, H, length, D]; padding holds copies."""
        return x_NHD.index_select(0, self.gather).unflatten(0, self.shape).transpose(1, 2)

    def pad_with_zeros(self, x_NHD: Tensor) -> Tensor:
        out = x_NHD.new_zeros(self.shape[0] * self.shape[1], *x_NHD.shape[1:])
        out[self.cells] = x_NHD.index_select(0, self.rows)
        return out.unflatten(0, self.shape).transpose(1, 2)

    def unpad(self, x_BHLD: Tensor) -> Tensor:
        """The cells that are no padding, [rows, H, D]."""
        return x_BHLD.transpose(1, 2).flatten(0, 1).index_select(0, self.cells)


@dataclass(frozen=True)
class _Bucket:
    queries: _Side
    keys: _Side
    mask_B1QL: Tensor


class SharedPrefixContext:
    """`AttentionContext` of one micro-batch of segment trees. Differentiable.

    `cu_seqlens` [S + 1] bounds the segments; a parent comes before its children.
    """

    def __init__(
        self, cu_seqlens: Tensor | Sequence[int], prefix_of_S: Sequence[int], dtype: torch.dtype
    ) -> None:
        bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
        if len(bounds) != len(prefix_of_S) + 1:
            raise ValueError(f"cu_seqlens has {len(bounds)} bounds for {len(prefix_of_S)} segments")
        self._buckets = _make_buckets(bounds, prefix_of_S, dtype)

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        function = _FusedTree if q_THD.dtype in (torch.bfloat16, torch.float16) else _ExactTree
        scale = q_THD.shape[-1] ** -0.5
        return function.apply(q_THD, k_TKD, v_TKD, self._buckets, scale)


def _make_buckets(
    bounds: list[int], prefix_of_S: Sequence[int], dtype: torch.dtype
) -> list[_Bucket]:
    own = [list(range(lo, hi)) for lo, hi in pairwise(bounds)]
    keys: list[list[int]] = []
    for segment, parent in enumerate(prefix_of_S):
        if not -1 <= parent < segment:
            raise ValueError(f"prefix_of_S[{segment}]={parent}: a parent must come before it")
        keys.append(own[segment] if parent < 0 else keys[parent] + own[segment])
    multiple = key_multiple(dtype)
    buckets = []
    for is_root in (True, False):
        kind = [s for s, p in enumerate(prefix_of_S) if (p < 0) is is_root and own[s]]
        for members in bucket_by_length([len(keys[s]) for s in kind], multiple):
            chosen = [kind[i] for i in members]
            query_rows, key_rows = [own[s] for s in chosen], [keys[s] for s in chosen]
            queries, key_side = _side(query_rows, _QUERY_MULTIPLE), _side(key_rows, multiple)
            mask = _mask(query_rows, key_rows, queries.shape[1], key_side.shape[1], dtype)
            buckets.append(_Bucket(queries, key_side, mask))
    return buckets


def _side(rows_of: list[list[int]], multiple: int) -> _Side:
    length = round_up(max(len(rows) for rows in rows_of), multiple)
    gather = [row for rows in rows_of for row in rows + rows[-1:] * (length - len(rows))]
    cells = [i * length + j for i, rows in enumerate(rows_of) for j in range(len(rows))]
    flat = [row for rows in rows_of for row in rows]
    return _Side(
        (len(rows_of), length), torch.tensor(gather), torch.tensor(cells), torch.tensor(flat)
    )


def _mask(
    query_rows: list[list[int]],
    key_rows: list[list[int]],
    num_queries: int,
    num_keys: int,
    dtype: torch.dtype,
) -> Tensor:
    """Query i of a segment sees keys 0 .. (number of ancestor keys) + i."""
    last = [
        [len(keys) - len(queries) + min(i, len(queries) - 1) for i in range(num_queries)]
        for queries, keys in zip(query_rows, key_rows, strict=True)
    ]
    is_hidden = torch.arange(num_keys) > torch.tensor(last).unsqueeze(-1)
    return torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, -math.inf).unsqueeze(1)


def _repeat_heads(x_BKLD: Tensor, num_heads: int) -> Tensor:
    group = num_heads // x_BKLD.shape[1]
    if group == 1:
        return x_BKLD
    return x_BKLD.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)


def _add_keys(total_NKD: Tensor, bucket: _Bucket, grad_BHLD: Tensor) -> None:
    """Sum over the query heads of a group and over the branches that share a key, in order."""
    rows = bucket.keys.unpad(grad_BHLD).unflatten(1, (total_NKD.shape[1], -1))
    total_NKD.index_add_(0, bucket.keys.rows, rows.sum(2, dtype=total_NKD.dtype))


class _FusedTree(torch.autograd.Function):
    """bf16: torch's fused CPU attention, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, buckets: list[_Bucket], scale: float
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lses = []
        for bucket in buckets:
            o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                bucket.queries.pad(q),
                _repeat_heads(bucket.keys.pad(k), q.shape[1]),
                _repeat_heads(bucket.keys.pad(v), q.shape[1]),
                attn_mask=bucket.mask_B1QL,
                scale=scale,
            )
            lses.append(lse)
            out.index_copy_(0, bucket.queries.rows, bucket.queries.unpad(o))
        ctx.save_for_backward(q, k, v, out, *lses)
        ctx.buckets, ctx.scale = buckets, scale
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *lses = ctx.saved_tensors
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (k, v))
        for bucket, lse in zip(ctx.buckets, lses, strict=True):
            dq_pad, dk_pad, dv_pad = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    bucket.queries.pad_with_zeros(do),
                    bucket.queries.pad(q),
                    _repeat_heads(bucket.keys.pad(k), q.shape[1]),
                    _repeat_heads(bucket.keys.pad(v), q.shape[1]),
                    bucket.queries.pad(out),
                    lse,
                    0.0,
                    False,
                    attn_mask=bucket.mask_B1QL,
                    scale=ctx.scale,
                )
            )
            dq.index_copy_(0, bucket.queries.rows, bucket.queries.unpad(dq_pad))
            _add_keys(dk, bucket, dk_pad)
            _add_keys(dv, bucket, dv_pad)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


class _ExactTree(torch.autograd.Function):
    """fp32 and fp64: `attend_masked` forward; the textbook backward from recomputed weights."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, buckets: list[_Bucket], scale: float
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for bucket in buckets:
            o_BQHD = attend_masked(
                bucket.queries.pad(q).transpose(1, 2),
                bucket.keys.pad(k).transpose(1, 2),
                bucket.keys.pad(v).transpose(1, 2),
                bucket.mask_B1QL,
                scale,
            )
            out.index_copy_(0, bucket.queries.rows, bucket.queries.unpad(o_BQHD.transpose(1, 2)))
        ctx.save_for_backward(q, k, v)
        ctx.buckets, ctx.scale = buckets, scale
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for bucket in ctx.buckets:
            q_pad = bucket.queries.pad(q) * ctx.scale
            do_pad = bucket.queries.pad_with_zeros(do)
            k_pad = _repeat_heads(bucket.keys.pad(k), q.shape[1])
            v_pad = _repeat_heads(bucket.keys.pad(v), q.shape[1])
            p = torch.softmax(q_pad @ k_pad.transpose(2, 3) + bucket.mask_B1QL, -1)
            _add_keys(dv, bucket, p.transpose(2, 3) @ do_pad)
            dp = do_pad @ v_pad.transpose(2, 3)
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            _add_keys(dk, bucket, ds.transpose(2, 3) @ q_pad)
            dq_pad = (ds @ k_pad).mul_(ctx.scale)
            dq.index_copy_(0, bucket.queries.rows, bucket.queries.unpad(dq_pad))
        return dq, dk, dv, None, None
