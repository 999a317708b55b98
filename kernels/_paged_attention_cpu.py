"""CPU path of `paged_attention`: one engine step as a few padded rectangles.

`make_paged_plan` sorts the step's sequences into rectangles (decodes apart from prefills, each by
length), with gather indices and masks, once for all layers; a layer is then two gathers and one
batched attention a rectangle, the trainer's arithmetic (`_attend.py`).

Legend: B sequences, Q queries, L padded keys, H query heads, K key heads, G = H / K, D head_dim.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from kernels._attend import (
    Scratch,
    attend_rows,
    bucket_by_length,
    is_half,
    key_multiple,
    round_up,
    safe_rows,
    weighted_values,
)
from kernels._dispatch import compute_dtype
from kernels._gather_blocks_cpu import gather_blocks

_PIECE_KEYS = 1 << 20  # elements of k gathered at a time (about 16 sequences of 400 tokens)
_PIECE_SCORES = 1 << 21  # scores held at a time
_MAX_WIDE = 256  # columns of `_attend_one_query`: beyond, its zeros cost more than a copy


@dataclass(frozen=True)
class _Rectangle:
    """Sequences with similar numbers of queries and keys."""

    num_seqs: int
    num_queries: int
    blocks: Tensor  # [num_seqs * blocks each] cache blocks, in order
    queries: Tensor | None  # [num_seqs * num_queries] token of each cell; None: all, in order
    cells: Tensor | None  # the cell of each of the rectangle's tokens; None: every cell is real
    tokens: Tensor | None  # those tokens; None: all, in order
    mask: Tensor  # [num_seqs, 1, num_queries, keys] additive


@dataclass(frozen=True)
class PagedPlan:
    """The layout of one engine step for CPU attention."""

    rectangles: list[_Rectangle]
    num_tokens: int
    scratch: Scratch = field(default_factory=Scratch, repr=False, compare=False)


def make_paged_plan(
    query_start_loc: Tensor | Sequence[int],
    seq_lens: Tensor | Sequence[int],
    block_tables: Tensor,
    *,
    block_size: int,
    dtype: torch.dtype,
) -> PagedPlan:
    """A plan for `paged_attention(..., plan=)`.

    `query_start_loc` [sequences + 1], `seq_lens` [sequences] (keys, new tokens included),
    `block_tables` [sequences, blocks]; entries past a sequence's end are not read. `dtype` is that
    of the queries.
    """
    starts, lens = ints(query_start_loc), ints(seq_lens)
    counts = [b - a for a, b in pairwise(starts)]
    _check_step(counts, lens, block_tables, block_size)
    decodes = [i for i, n in enumerate(counts) if n == 1]
    prefills = [i for i, n in enumerate(counts) if n > 1]
    multiple = math.lcm(key_multiple(dtype), block_size)
    groups = [
        [decodes[j] for j in members]
        for members in bucket_by_length([lens[i] for i in decodes], multiple)
    ]
    for by_queries in bucket_by_length([counts[i] for i in prefills], 4):
        same = [prefills[j] for j in by_queries]
        for by_keys in bucket_by_length([lens[i] for i in same], multiple):
            groups.append([same[j] for j in by_keys])
    rectangles = [
        _rectangle(g, starts, counts, lens, block_tables, block_size, multiple, dtype)
        for g in groups
    ]
    return PagedPlan(rectangles, starts[-1])


def _rectangle(
    members: list[int],
    starts: list[int],
    counts: list[int],
    lens: list[int],
    block_tables: Tensor,
    block_size: int,
    multiple: int,
    dtype: torch.dtype,
) -> _Rectangle:
    first = torch.tensor([starts[i] for i in members]).unsqueeze(1)
    count = torch.tensor([counts[i] for i in members]).unsqueeze(1)
    length = torch.tensor([lens[i] for i in members]).unsqueeze(1)
    num_keys = round_up(int(length.max()), multiple)
    num_queries = int(count.max())
    columns = torch.arange(num_queries)
    query = torch.minimum(columns, count - 1)  # padding repeats the last query
    visible = length - count + query + 1
    mask = torch.zeros(len(members), num_queries, num_keys, dtype=compute_dtype(dtype))
    mask.masked_fill_(torch.arange(num_keys) >= visible.unsqueeze(2), -math.inf)
    queries = (first + query).flatten()
    is_real = (columns < count).flatten()
    is_whole = len(members) == len(lens)
    is_full = bool(is_real.all())
    return _Rectangle(
        num_seqs=len(members),
        num_queries=num_queries,
        blocks=_block_index(members, length, block_tables, block_size, num_keys),
        queries=None if is_whole and is_full else queries,
        cells=None if is_full else is_real.nonzero().squeeze(1),
        tokens=None if is_whole else queries[is_real],
        mask=mask.unsqueeze(1),
    )


def _block_index(
    members: list[int], length: Tensor, block_tables: Tensor, block_size: int, num_keys: int
) -> Tensor:
    """The cache blocks of each sequence, padded with its own first block."""
    width = num_keys // block_size
    table = block_tables[members].to(torch.int64)
    padded = table[:, :1].expand(-1, width).clone()
    shared = min(width, table.shape[1])
    is_used = torch.arange(shared) * block_size < length
    padded[:, :shared] = torch.where(is_used, table[:, :shared], table[:, :1])
    return padded.flatten()


def attend_plan(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: PagedPlan,
    scale: float,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """o of the plan's queries. `scales` (of k, of v) are those of a cache in fp8."""
    out = torch.empty_like(q_THD)
    factors = [1.0 if s is None else float(s) for s in scales]
    for r in plan.rectangles:
        attend = _attend_by_shape(r, q_THD.dtype, k_cache)
        q = q_THD if r.queries is None else q_THD.index_select(0, r.queries)
        q_BQHD = q.unflatten(0, (r.num_seqs, r.num_queries))
        o = torch.empty_like(q_BQHD)
        num_keys = r.mask.shape[-1]
        width = num_keys // k_cache.shape[1]
        for lo, hi in _pieces(r, num_keys, q_THD.shape[1], k_cache):
            blocks = r.blocks[lo * width : hi * width]
            k_BLKD, v_BLKD = (
                gather_blocks(name, cache, factor, blocks, hi - lo, q_THD.dtype, plan.scratch)
                for name, cache, factor in zip("kv", (k_cache, v_cache), factors, strict=True)
            )
            attend(o[lo:hi], q_BQHD[lo:hi], k_BLKD, v_BLKD, r.mask[lo:hi], scale, plan.scratch)
        o_cells = o.flatten(0, 1) if r.cells is None else o.flatten(0, 1).index_select(0, r.cells)
        if r.tokens is None:
            return o_cells
        out.index_copy_(0, r.tokens, o_cells)
    return out


