"""CPU path of `flash_attn_varlen`: causal attention inside each packed sequence.

Sequences of similar length are padded into one batch; a plan (`make_varlen_plan`) holds the
indices, so a micro-batch builds it once for all its layers. Blocks of 128 queries meet the keys
before them, with the arithmetic of `_attend.py`: no score matrix outlives its block, and the
backward pass keeps q, k, v and o (which the output projection keeps anyway). The forward pass is
C++ where it has the dtype (`_native_attention.py`), of unpadded sequences.

Left out: windows, other masks and lse, which only the definition in `flash_attention.py` has.

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
    for_products,
    key_multiple,
    probabilities,
    round_up,
    weighted_values,
)
from kernels._check import check_bounds, ints
from kernels._dispatch import compute_dtype
from kernels._native_attention import Tiles, attend_packed, packed_tiles

QUERY_BLOCK = 128
_TILE_SCORES = 1 << 19  # 2 MB of fp32


@dataclass(frozen=True)
class _Bucket:
    """Sequences of similar length, padded to one rectangle."""

    num_seqs: int
    length: int
    gather: Tensor  # [num_seqs * length] the packed token of each cell (padding repeats a token)
    cells: Tensor  # [tokens] the cell of each of the bucket's tokens
    tokens: Tensor | None  # [tokens] their packed indices; None: all tokens, in order
    padding: Tensor | None  # the other cells; None: there are none


@dataclass(frozen=True)
class VarlenPlan:
    """How packed sequences are laid out for CPU attention; built once a micro-batch."""

    buckets: list[_Bucket]
    bounds: list[int]
    scratch: Scratch = field(default_factory=Scratch, repr=False, compare=False)
    _tiles: dict[int, Tiles] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        return self.bounds[-1]

    def tiles(self, group: int) -> Tiles:
        """For C++, with `group` heads to a key head."""
        if group not in self._tiles:
            self._tiles[group] = packed_tiles(self.bounds, group)
        return self._tiles[group]


def make_varlen_plan(cu_seqlens: Tensor | Sequence[int], dtype: torch.dtype) -> VarlenPlan:
    """A plan for `flash_attn_varlen(..., plan=)` with q, k, v of this dtype."""
    check_bounds("cu_seqlens", cu_seqlens)
    bounds = ints(cu_seqlens)
    spans = [(lo, hi - lo) for lo, hi in pairwise(bounds) if hi > lo]
    multiple = key_multiple(dtype)
    buckets = []
    for members in bucket_by_length([n for _, n in spans], multiple):
        starts = torch.tensor([spans[i][0] for i in members]).unsqueeze(1)
        lengths = torch.tensor([spans[i][1] for i in members]).unsqueeze(1)
        length = round_up(int(lengths.max()), multiple)
        columns = torch.arange(length)
        gather = (starts + torch.minimum(columns, lengths - 1)).flatten()
        is_real = (columns < lengths).flatten()
        cells = is_real.nonzero().squeeze(1)
        tokens = None if len(members) == len(spans) else gather[cells]
        padding = None if is_real.all() else (~is_real).nonzero().squeeze(1)
        buckets.append(_Bucket(len(members), length, gather, cells, tokens, padding))
    return VarlenPlan(buckets, bounds)


class CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale, is_native):
        if is_native:
            out = attend_packed(q, k, v, plan.tiles(q.shape[1] // k.shape[1]), scale)
        else:
            wide_q, wide_k, wide_v = for_products(q, k, v)
            out = _forward(wide_q, wide_k, wide_v, plan, scale).to(q.dtype)
        ctx.save_for_backward(q, k, v, out)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx, do):
        q, k, v, out = ctx.saved_tensors
        dtype = q.dtype
        q, k, v, do = for_products(q, k, v, do)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        delta_TH1 = (do.to(compute_dtype(q.dtype)) * out).sum(-1, keepdim=True)
        for bucket in ctx.plan.buckets:
            scratch = ctx.plan.scratch
            q_BKGLD, k_NLD, v_NLD = _padded(q, k, v, bucket, scratch)
            do_BKGLD = _to_heads(_gather_zero("do", do, bucket, scratch), k.shape[1])
            delta = _to_heads(_gather_zero("delta", delta_TH1, bucket, scratch), k.shape[1])
            dq_cells = scratch.take("o_cells", (*_cell_shape(bucket), *q.shape[1:]), q.dtype)
            dk_NLD = scratch.take("dk", k_NLD.shape, delta.dtype).zero_()
            dv_NLD = scratch.take("dv", v_NLD.shape, delta.dtype).zero_()
            for lo, hi, first, last in _tiles(bucket, q, k):
                n = slice(first, last)
                rows = [_rows(x, lo, hi)[n] for x in (q_BKGLD, do_BKGLD, delta)]
                p = _causal_probabilities(rows[0], k_NLD[n], lo, hi, ctx.scale, scratch)
                p = p[:, : rows[0].shape[1]]
                ds = _tile_backward(p, rows[1], rows[2], v_NLD[n, :hi], dv_NLD[n, :hi], scratch)
                dk_NLD[n, :hi] += torch.bmm(ds.transpose(1, 2), rows[0])
                part = torch.bmm(ds, k_NLD[n, :hi]).mul_(ctx.scale)
                _store_rows(_to_heads(dq_cells, k.shape[1]), part, lo, hi, first)
            _scatter(dq, bucket, dq_cells.flatten(0, 1))
            for grad, cells in ((dk, dk_NLD.mul_(ctx.scale)), (dv, dv_NLD)):
                cells = cells.unflatten(0, (bucket.num_seqs, -1)).transpose(1, 2)
                _scatter(grad, bucket, cells.to(grad.dtype).flatten(0, 1))
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, scale: float) -> Tensor:
    out, scratch = torch.empty_like(q), plan.scratch
    for bucket in plan.buckets:
        q_BKGLD, k_NLD, v_NLD = _padded(q, k, v, bucket, scratch)
        o = scratch.take("o_cells", (*_cell_shape(bucket), *q.shape[1:]), q.dtype)
        o_NGLD = _to_heads(o, k.shape[1])
        for lo, hi, first, last in _tiles(bucket, q, k):
            rows = _rows(q_BKGLD, lo, hi)[first:last]
            p = _causal_probabilities(rows, k_NLD[first:last], lo, hi, scale, scratch)
            part = weighted_values(p, v_NLD[first:last, :hi], scratch)[:, : rows.shape[1]]
            _store_rows(o_NGLD, part, lo, hi, first)
        _scatter(out, bucket, o.flatten(0, 1))
    return out


def _tile_backward(
    p: Tensor, do: Tensor, delta: Tensor, v: Tensor, dv: Tensor, scratch: Scratch
) -> Tensor:
    """Adds Pᵀ · dO to dv and returns the scores' gradient, P · (dO · Vᵀ − delta)."""
    dp = scratch.take("scores", p.shape, v.dtype)
    torch.bmm(do, v.transpose(1, 2), out=dp)
    low = p if p.dtype == v.dtype else scratch.take("low", p.shape, v.dtype).copy_(p)
    dv += torch.bmm(low.transpose(1, 2), do)
    wide = dp if dp.dtype == p.dtype else scratch.take("wide", p.shape, p.dtype).copy_(dp)
    ds = wide.sub_(delta).mul_(p)
    return ds if ds is dp else dp.copy_(ds)


