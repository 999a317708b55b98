"""Attention over trees of packed segments: a prompt that several completions share is read once.

A segment continues the segment named in `prefix_of_S` (-1: none). Its queries see all keys of its
ancestors and its own keys up to themselves, which is what they would see in a sequence of their
own. In GRPO all members of a group share the prompt, so the linear layers, which are nearly all of
the work, run over the prompt once instead of once a member.

CPU: C++ finds a segment's keys, [ancestors, own], through a table of rows. In PyTorch (backward,
and forward where C++ lacks the dtype) each segment becomes a row of a batch whose keys are gathered
side by side and whose queries are its own alone, so no work goes into masked pairs of different
branches. Either way the keys of a query come in the order of the unshared sequence and the
arithmetic is that of `flash_attn_varlen`, hence so are the bits. The gradient of a shared key is
summed over branches in fp32.

GPU: each segment's keys, [ancestors, own], are gathered one segment after the other, and
`flash_attn_varlen` attends with queries fewer than keys. The copies of a shared key cost memory and
bandwidth of its length, small beside the attention; their gradients are added in a fixed order.

Legend: T rows, H query heads, K key heads, D head_dim, S segments; of a bucket: B blocks of
queries, Q padded queries, L padded keys, N = B · K, R = H / K · Q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from kernels import flash_attn_varlen, gather_rows, make_row_gather
from kernels.attention_torch import (
    MIN_ROWS,
    Scratch,
    attend_rows,
    bucket_by_length,
    for_products,
    key_multiple,
    probabilities,
    round_up,
)
from kernels.backend import Backend, use_native, use_triton
from kernels.cpp.ops import Span, Tiles, attend_packed, make_tiles
from kernels.gather_rows import RowGather
from nanoengine.model.device import to_device

QUERY_BLOCK = 128
_TILE_PAIRS = 1 << 16  # queries x keys of a bucket: its scores stay in the processor's cache


def supports_shared_prefix(device: torch.device | str) -> bool:
    return torch.device(device).type in ("cpu", "cuda")


@dataclass(frozen=True)
class _Side:
    """How the rows of one side (queries or keys) lie in a bucket's rectangle."""

    shape: tuple[int, int]  # blocks, padded length
    gather: Tensor  # [B * length] the row of each cell; padding repeats the block's last
    cells: Tensor  # [rows] the cells that are no padding
    rows: Tensor  # [rows] their rows

    def pad(self, x_TKD: Tensor, num_kv: int) -> Tensor:
        """[N, R, D] of queries, [N, L, D] of keys; padding holds copies."""
        return self._to_batch(x_TKD.index_select(0, self.gather), num_kv)

    def pad_with_zeros(self, x_TKD: Tensor, num_kv: int) -> Tensor:
        cells = x_TKD.new_zeros(self.shape[0] * self.shape[1], *x_TKD.shape[1:])
        cells[self.cells] = x_TKD.index_select(0, self.rows)
        return self._to_batch(cells, num_kv)

    def _to_batch(self, cells: Tensor, num_kv: int) -> Tensor:
        x_BLKGD = cells.view(*self.shape, num_kv, -1, cells.shape[-1])
        rows = x_BLKGD.shape[3] * self.shape[1]
        return x_BLKGD.permute(0, 2, 3, 1, 4).reshape(-1, rows, cells.shape[-1])

    def unpad(self, x_NRD: Tensor, num_kv: int) -> Tensor:
        """The cells that are no padding, [rows, heads, D]."""
        x_BKGLD = x_NRD.view(self.shape[0], num_kv, -1, self.shape[1], x_NRD.shape[-1])
        cells = x_BKGLD.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        return cells.index_select(0, self.cells)


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
        self,
        cu_seqlens: Tensor | Sequence[int],
        prefix_of_S: Sequence[int],
        dtype: torch.dtype,
        backend: Backend = "auto",
    ) -> None:
        bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
        if len(bounds) != len(prefix_of_S) + 1:
            raise ValueError(f"cu_seqlens has {len(bounds)} bounds for {len(prefix_of_S)} segments")
        for segment, parent in enumerate(prefix_of_S):
            if not -1 <= parent < segment:
                raise ValueError(f"prefix_of_S[{segment}]={parent}: a parent must come before it")
        self._bounds, self._prefix_of_S = bounds, list(prefix_of_S)
        self._dtype, self._backend = dtype, backend
        self._buckets: list[_Bucket] | None = None  # the CPU layouts, built once for all layers
        self._tiles: Tiles | None = None
        self._segments: _Segments | None = None  # the GPU layout
        self._scratch = Scratch()

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if use_triton(self._backend, q_THD):
            if self._segments is None:
                self._segments = _make_segments(self._bounds, self._prefix_of_S, q_THD.device)
            return self._segments.attend(q_THD, k_TKD, v_TKD, self._backend)
        if self._buckets is None:
            blocks = _query_blocks(self._bounds, self._prefix_of_S)
            self._buckets = _make_buckets(blocks, self._dtype)
        tiles = None
        if use_native(self._backend, q_THD, k_TKD, v_TKD):
            if self._tiles is None:
                group = q_THD.shape[1] // k_TKD.shape[1]
                self._tiles = _segment_tiles(self._bounds, self._prefix_of_S, group)
            tiles = self._tiles
        out: Tensor = _TreeAttention.apply(q_THD, k_TKD, v_TKD, self._buckets, self._scratch, tiles)
        return out