def _pieces(r: _Rectangle, num_keys: int, num_heads: int, k_cache: Tensor) -> list[tuple[int, int]]:
    """Runs of sequences whose keys, and whose scores, stay in the processor's cache."""
    keys = num_keys * k_cache.shape[2] * k_cache.shape[3]
    scores = num_keys * num_heads * r.num_queries
    step = max(1, min(_PIECE_KEYS // keys, _PIECE_SCORES // scores))
    return [(lo, min(lo + step, r.num_seqs)) for lo in range(0, r.num_seqs, step)]


def _attend_by_shape(r: _Rectangle, dtype: torch.dtype, k_cache: Tensor) -> Callable[..., None]:
    if r.num_queries > 1:
        return _attend_queries
    if not is_half(dtype):
        return _attend_one_query_by_head
    is_narrow = k_cache.shape[2] * k_cache.shape[3] <= _MAX_WIDE
    return _attend_one_query if is_narrow else _attend_queries


def _attend_one_query(o_BQHD, q_BQHD, k_BLKD, v_BLKD, mask, scale, scratch) -> None:
    """Decoding in bf16: all heads as rows of one matmul against the keys as they lie, [L, K · D].

    A head's query sits in its own key head's columns, the rest are zeros, which add nothing: the
    bits are those of one matmul a head, without a transposed copy of the keys.
    """
    num_seqs, _, num_heads, head_dim = q_BQHD.shape
    num_kv = k_BLKD.shape[2]
    spread = (num_seqs, num_kv, num_heads // num_kv, num_kv, head_dim)
    q_wide = q_BQHD.new_zeros(spread)
    q_wide.diagonal(dim1=1, dim2=3).copy_(_heads_last(q_BQHD, num_kv))
    rows = (num_seqs, num_heads, num_kv * head_dim)
    o_wide = attend_rows(
        q_wide.view(rows), k_BLKD.flatten(2), v_BLKD.flatten(2), mask, scale, scratch
    )
    _heads_last(o_BQHD, num_kv).copy_(o_wide.view(spread).diagonal(dim1=1, dim2=3))


def _attend_one_query_by_head(o_BQHD, q_BQHD, k_BLKD, v_BLKD, mask, scale, scratch) -> None:
    """Decoding in fp32 (fp64): one matmul a key head on the keys as they lie. MKL takes their
    stride without a copy and with the same bits; oneDNN's half precision is slow at that."""
    num_seqs, num_keys, num_kv, head_dim = k_BLKD.shape
    q_KBGD = q_BQHD.squeeze(1).unflatten(1, (num_kv, -1)).transpose(0, 1)
    group = q_KBGD.shape[2]
    rows = safe_rows(group, num_seqs, q_BQHD.dtype)
    q_KBRD = q_BQHD.new_zeros(num_kv, num_seqs, rows, head_dim)
    q_KBRD[:, :, :group] = q_KBGD
    scores = scratch.take("scores", (num_kv, num_seqs, rows, num_keys), q_BQHD.dtype)
    for head in range(num_kv):
        torch.bmm(q_KBRD[head], k_BLKD[:, :, head].transpose(1, 2), out=scores[head])
    scores.mul_(scale).add_(mask[:, 0])
    p_KBRL = torch.softmax(scores, -1, out=scratch.take("p", scores.shape, scores.dtype))
    o_BKGD = o_BQHD.squeeze(1).unflatten(1, (num_kv, -1))
    for head in range(num_kv):
        o_BRD = weighted_values(p_KBRL[head], v_BLKD[:, :, head], scratch)
        o_BKGD[:, head] = o_BRD[:, :group]


def _heads_last(x_BQHD: Tensor, num_kv: int) -> Tensor:
    """One query's heads as a view [B, G, D, K]."""
    return x_BQHD.squeeze(1).unflatten(1, (num_kv, -1)).permute(0, 2, 3, 1)


def _attend_queries(o_BQHD, q_BQHD, k_BLKD, v_BLKD, mask, scale, scratch) -> None:
    """Any number of queries: one matmul a key head, its group's queries as rows."""
    num_kv, num_keys, head_dim = k_BLKD.shape[2], k_BLKD.shape[1], k_BLKD.shape[3]
    shape = (k_BLKD.shape[0], num_kv, num_keys, head_dim)
    k = scratch.take("k_heads", shape, k_BLKD.dtype).copy_(k_BLKD.transpose(1, 2)).flatten(0, 1)
    v = scratch.take("v_heads", shape, v_BLKD.dtype).copy_(v_BLKD.transpose(1, 2)).flatten(0, 1)
    q_BKGQD = q_BQHD.unflatten(2, (num_kv, -1)).permute(0, 2, 3, 1, 4)
    o_BKGQD = o_BQHD.unflatten(2, (num_kv, -1)).permute(0, 2, 3, 1, 4)
    step = max(1, _PIECE_SCORES // (q_BQHD.shape[0] * q_BQHD.shape[2] * num_keys))
    num_queries = q_BQHD.shape[1]
    for lo in range(0, num_queries, step):
        q_NRD = q_BKGQD[:, :, :, lo : lo + step].reshape(k.shape[0], -1, head_dim)
        part = attend_rows(q_NRD, k, v, mask[:, :, lo : lo + step], scale, scratch)
        block = o_BKGQD[:, :, :, lo : lo + step]
        block.copy_(part.reshape(block.shape))


def ints(x: Tensor | Sequence[int]) -> list[int]:
    return x.tolist() if isinstance(x, Tensor) else list(x)


def _check_step(counts: list[int], lens: list[int], block_tables: Tensor, block_size: int) -> None:
    if len(counts) != len(lens) or block_tables.shape[0] != len(lens):
        raise ValueError(
            f"query_start_loc: {len(counts)} sequences, seq_lens: {len(lens)}, block_tables: "
            f"{block_tables.shape[0]}; must be the same"
        )
    for i, (count, length) in enumerate(zip(counts, lens, strict=True)):
        if not 1 <= count <= length:
            raise ValueError(
                f"seq_lens[{i}]={length}: must be at least the sequence's {count} queries, "
                "and those at least 1"
            )
        if length > block_tables.shape[1] * block_size:
            raise ValueError(
                f"block_tables: {block_tables.shape[1]} blocks of {block_size} cannot hold "
                f"seq_lens[{i}]={length}"
            )