def _tiles(bucket: _Bucket, q: Tensor, k: Tensor) -> list[tuple[int, int, int, int]]:
    """(first query, end, first sequence-head, end): scores of a tile fit the processor's cache."""
    num_rows, group = bucket.num_seqs * k.shape[1], q.shape[1] // k.shape[1]
    tiles = []
    for lo in range(0, bucket.length, QUERY_BLOCK):
        hi = min(lo + QUERY_BLOCK, bucket.length)
        step = max(1, _TILE_SCORES // ((hi - lo) * group * hi))
        tiles += [(lo, hi, n, min(n + step, num_rows)) for n in range(0, num_rows, step)]
    return tiles


def _causal_probabilities(q_NRD, k_NLD, lo, hi, scale, scratch) -> Tensor:
    """Weights of the queries lo..hi over the keys 0..hi; rows as `probabilities`."""
    future = torch.full((hi - lo, hi - lo), -math.inf, dtype=compute_dtype(q_NRD.dtype)).triu_(1)
    return probabilities(q_NRD, k_NLD[:, :hi], future[None, None], scale, scratch)


def _rows(x_BKGLD: Tensor, lo: int, hi: int) -> Tensor:
    """The queries lo..hi as [N, rows, D]."""
    block = x_BKGLD[:, :, :, lo:hi]
    return block.reshape(block.shape[0] * block.shape[1], -1, block.shape[4])


def _store_rows(x_BKGLD: Tensor, part_NRD: Tensor, lo: int, hi: int, first: int) -> None:
    """Writes a tile back. A tile may start or end inside a sequence's key heads."""
    num_kv, group = x_BKGLD.shape[1], x_BKGLD.shape[2]
    part = part_NRD.unflatten(1, (group, hi - lo))
    if first % num_kv == 0 and part.shape[0] % num_kv == 0:
        seqs = slice(first // num_kv, (first + part.shape[0]) // num_kv)
        x_BKGLD[seqs, :, :, lo:hi].copy_(part.unflatten(0, (-1, num_kv)))
        return
    for i in range(part.shape[0]):
        x_BKGLD[(first + i) // num_kv, (first + i) % num_kv, :, lo:hi].copy_(part[i])


def _cell_shape(bucket: _Bucket) -> tuple[int, int]:
    return bucket.num_seqs, bucket.length


def _gather(name: str, x_THD: Tensor, bucket: _Bucket, scratch: Scratch) -> Tensor:
    out = scratch.take(name, (bucket.gather.shape[0], *x_THD.shape[1:]), x_THD.dtype)
    torch.index_select(x_THD, 0, bucket.gather, out=out)
    return out.unflatten(0, _cell_shape(bucket))


def _gather_zero(name: str, x_THD: Tensor, bucket: _Bucket, scratch: Scratch) -> Tensor:
    """As `_gather`, with zeros in the padding: a padded query must not touch dk and dv."""
    out = _gather(name, x_THD, bucket, scratch)
    if bucket.padding is not None:
        out.flatten(0, 1).index_fill_(0, bucket.padding, 0.0)
    return out


def _scatter(out_THD: Tensor, bucket: _Bucket, cells_NHD: Tensor) -> None:
    if bucket.tokens is None:
        torch.index_select(cells_NHD, 0, bucket.cells, out=out_THD)
    else:
        out_THD.index_copy_(0, bucket.tokens, cells_NHD.index_select(0, bucket.cells))


def _to_heads(x_BLHD: Tensor, num_kv: int) -> Tensor:
    """[B, K, G, L, D]."""
    return x_BLHD.unflatten(2, (num_kv, -1)).permute(0, 2, 3, 1, 4)


def _padded(
    q: Tensor, k: Tensor, v: Tensor, bucket: _Bucket, scratch: Scratch
) -> tuple[Tensor, Tensor, Tensor]:
    """q as [B, K, G, L, D]; k and v as [N, L, D]."""
    q_BLHD = _gather("q", q, bucket, scratch)
    shape = (bucket.num_seqs, k.shape[1], bucket.length, k.shape[2])
    k_BKLD, v_BKLD = scratch.take("k", shape, k.dtype), scratch.take("v", shape, v.dtype)
    k_BKLD.copy_(_gather("kv", k, bucket, scratch).transpose(1, 2))
    v_BKLD.copy_(_gather("kv", v, bucket, scratch).transpose(1, 2))
    return _to_heads(q_BLHD, k.shape[1]), k_BKLD.flatten(0, 1), v_BKLD.flatten(0, 1)