@dataclass(frozen=True)
class _Segments:
    """Segments as sequences with more keys than queries."""

    gather: RowGather
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: Backend) -> Tensor:
        out = flash_attn_varlen(
            q,
            gather_rows(k, self.gather, backend=backend),
            gather_rows(v, self.gather, backend=backend),
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            self.max_seqlen_q,
            self.max_seqlen_k,
            backend=backend,
        )
        return cast(Tensor, out)


def _key_rows(bounds: list[int], prefix_of_S: list[int]) -> list[Tensor]:
    """[ancestors, own] of each segment."""
    keys: list[Tensor] = []
    for (lo, hi), parent in zip(pairwise(bounds), prefix_of_S, strict=True):
        own = torch.arange(lo, hi)
        keys.append(own if parent < 0 else torch.cat([keys[parent], own]))
    return keys


def _segment_tiles(bounds: list[int], prefix_of_S: list[int], group: int) -> Tiles:
    keys = _key_rows(bounds, prefix_of_S)
    firsts = [0, *accumulate(len(rows) for rows in keys)]
    spans = [
        Span(lo, hi - lo, len(rows), first)
        for (lo, hi), rows, first in zip(pairwise(bounds), keys, firsts, strict=False)
    ]
    return make_tiles(spans, torch.cat(keys).to(torch.int32), group)


def _make_segments(bounds: list[int], prefix_of_S: list[int], device: torch.device) -> _Segments:
    keys = _key_rows(bounds, prefix_of_S)
    lengths = [len(rows) for rows in keys]
    segments = _Segments(
        make_row_gather(torch.cat(keys), bounds[-1]),
        torch.tensor(bounds, dtype=torch.int32),
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max(hi - lo for lo, hi in pairwise(bounds)),
        max(lengths),
    )
    return to_device(segments, device)


