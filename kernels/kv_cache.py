"""The paged cache of keys and values: how it lies, and where a step's queries find their keys.

A cache is [blocks, block_size, key heads, head_dim]; slot s is row s % block_size of block
s // block_size. `make_kv_cache` allocates it in the order that its device's kernels read fastest.
Where C++ attends, `keys_in_runs` says how that memory is to hold keys: as scoring multiplies them,
so that no step lays them out again. Values stay rows, and rows are counted in their cache. Every
function takes keys of either order.

A step of a dense model over it is one call of C++ (`cpp/decoder.py`), for which `cache_rows` says
where new keys go and `make_paged_plan` where the old ones are. Left out: the ops that a model calls
layer by layer instead, which write to the cache and attend over it (`paged/`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.backend import Backend, ints, resolve, use_native
from kernels.cpp import ops as cpp_ops
from kernels.cpp.ops import QueryTiles, has_key_runs, paged_tiles
from kernels.memory import Scratch, fresh_pages

_PLAN = "kernels.torch.paged_attention:plan_rectangles"


def make_kv_cache(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros [..., blocks, block_size, K, D]. On a CPU they lie heads first in memory,
    [..., blocks, K, block_size, D]: what attention reads of a block for one head is one piece.

    Zeros, because attention multiplies what is not yet written by a weight of 0. On a CPU they
    come from the operating system, page by page as blocks are first used.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(tuple(shape), dtype=index_dtype(dtype), device=device).view(dtype)
    *before, block_size, num_kv, head_dim = shape
    raw = fresh_pages(math.prod(shape) * dtype.itemsize)
    data = raw.view(dtype).view(*before, num_kv, block_size, head_dim)
    return data.transpose(-3, -2)


def keys_in_runs(cache: Tensor) -> Tensor:
    """The memory of a layer's cache, not yet written, for keys that lie as C++ multiplies them:
    [blocks, K, runs, words, keys of a run, elements of a word]. A run is as many consecutive keys
    as the processor has lanes, a word the elements that it multiplies at once.

    The cache itself where keys stay rows: another dtype than C++'s or no compiler, another device,
    an order other than `make_kv_cache`'s, blocks that are not whole runs, heads not whole words."""
    if not use_native("auto", cache) or not heads_first(cache).is_contiguous():
        return cache
    num_blocks, block_size, num_kv, head_dim = cache.shape
    num_keys, per_word = cpp_ops.run_shape(cache.dtype)
    if block_size % num_keys or head_dim % per_word:
        return cache
    runs, words = block_size // num_keys, head_dim // per_word
    return heads_first(cache).view(num_blocks, num_kv, runs, words, num_keys, per_word)


def index_dtype(dtype: torch.dtype) -> torch.dtype:
    """As what elements are filled and copied: PyTorch lacks such ops of fp8, so that as bytes."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def heads_first(cache: Tensor) -> Tensor:
    """The same cache as [blocks, K, block_size, D]; contiguous where `make_kv_cache` made it."""
    return cache.transpose(1, 2)


def check_rows(cache: Tensor) -> None:
    """Raises for a cache of keys in runs where rows are to be counted or, by Triton, read."""
    if has_key_runs(cache):
        raise ValueError(
            "cache: keys in runs have no rows; to count rows give the layer's cache of values, to "
            "Triton keys as make_kv_cache laid them"
        )


def head_rows(cache: Tensor) -> int:
    """How far apart a token's heads lie in a CPU's cache seen as rows of D."""
    return 1 if cache.is_contiguous() else cache.shape[1]


def cache_rows(slots_T: Tensor, cache: Tensor) -> Tensor:
    """Where each token's first head lies in a CPU's cache seen as rows of D, [T] int64. `cache` is
    any layer's values; where keys do not lie in runs, any layer's keys do as well."""
    check_rows(cache)
    check_slots(slots_T, cache)
    block_size, num_kv = cache.shape[1:3]
    slots_T = slots_T.to(torch.int64)
    if cache.is_contiguous():
        return slots_T * num_kv
    block = slots_T.div(block_size, rounding_mode="floor")
    return slots_T + block * ((num_kv - 1) * block_size)


def check_slots(slots: Tensor, cache: Tensor, lowest: int = 0) -> None:
    """Slots from `lowest` to the last of the cache."""
    num_slots = cache.shape[0] * cache.shape[1]
    is_bad = (slots < lowest) | (slots >= num_slots)
    if is_bad.any():
        t = int(is_bad.nonzero()[0])
        raise ValueError(
            f"slot_mapping[{t}]={int(slots[t])}: must be at least {lowest} and below {num_slots}"
        )


@dataclass(frozen=True)
class PagedPlan:
    """Where a step's queries find their keys, for attention on a CPU, whatever a layer's window."""

    num_tokens: int
    layout: QueryTiles | Any  # for C++; for PyTorch its own


def make_paged_plan(
    query_start_loc: Tensor | Sequence[int],
    seq_lens: Tensor | Sequence[int],
    block_tables: Tensor,
    *,
    cache: Tensor,
    num_heads: int,
    dtype: torch.dtype,
    scratch: Scratch | None = None,
    backend: Backend = "auto",
) -> PagedPlan:
    """A plan for `paged_attention(..., plan=)` on a CPU.

    `query_start_loc` [sequences + 1], `seq_lens` [sequences] (keys, new tokens included),
    `block_tables` [sequences, blocks]; entries past a sequence's end are not read. `cache` is any
    layer's values (its keys, where those do not lie in runs): its shape, dtype and order in memory
    count. `num_heads` and `dtype` are those of the queries. `scratch` is memory that outlives the
    plan.
    """
    check_rows(cache)
    starts, lens = ints(query_start_loc), ints(seq_lens)
    _check_step(starts, lens, block_tables, cache.shape[1])
    refusal = None if cache.dtype == dtype else f"the cache is {cache.dtype}, queries are {dtype}"
    if use_native(backend, cache, refusal=refusal):
        tiles = paged_tiles(starts, lens, block_tables, cache, num_heads // cache.shape[2])
        return PagedPlan(starts[-1], tiles)
    step = (starts, lens, block_tables)
    return PagedPlan(starts[-1], resolve(_PLAN)(step, cache, dtype, scratch))


def _check_step(starts: list[int], lens: list[int], block_tables: Tensor, block_size: int) -> None:
    if len(starts) != len(lens) + 1 or block_tables.shape[0] != len(lens):
        raise ValueError(
            f"query_start_loc: {len(starts) - 1} sequences, seq_lens: {len(lens)}, block_tables: "
            f"{block_tables.shape[0]}; must be the same"
        )
    for i, ((lo, hi), length) in enumerate(zip(pairwise(starts), lens, strict=True)):
        if not 0 <= hi - lo <= length:
            raise ValueError(
                f"seq_lens[{i}]={length}: must be at least the sequence's {hi - lo} queries, "
                "and query_start_loc must not decrease"
            )
        if length > block_tables.shape[1] * block_size:
            raise ValueError(
                f"block_tables: {block_tables.shape[1]} blocks of {block_size} cannot hold "
                f"seq_lens[{i}]={length}"
            )
