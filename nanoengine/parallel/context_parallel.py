"""Context parallelism: the tokens of every sequence are spread over the ranks of the cp axis.

Everything in a layer works token by token, except attention. There the keys and values travel round
the ring while the queries stay: after cp - 1 hops every rank has met every key. Each meeting gives
a partial output and its log-sum-exp, and two partial outputs merge exactly,

    lse = log(e^lse₁ + e^lse₂)      o = o₁ · e^(lse₁ - lse) + o₂ · e^(lse₂ - lse)

A sequence is cut into 2·cp runs and rank r takes runs r and 2·cp - 1 - r: one early, cheap one and
one late, expensive one, so causal attention costs every rank the same. Two runs of a sequence are
equal (causal mask), or one lies wholly before the other (no mask) or after (nothing to do). With a
window a run of keys meets only the queries that see any of it. Where heads have sinks, every query
meets its own rank's copy of them first.
Backward the keys make the same journey and their gradients go with them, arriving at home after
cp hops; gradients travel in fp32.

Losses may need whole sequences, so log-probs are gathered: every rank of the ring computes the
loss of the whole micro-batch and takes back the gradient of its own tokens.

Left out: a fused GPU kernel for a pair of runs; sharing prefixes; other cuts than this one.
Liu et al., "Ring Attention with Blockwise Transformers", arXiv 2310.01889.
Legend: N tokens of this rank, H query heads, K key heads, G = H / K, D head dimension, Q a block of
queries, L keys of a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.backend import wide_sinks
from kernels.cpp.ops import AttendOptions
from nanoengine.packing import MicroBatch
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.tensor_parallel import even_run

QUERY_BLOCK = 256


@dataclass(frozen=True)
class TokenRun:
    """Tokens lo:hi of the packed row, the rank's rows begin:begin + hi - lo."""

    sequence: int
    lo: int
    hi: int
    begin: int

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.begin + self.hi - self.lo)


class ContextSplit:
    """One micro-batch, cut over the ranks; every rank knows all ranks' runs."""

    def __init__(self, micro: MicroBatch, mesh: Mesh) -> None:
        if micro.rows_T is not None:
            raise ValueError("share_prefix=True: not available with cp > 1; set it to False")
        self.mesh = mesh
        self.size, self.rank = mesh.size("cp"), mesh.rank("cp")
        bounds = micro.bounds
        self.runs = [_runs_of(bounds, self.size, rank) for rank in range(self.size)]
        self.rows = [
            torch.tensor([t for run in runs for t in range(run.lo, run.hi)], dtype=torch.int64)
            for runs in self.runs
        ]

    @property
    def own_rows(self) -> Tensor:
        """The indices of this rank's rows, int64, on the CPU."""
        return self.rows[self.rank]

    def take(self, values_T: Tensor) -> Tensor:
        """This rank's rows."""
        return values_T.index_select(0, self.own_rows.to(values_T.device))

    def gather(self, values_N: Tensor) -> Tensor:
        """All rows, in the order of the micro-batch; the gradient is that of this rank's rows."""
        out: Tensor = _GatherTokens.apply(values_N, self)
        return out

    def attend(
        self,
        layer: int,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """An AttentionContext."""
        scale = q_NHD.shape[-1] ** -0.5 if scale is None else scale
        sinks_H = wide_sinks(sinks, q_NHD)
        options = AttendOptions(scale, window)
        out: Tensor = _RingAttention.apply(q_NHD, k_NKD, v_NKD, sinks_H, self, options)
        return out

    def meetings(
        self, source: int, window: int | None
    ) -> Iterator[tuple[slice, slice, int | None]]:
        """(rows of queries, rows of rank `source`'s keys, offset of the first query from the first
        key where there is a mask). Every query sees at least one of the keys."""
        for own in self.runs[self.rank]:
            for other in self.runs[source]:
                is_same = other.lo == own.lo
                if own.sequence != other.sequence or (other.lo > own.lo and not is_same):
                    continue
                end = own.hi if window is None else min(own.hi, other.hi + window - 1)
                for lo in range(own.lo, end, QUERY_BLOCK):
                    hi = min(lo + QUERY_BLOCK, end)
                    queries = slice(own.begin + lo - own.lo, own.begin + hi - own.lo)
                    is_masked = is_same or window is not None
                    yield queries, other.rows, lo - other.lo if is_masked else None


def _runs_of(bounds: list[int], num_ranks: int, rank: int) -> list[TokenRun]:
    runs: list[TokenRun] = []
    begin = 0
    for sequence, (first, end) in enumerate(pairwise(bounds)):
        for part in (rank, 2 * num_ranks - 1 - rank):
            lo, hi = even_run(end - first, 2 * num_ranks, part)
            if lo < hi:
                runs.append(TokenRun(sequence, first + lo, first + hi, begin))
                begin += hi - lo
    return runs


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        split: ContextSplit,
        options: AttendOptions,
    ) -> Tensor:
        scale, window = options.scale, options.window
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:2], -math.inf, dtype=wide, device=q.device)
        if sinks is not None:  # the first that a query meets, and of no value
            lse.copy_(sinks)
        for source, kv in _round_the_ring(torch.stack([k, v]), split):
            for queries, keys, offset in split.meetings(source, window):
                s = _scores(q[queries], kv[0, keys], scale, offset, window)
                part_lse = s.logsumexp(-1)  # [Q, H]
                part = _weigh((s - part_lse.unsqueeze(-1)).exp_(), kv[1, keys])
                total = torch.logaddexp(lse[queries], part_lse)
                out[queries] *= (lse[queries] - total).exp_().unsqueeze(-1)
                out[queries] += part * (part_lse - total).exp_().unsqueeze(-1)
                lse[queries] = total
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, result, lse)
        ctx.split, ctx.scale, ctx.window = split, scale, window
        return result

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        split: ContextSplit = ctx.split
        wide, scale, window = lse.dtype, ctx.scale, ctx.window
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        delta = (do.to(wide) * out).sum(-1)  # [N, H]
        home = torch.zeros(2, *k.shape, dtype=wide, device=k.device)
        dkv = home
        for source, kv in _round_the_ring(torch.stack([k, v]), split):
            if source != split.rank:
                dkv = _pass_on(dkv, source, split)
            for queries, keys, offset in split.meetings(source, window):
                s = _scores(q[queries], kv[0, keys], scale, offset, window)
                p = (s - lse[queries].unsqueeze(-1)).exp_()
                do_q = do[queries].to(wide)
                dkv[1, keys] += _into_keys(p, do_q, kv.shape[2])
                ds = (_outer(do_q, kv[1, keys]) - delta[queries].unsqueeze(-1)).mul_(p).mul_(scale)
                dq[queries] += _weigh(ds, kv[0, keys])
                dkv[0, keys] += _into_keys(ds, q[queries].to(wide), kv.shape[2])
        dk, dv = _pass_on(dkv, split.rank, split)
        dsinks = None if sinks is None else -((sinks - lse).exp_() * delta).sum(0)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


