"""PyTorch's path of attention on a CPU: packed and paged, with the same bits for both."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import check_bounds, compute_dtype, ints
from kernels.cpp.ops import Tiles, attend_packed, packed_tiles
from kernels.kv_cache import heads_first, index_dtype
from kernels.onednn import is_bf16_fast

# Attention of padded rows in PyTorch on a CPU, the same bits for a query however it is batched.
#
#     o = softmax(scale · q · Kᵀ + mask) · V
#
# Where there is no C++ for it (`cpp/attention.h`) both engines run this arithmetic, so decoding
# repeats the trainer's bits; gradients recompute its probabilities. What makes a query's
# result independent of its neighbours, of padding, of the chunk it came in and of threads:
#
# * bf16: oneDNN's batched matmul, which sums each output in order whatever the other sizes are
#   (`safe_rows` keeps tiny products from going elsewhere).
#   Scores are rounded to bf16, as in any unfused bf16 attention; softmax runs in fp32. (torch's
#   fused CPU attention was not invariant: at 200 to 300 keys the last bit moved with the padding.)
# * fp32: MKL's batched matmul is invariant given at least 4 rows a thread and a product with V cut
#   into blocks of exactly 128 keys that are added in order.
# * bf16 where the processor has no product of it is widened to fp32 before, and the result rounded.
# * keys are padded to `key_multiple`, masked with −inf, so they add exact zeros.
#
# Legend: N sequences x key heads, R rows (queries of a group's heads), L padded keys, D head_dim.

KEY_BLOCK = 128
"""fp32 keys are padded to this, and P·V is summed in blocks of it."""

MIN_ROWS = 4
"""Fewer fp32 rows take another MKL kernel, with other bits."""


_SMALL_MATRIX, _SMALL_BATCH = 400, 16**3
"""Multiplications of a product, and of a batch of them, up to which torch does without oneDNN."""


def is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """What attention of this dtype is computed in."""
    return torch.float32 if dtype == torch.bfloat16 and not is_bf16_fast() else dtype


def for_products(*tensors: Tensor) -> list[Tensor]:
    return [x.to(product_dtype(x.dtype)) for x in tensors]


def key_multiple(dtype: torch.dtype) -> int:
    """The number of keys is padded to a multiple of this."""
    return 16 if is_half(product_dtype(dtype)) else KEY_BLOCK


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def bucket_by_length(lengths: Sequence[int], multiple: int) -> list[list[int]]:
    """Splits indices into groups whose padded lengths differ by at most a third.

    Members keep their order, so a batch that fits one group keeps the batch's order.
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


class Scratch:
    """Buffers that outlive a call. A fresh large tensor costs a page fault for every 4 KB, which
    for attention is more than the arithmetic; a buffer reused by all layers costs it once."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, valid until the same name is taken again."""
        size = 1
        for n in shape:
            size *= n
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(*shape)


def probabilities(
    q_NRD: Tensor, k_NLD: Tensor, mask_B1QM: Tensor, scale: float, scratch: Scratch
) -> Tensor:
    """softmax(scale · q · Kᵀ + mask) in fp32 (fp64), [N, R or more, L]: see `safe_rows`.

    Rows are heads x the mask's Q queries; the mask applies to the last M keys.
    """
    rows, num_keys = q_NRD.shape[1], k_NLD.shape[1]
    padded = safe_rows(rows, q_NRD.shape[0], q_NRD.shape[2], q_NRD.dtype)
    if padded > rows:
        q_NRD = F.pad(q_NRD, (0, 0, 0, padded - rows))
    shape = (q_NRD.shape[0], padded, num_keys)
    wide = raw = scratch.take("scores", shape, q_NRD.dtype)
    torch.bmm(q_NRD, k_NLD.transpose(1, 2), out=raw)
    if is_half(raw.dtype):
        wide = scratch.take("wide", shape, torch.float32).copy_(raw)
    wide.mul_(scale)
    num_seqs, _, num_queries, num_masked = mask_B1QM.shape
    grid = wide[:, :rows, num_keys - num_masked :].unflatten(0, (num_seqs, -1))
    grid.unflatten(2, (-1, num_queries)).add_(mask_B1QM.unsqueeze(1))
    return torch.softmax(wide, -1, out=scratch.take("p", shape, wide.dtype))