def _query_blocks(
    bounds: list[int], prefix_of_S: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """(rows of at most 128 queries, rows of the keys up to the last of them)."""
    keys: list[list[int]] = []
    blocks = []
    for (lo, hi), parent in zip(pairwise(bounds), prefix_of_S, strict=True):
        above = [] if parent < 0 else keys[parent]
        keys.append(above + list(range(lo, hi)))
        for first in range(lo, hi, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, hi)
            blocks.append((list(range(first, last)), above + list(range(lo, last))))
    return blocks


def _make_buckets(blocks: list[tuple[list[int], list[int]]], dtype: torch.dtype) -> list[_Bucket]:
    """Blocks with like numbers of queries and of keys share a bucket, up to the tile's size."""
    multiple = key_multiple(dtype)
    buckets = []
    for alike in bucket_by_length([len(queries) for queries, _ in blocks], MIN_ROWS):
        for members in bucket_by_length([len(blocks[i][1]) for i in alike], multiple):
            chosen = [blocks[alike[i]] for i in members]
            num_queries = round_up(max(len(queries) for queries, _ in chosen), MIN_ROWS)
            num_keys = round_up(max(len(keys) for _, keys in chosen), multiple)
            step = max(1, _TILE_PAIRS // (num_queries * num_keys))
            for lo in range(0, len(chosen), step):
                buckets.append(_bucket(chosen[lo : lo + step], num_queries, num_keys, dtype))
    return buckets


def _bucket(
    chosen: list[tuple[list[int], list[int]]], num_queries: int, num_keys: int, dtype: torch.dtype
) -> _Bucket:
    """Query i of a block sees its keys but for those after it."""
    queries = _side([rows for rows, _ in chosen], num_queries)
    keys = _side([rows for _, rows in chosen], num_keys)
    offsets = torch.tensor([len(key_rows) - len(query_rows) for query_rows, key_rows in chosen])
    last_BQ = offsets.unsqueeze(1) + torch.arange(num_queries)
    is_hidden = torch.arange(num_keys) > last_BQ.unsqueeze(-1)
    wide = torch.promote_types(dtype, torch.float32)
    mask = torch.zeros(is_hidden.shape, dtype=wide).masked_fill_(is_hidden, -math.inf)
    return _Bucket(queries, keys, mask.unsqueeze(1))


def _side(rows_of: list[list[int]], length: int) -> _Side:
    gather = [row for rows in rows_of for row in rows + rows[-1:] * (length - len(rows))]
    cells = [i * length + j for i, rows in enumerate(rows_of) for j in range(len(rows))]
    flat = [row for rows in rows_of for row in rows]
    return _Side(
        (len(rows_of), length), torch.tensor(gather), torch.tensor(cells), torch.tensor(flat)
    )


class _TreeAttention(torch.autograd.Function):
    """Keeps q, k, v and o; scores exist for one bucket at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        buckets: list[_Bucket],
        scratch: Scratch,
        tiles: Tiles | None,
    ) -> Tensor:
        if tiles is not None:
            out = attend_packed(q, k, v, tiles, q.shape[2] ** -0.5)
        else:
            wide_q, wide_k, wide_v = for_products(q, k, v)
            out = _forward(wide_q, wide_k, wide_v, buckets, scratch).to(q.dtype)
        ctx.save_for_backward(q, k, v, out)
        ctx.buckets, ctx.scratch = buckets, scratch
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        dtype = q.dtype
        q, k, v, do = for_products(q, k, v, do)
        num_kv, scale = k.shape[1], q.shape[2] ** -0.5
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (k, v))
        delta_TH1 = (do.to(wide) * out).sum(-1, keepdim=True)
        for bucket in ctx.buckets:
            queries, keys = bucket.queries, bucket.keys
            q_NRD, do_NRD = queries.pad(q, num_kv), queries.pad_with_zeros(do, num_kv)
            k_NLD, v_NLD = keys.pad(k, num_kv), keys.pad(v, num_kv)
            delta_NR1 = queries.pad_with_zeros(delta_TH1, num_kv)
            mask, scratch = bucket.mask_B1QL, ctx.scratch
            p = probabilities(q_NRD, k_NLD, mask, scale, scratch)[:, : q_NRD.shape[1]]
            _add_keys(dv, bucket, torch.bmm(p.to(q.dtype).transpose(1, 2), do_NRD))
            ds = torch.bmm(do_NRD, v_NLD.transpose(1, 2)).to(wide)
            ds = ds.sub_(delta_NR1).mul_(p).mul_(scale).to(q.dtype)
            _add_keys(dk, bucket, torch.bmm(ds.transpose(1, 2), q_NRD))
            dq.index_copy_(0, queries.rows, queries.unpad(torch.bmm(ds, k_NLD), num_kv))
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, buckets: list[_Bucket], scratch: Scratch) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    num_kv, scale = k.shape[1], q.shape[2] ** -0.5
    for bucket in buckets:
        o = attend_rows(
            bucket.queries.pad(q, num_kv),
            bucket.keys.pad(k, num_kv),
            bucket.keys.pad(v, num_kv),
            bucket.mask_B1QL,
            scale,
            scratch,
        )
        out.index_copy_(0, bucket.queries.rows, bucket.queries.unpad(o, num_kv))
    return out


def _add_keys(total_TKD: Tensor, bucket: _Bucket, grad_NLD: Tensor) -> None:
    """Sum over the branches that share a key, in order."""
    cells = bucket.keys.unpad(grad_NLD, total_TKD.shape[1])
    total_TKD.index_add_(0, bucket.keys.rows, cells.to(total_TKD.dtype))