def _round_the_ring(kv: Tensor, split: ContextSplit) -> Iterator[tuple[int, Tensor]]:
    """(rank, its keys and values [2, N, K, D]), this rank's own first. The next ones travel while
    the caller works on these."""
    n, me = split.size, split.rank
    for hop in range(n):
        source = (me - hop) % n
        if hop == n - 1:
            yield source, kv
            return
        num_rows = len(split.rows[(source - 1) % n])
        coming = kv.new_empty(2, num_rows, *kv.shape[2:])
        handle = split.mesh.exchange("cp", kv, (me + 1) % n, coming, (me - 1) % n, tag=hop)
        yield source, kv
        handle.wait()
        kv = coming


def _pass_on(dkv: Tensor, source: int, split: ContextSplit) -> Tensor:
    """Hand the gradients to the next rank, get those of `source`'s keys from the one before."""
    n, me = split.size, split.rank
    if n == 1:
        return dkv
    coming = dkv.new_empty(2, len(split.rows[source]), *dkv.shape[2:])
    split.mesh.exchange("cp", dkv, (me + 1) % n, coming, (me - 1) % n, tag=n).wait()
    return coming


def _scores(
    q_QHD: Tensor, k_LKD: Tensor, scale: float, offset: int | None, window: int | None
) -> Tensor:
    """Scaled, masked scores [Q, H, L] in the wide dtype; see `meetings` for `offset`."""
    s = _outer(q_QHD, k_LKD).mul_(scale)
    if offset is not None:
        rows = torch.arange(offset, offset + s.shape[0], device=s.device).view(-1, 1, 1)
        keys = torch.arange(s.shape[2], device=s.device)
        hidden = keys > rows
        if window is not None:
            hidden |= keys <= rows - window
        s.masked_fill_(hidden, -math.inf)
    return s


def _outer(a_QHD: Tensor, b_LKD: Tensor) -> Tensor:
    """Products of every query row with every key row of its group: [Q, H, L]."""
    wide = torch.promote_types(a_QHD.dtype, torch.float32)
    num_kv = b_LKD.shape[1]
    a_KGQD = a_QHD.to(wide).unflatten(1, (num_kv, -1)).permute(1, 2, 0, 3)
    b_K1DL = b_LKD.to(wide).permute(1, 2, 0).unsqueeze(1)
    return (a_KGQD @ b_K1DL).flatten(0, 1).transpose(0, 1)


def _weigh(p_QHL: Tensor, v_LKD: Tensor) -> Tensor:
    """Σ over keys: [Q, H, D]."""
    p_KGQL = p_QHL.unflatten(1, (v_LKD.shape[1], -1)).permute(1, 2, 0, 3)
    v_K1LD = v_LKD.to(p_QHL.dtype).transpose(0, 1).unsqueeze(1)
    return (p_KGQL @ v_K1LD).flatten(0, 1).transpose(0, 1)


def _into_keys(p_QHL: Tensor, x_QHD: Tensor, num_kv: int) -> Tensor:
    """Σ over queries and the heads that share a key: [L, K, D]."""
    p = p_QHL.unflatten(1, (num_kv, -1)).permute(1, 3, 2, 0).flatten(2)  # K, L, G·Q
    x = x_QHD.unflatten(1, (num_kv, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # K, G·Q, D
    return (p @ x).transpose(0, 1)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_N: Tensor, split: ContextSplit) -> Tensor:
        ctx.split = split
        counts = [len(rows) for rows in split.rows]
        mine = values_N.new_zeros(max(counts), *values_N.shape[1:])
        mine[: len(values_N)] = values_N
        out = mine.new_empty(split.size, *mine.shape)
        split.mesh.all_gather("cp", out, mine)
        whole_T = values_N.new_empty(sum(counts), *values_N.shape[1:])
        for rows, part, count in zip(split.rows, out, counts, strict=True):
            whole_T[rows.to(whole_T.device)] = part[:count]
        return whole_T

    @staticmethod
    def backward(ctx: Any, dwhole_T: Tensor) -> tuple[Tensor, None]:
        return ctx.split.take(dwhole_T), None