def safe_rows(rows: int, num_matrices: int, head_dim: int, dtype: torch.dtype) -> int:
    """The rows to compute so that a product is computed as larger ones are.

    Half: torch hands a product to oneDNN only from a certain size on. fp32: MKL shares the rows
    out where there are fewer matrices than threads, and none may get fewer than 4.
    """
    if is_half(dtype):
        smallest = head_dim * key_multiple(dtype)  # of one row, with the fewest keys
        at_least = _SMALL_BATCH // (num_matrices * smallest) + 1
        return max(rows, at_least, -(-_SMALL_MATRIX // smallest))
    num_threads = torch.get_num_threads()
    if num_matrices < num_threads:
        return round_up(rows, MIN_ROWS * num_threads)
    return max(rows, MIN_ROWS)


def weighted_values(p_NRL: Tensor, v_NLD: Tensor, scratch: Scratch) -> Tensor:
    """P · V in v's dtype."""
    if is_half(v_NLD.dtype):
        return torch.bmm(scratch.take("low", p_NRL.shape, v_NLD.dtype).copy_(p_NRL), v_NLD)
    out = torch.bmm(p_NRL[:, :, :KEY_BLOCK], v_NLD[:, :KEY_BLOCK])
    part = scratch.take("part", out.shape, out.dtype)
    for lo in range(KEY_BLOCK, v_NLD.shape[1], KEY_BLOCK):
        block = slice(lo, lo + KEY_BLOCK)
        out += torch.bmm(p_NRL[:, :, block], v_NLD[:, block], out=part)
    return out


def attend_rows(
    q_NRD: Tensor, k_NLD: Tensor, v_NLD: Tensor, mask_B1QL: Tensor, scale: float, scratch: Scratch
) -> Tensor:
    """o [N, R, D] without autograd. Rows are heads x queries; L a multiple of `key_multiple`."""
    p = probabilities(q_NRD, k_NLD, mask_B1QL, scale, scratch)
    return weighted_values(p, v_NLD, scratch)[:, : q_NRD.shape[1]]


# CPU path of `flash_attn_varlen`: causal attention inside each packed sequence.
#
# Sequences of similar length are padded into one batch; a plan (`make_varlen_plan`) holds the
# indices, so a micro-batch builds it once for all its layers. Blocks of 128 queries meet the keys
# before them, with the arithmetic of `attention_torch.py`: no score matrix outlives its block, and
# the backward pass keeps q, k, v and o (which the output projection keeps anyway). The forward pass
# is C++ where it has the dtype (`cpp/ops.py`), of unpadded sequences.
#
# Left out: windows, other masks and lse, which only the definition in `attention.py` has.
#
# Legend: T tokens, H query heads, K key heads, G = H / K, B sequences, L padded keys, N = B · K,
# D head_dim.

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


# PyTorch's CPU path of `paged_attention`: one engine step as a few padded rectangles.
#
# `make_rectangles` sorts the step's sequences (decodes apart from prefills, each by length) and
# cuts them into rectangles, with gather indices and masks, once for all layers. A layer is then two
# gathers and one batched attention a rectangle, the trainer's arithmetic (`attention_torch.py`). A
# gather copies each key head's part of a block, in one piece where the cache lies heads first in
# memory (kv_cache.py), straight into the order [sequences, key heads, keys, head_dim] of the
# matmuls. What it gathered of a cache in fp8 is then widened: what a step reads, never the cache.
#
# Legend: B sequences, Q queries, L padded keys, H query heads, K key heads, G = H / K, D head_dim,
# C cells (queries of all rectangles, padding included).

_PIECE_KEYS = 1 << 14  # keys x heads gathered at a time: 2 MB at 64 elements in bf16
_PIECE_SCORES = 1 << 21  # scores held at a time
_WASTE_KEYS = 1024  # padded keys that take as long to read as one more rectangle takes to start
_CHEAP_QUERIES = 32  # queries a key serves for the time it takes to read it


@dataclass(frozen=True)
class _Rectangle:
    """Sequences with similar numbers of queries and keys."""

    num_seqs: int
    num_queries: int
    first: int  # of its cells
    blocks: Tensor  # [num_seqs * K * blocks each] indices of a cache seen as [blocks * K, ...]
    mask: Tensor  # [num_seqs, 1, num_queries, L] additive

    @property
    def cells(self) -> slice:
        return slice(self.first, self.first + self.num_seqs * self.num_queries)


@dataclass(frozen=True)
class Rectangles:
    """The layout of one engine step."""

    rectangles: list[_Rectangle]
    tokens: Tensor | None  # [C] the query of each cell, padding repeats one; None: all, in order
    cells: Tensor | None  # [num_tokens] a query's cell; None: the same
    scratch: Scratch


@dataclass(frozen=True)
class _Step:
    """What a plan is made of."""

    starts: list[int]
    counts: list[int]
    lens: list[int]
    block_tables: Tensor
    block_size: int
    num_kv_heads: int
    dtype: torch.dtype

    @property
    def multiple(self) -> int:
        """Of the keys of a rectangle: what the arithmetic wants, and whole blocks."""
        return math.lcm(key_multiple(self.dtype), self.block_size)


def make_rectangles(
    starts: list[int],
    lens: list[int],
    block_tables: Tensor,
    *,
    block_size: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    scratch: Scratch,
) -> Rectangles:
    """`dtype` is that of the queries."""
    counts = [b - a for a, b in pairwise(starts)]
    step = _Step(starts, counts, lens, block_tables, block_size, num_kv_heads, dtype)
    rectangles, tokens, first = [], [], 0
    for members in _alike(step):
        rectangle, of_cell = _rectangle(step, members, first)
        rectangles.append(rectangle)
        tokens.append(of_cell)
        first = rectangle.cells.stop
    of_cells = torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64)
    if torch.equal(of_cells, torch.arange(starts[-1])):
        return Rectangles(rectangles, None, None, scratch)
    cells = torch.empty(starts[-1], dtype=torch.int64)
    cells[of_cells] = torch.arange(first)  # any of the cells that repeat a query
    return Rectangles(rectangles, of_cells, cells, scratch)


def _alike(step: _Step) -> Iterator[list[int]]:
    """The sequences of each rectangle."""
    decodes = [i for i, n in enumerate(step.counts) if n == 1]
    prefills = [i for i, n in enumerate(step.counts) if n > 1]
    groups = [decodes] if decodes else []
    for members in bucket_by_length([step.counts[i] for i in prefills], 4):
        groups.append([prefills[j] for j in members])
    for group in groups:
        yield from _cut(step, group)


def _cut(step: _Step, group: list[int]) -> Iterator[list[int]]:
    """Runs of like length, longest first: what they gather stays in the processor's cache, and
    they are padded by less than another rectangle would cost."""
    num_queries = max(step.counts[i] for i in group)
    most_waste = _WASTE_KEYS / (1 + num_queries / _CHEAP_QUERIES)
    run: list[int] = []
    longest, waste = 0, 0
    for i in sorted(group, key=lambda i: (-step.lens[i], i)):
        is_large = (len(run) + 1) * longest * step.num_kv_heads > _PIECE_KEYS
        if run and (is_large or waste + longest - step.lens[i] > most_waste):
            yield sorted(run)
            run = []
        if not run:
            longest, waste = round_up(step.lens[i], step.multiple), 0
        run.append(i)
        waste += longest - step.lens[i]
    yield sorted(run)


def _rectangle(step: _Step, members: list[int], first: int) -> tuple[_Rectangle, Tensor]:
    """The rectangle whose cells begin at `first`, and the query of each of them."""
    start = torch.tensor([step.starts[i] for i in members]).unsqueeze(1)
    count = torch.tensor([step.counts[i] for i in members]).unsqueeze(1)
    length = torch.tensor([step.lens[i] for i in members]).unsqueeze(1)
    num_keys = round_up(int(length.max()), step.multiple)
    num_queries = int(count.max())
    query = torch.minimum(torch.arange(num_queries), count - 1)  # padding repeats the last query
    visible = length - count + query + 1
    mask = torch.zeros(len(members), num_queries, num_keys, dtype=product_dtype(step.dtype))
    mask.masked_fill_(torch.arange(num_keys) >= visible.unsqueeze(2), -math.inf)
    blocks = _block_index(step, members, length, num_keys)
    rectangle = _Rectangle(len(members), num_queries, first, blocks, mask.unsqueeze(1))
    return rectangle, (start + query).flatten()


def _block_index(step: _Step, members: list[int], length: Tensor, num_keys: int) -> Tensor:
    """The cache blocks of each sequence, head by head, padded with its own last block."""
    last = (length - 1) // step.block_size
    column = torch.minimum(torch.arange(num_keys // step.block_size), last)
    block_BN = step.block_tables[members].to(torch.int64).gather(1, column)
    heads = torch.arange(step.num_kv_heads).unsqueeze(1)
    return (block_BN.unsqueeze(1) * step.num_kv_heads + heads).flatten()


def attend_rectangles(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Rectangles,
    scale: float,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """o of the plan's queries. `scales` (of k, of v) are those of a cache in fp8."""
    q_CHD = q_THD if plan.tokens is None else q_THD.index_select(0, plan.tokens)
    o_CHD = torch.empty_like(q_CHD)
    num_kv, scratch = k_cache.shape[2], plan.scratch
    k_rows, v_rows = (heads_first(x).contiguous().flatten(0, 1) for x in (k_cache, v_cache))
    k_factor, v_factor = (1.0 if s is None else float(s) for s in scales)
    for r in plan.rectangles:
        num, dtype = r.num_seqs * num_kv, q_THD.dtype
        k_NLD = _gather_blocks("k", k_rows, k_factor, r.blocks, num, dtype, scratch)
        v_NLD = _gather_blocks("v", v_rows, v_factor, r.blocks, num, dtype, scratch)
        shape = (r.num_seqs, r.num_queries, num_kv, -1, q_THD.shape[2])
        q, o = (x[r.cells].view(shape).permute(0, 2, 3, 1, 4) for x in (q_CHD, o_CHD))
        _attend(o, q, k_NLD, v_NLD, r.mask, scale, scratch)
    return o_CHD if plan.cells is None else o_CHD.index_select(0, plan.cells)


def _gather_blocks(
    name: str,
    rows: Tensor,
    factor: float,
    index: Tensor,
    num: int,
    dtype: torch.dtype,
    scratch: Scratch,
) -> Tensor:
    """Keys or values [N, L, D] of `num` sequence-heads from rows [blocks * K, block_size, D]; of
    rows in fp8 times `factor`."""
    shape = (index.shape[0], *rows.shape[1:])
    out = scratch.take(name, shape, dtype)
    if rows.dtype == dtype:
        torch.index_select(rows, 0, index, out=out)
    else:
        bits = index_dtype(rows.dtype)
        raw = scratch.take("raw", shape, bits)
        torch.index_select(rows.view(bits), 0, index, out=raw)
        widen_fp8(raw.view(rows.dtype), factor, out, scratch)
    return out.view(num, -1, rows.shape[2])


def _attend(
    o_BKGQD: Tensor,
    q_BKGQD: Tensor,
    k_NLD: Tensor,
    v_NLD: Tensor,
    mask_B1QL: Tensor,
    scale: float,
    scratch: Scratch,
) -> None:
    """Fills o: one matmul a sequence and key head, the queries of its group as rows."""
    num_seqs, num_kv, group, num_queries, head_dim = q_BKGQD.shape
    q_BKGQD, k_NLD, v_NLD = for_products(q_BKGQD, k_NLD, v_NLD)
    step = max(1, _PIECE_SCORES // (num_seqs * num_kv * group * k_NLD.shape[1]))
    for lo in range(0, num_queries, step):
        q_NRD = q_BKGQD[:, :, :, lo : lo + step].reshape(num_seqs * num_kv, -1, head_dim)
        part = attend_rows(q_NRD, k_NLD, v_NLD, mask_B1QL[:, :, lo : lo + step], scale, scratch)
        block = o_BKGQD[:, :, :, lo : lo + step]
        block.copy_(part.reshape(block.shape))


def widen_fp8(low: Tensor, factor: float, out: Tensor, scratch: Scratch) -> None:
    """out = low · factor. PyTorch converts fp8 element by element, more than ten times slower than
    this: e4m3's bits, shifted to where fp16 has sign, exponent and mantissa, are the value times
    2^-8, subnormals too, and fp16 is widened by an instruction. Its NaN, which a cache of finite
    keys and values never holds, reads as 480."""
    if low.dtype != torch.float8_e4m3fn:
        out.copy_(low).mul_(factor)
        return
    bits = scratch.take("bits", low.shape, torch.int16).copy_(low.view(torch.int8))
    bits.bitwise_left_shift_(7).bitwise_and_(-16385)  # clears the second copy of the sign
    is_wide = out.dtype == torch.float32
    wide = out if is_wide else scratch.take("widened", low.shape, torch.float32)
    wide.copy_(bits.view(torch.float16)).mul_(256.0 * factor)
    if not is_wide:
        out.copy_(wide)
