"""Attention in C++ (`native/attention.h`): which queries meet which keys, and where those lie.

Keys are found through a table of rows, so one kernel serves packed sequences (training), the
blocks of a paged cache (inference) and prompts that several completions share, with the same bits
for a query in each of them. What is made here is made once a step and serves all layers.

Legend: T tokens, H query heads, K key heads, D head_dim, B sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels._native import function
from kernels._native_ops import dense_rows

_TILE_ROWS = 24  # queries x heads of a group that meet the same keys


@dataclass(frozen=True)
class Tiles:
    """The queries of a step, cut into tiles."""

    num_tokens: int
    tiles: Tensor  # [tiles, 4] int32: first query, queries, keys the last one sees, first key row
    key_rows: Tensor  # int32, the rows of k and v, sequence by sequence


@dataclass(frozen=True)
class Span:
    """Consecutive queries of one sequence."""

    query: int  # the first
    num_queries: int
    num_keys: int  # that the last one sees; the one before it sees one less
    first_key: int  # in the table of key rows


def make_tiles(spans: Sequence[Span], key_rows: Tensor, group: int) -> Tiles:
    """`group` is the number of heads that share a key head."""
    step = max(1, _TILE_ROWS // group)
    tiles = []
    for span in spans:
        for lo in range(0, span.num_queries, step):
            hi = min(lo + step, span.num_queries)
            num_keys = span.num_keys - span.num_queries + hi
            tiles.append((span.query + lo, hi - lo, num_keys, span.first_key))
    shaped = torch.tensor(tiles, dtype=torch.int32).view(-1, 4)
    return Tiles(sum(span.num_queries for span in spans), shaped, key_rows)


def packed_tiles(bounds: Sequence[int], group: int) -> Tiles:
    """Whole sequences one after the other, [B + 1] bounds."""
    spans = [Span(lo, hi - lo, hi - lo, lo) for lo, hi in pairwise(bounds)]
    return make_tiles(spans, torch.arange(bounds[-1], dtype=torch.int32), group)


def paged_tiles(
    starts: Sequence[int], lens: Sequence[int], block_tables: Tensor, cache: Tensor, group: int
) -> Tiles:
    """The last `starts[i + 1] - starts[i]` of the `lens[i]` tokens of each sequence, whose keys
    lie in blocks of a cache [blocks, block_size, K, D]. Entries past a sequence's end are not
    read. `ValueError` for a block that the cache does not have."""
    block_size = cache.shape[1]
    num_blocks = -(-max(lens, default=0) // block_size)
    blocks_BN = block_tables[:, :num_blocks].to(torch.int64)
    _check_blocks(blocks_BN, lens, cache)
    rows_a_block = block_size * (1 if cache.is_contiguous() else cache.shape[2])
    rows = (blocks_BN * rows_a_block).unsqueeze(2) + torch.arange(block_size)
    length = num_blocks * block_size
    spans = [Span(lo, hi - lo, lens[i], i * length) for i, (lo, hi) in enumerate(pairwise(starts))]
    return make_tiles(spans, rows.to(torch.int32).flatten(), group)


def _check_blocks(blocks_BN: Tensor, lens: Sequence[int], cache: Tensor) -> None:
    used_B1 = -(-torch.tensor(lens, dtype=torch.int64).unsqueeze(1) // cache.shape[1])
    is_bad = ((blocks_BN < 0) | (blocks_BN >= cache.shape[0])) & (
        torch.arange(blocks_BN.shape[1]) < used_B1
    )
    if is_bad.any():
        i, j = is_bad.nonzero()[0].tolist()
        raise ValueError(
            f"block_tables[{i}, {j}]={int(blocks_BN[i, j])}: must be in [0, {cache.shape[0]})"
        )


def attend_paged(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: Tiles, scale: float
) -> Tensor:
    """o [T, H, D] over caches as `paged_tiles` was given one."""
    row, head = cache_strides(k_cache)
    num_kv = k_cache.shape[2]
    return _attend(q_THD, k_cache, v_cache, tiles, scale, (row, row), (head, head), num_kv)


def cache_strides(cache: Tensor) -> tuple[int, int]:
    """From row to row (as `paged_tiles` counts them) and from head to head, in elements."""
    _, block_size, num_kv, head_dim = cache.shape
    if cache.is_contiguous():
        return num_kv * head_dim, head_dim
    return head_dim, block_size * head_dim


def attend_packed(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, tiles: Tiles, scale: float
) -> Tensor:
    """o [T, H, D]; rows are tokens."""
    k, v = dense_rows(k_TKD), dense_rows(v_TKD)
    head_dim = k.shape[2]
    rows = (k.stride(0), v.stride(0))
    return _attend(q_THD, k, v, tiles, scale, rows, (head_dim, head_dim), k.shape[1])


def _attend(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    scale: float,
    row_strides: tuple[int, int],
    head_strides: tuple[int, int],
    num_kv: int,
) -> Tensor:
    """Strides are in elements, of k and of v."""
    q = dense_rows(q_THD)
    o = torch.empty(q.shape, dtype=q.dtype)
    _, num_heads, head_dim = q.shape
    function("attend", q.dtype)(
        o.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), tiles.key_rows.data_ptr(),
        tiles.tiles.data_ptr(), len(tiles.tiles), num_kv, num_heads // num_kv, head_dim,
        q.stride(0), *row_strides, *head_strides, scale, torch.get_num_threads(),
    )  # fmt: skip
    return o
