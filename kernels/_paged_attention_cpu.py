"""PyTorch's CPU path of `paged_attention`: one engine step as a few padded rectangles.

`make_rectangles` sorts the step's sequences (decodes apart from prefills, each by length) and cuts
them into rectangles, with gather indices and masks, once for all layers. A layer is then two
gathers and one batched attention a rectangle, the trainer's arithmetic (`_attend.py`). A gather
copies each key head's part of a block, in one piece where the cache lies heads first in memory
(kv_cache.py), straight into the order [sequences, key heads, keys, head_dim] of the matmuls. What
it gathered of a cache in fp8 is then widened: what a step reads, never the cache.

Legend: B sequences, Q queries, L padded keys, H query heads, K key heads, G = H / K, D head_dim,
C cells (queries of all rectangles, padding included).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels._attend import (
    Scratch,
    attend_rows,
    bucket_by_length,
    for_products,
    key_multiple,
    product_dtype,
    round_up,
)
from kernels._widen_fp8 import widen_fp8
from kernels.kv_cache import heads_first, index_dtype

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
        k_NLD = _gather("k", k_rows, k_factor, r.blocks, num, dtype, scratch)
        v_NLD = _gather("v", v_rows, v_factor, r.blocks, num, dtype, scratch)
        shape = (r.num_seqs, r.num_queries, num_kv, -1, q_THD.shape[2])
        q, o = (x[r.cells].view(shape).permute(0, 2, 3, 1, 4) for x in (q_CHD, o_CHD))
        _attend(o, q, k_NLD, v_NLD, r.mask, scale, scratch)
    return o_CHD if plan.cells is None else o_CHD.index_select(0, plan.cells)


def _gather(
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
