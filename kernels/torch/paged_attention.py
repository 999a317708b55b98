"""Paged attention in PyTorch: the definition, and what paged_attention.py does where there is no
C++, for caches of fp8 and dtypes that C++ lacks (the arithmetic is `attention.py`'s beside this).
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kernels.backend import ints
from kernels.cpp.ops import AttendOptions, QuerySpan
from kernels.memory import Scratch
from kernels.torch.attention import KeyTable, PagedRectangles, attend_rectangles
from kernels.torch.kv_cache import key_rows

Caches = tuple[Tensor, Tensor]
Scales = tuple[Tensor | None, Tensor | None]


def plan_rectangles(
    step: tuple[list[int], list[int], Tensor],
    cache: Tensor,
    dtype: torch.dtype,
    scratch: Scratch | None,
) -> PagedRectangles:
    """The layouts of a step: (query_start_loc, seq_lens, block_tables)."""
    starts, lens, block_tables = step
    width = block_tables.shape[1]
    spans = [
        QuerySpan(lo, hi - lo, lens[i], i * width) for i, (lo, hi) in enumerate(pairwise(starts))
    ]
    table = KeyTable(spans, block_tables.flatten(), cache.shape[1], cache.shape[2], dtype)
    return PagedRectangles(table, Scratch() if scratch is None else scratch)


def attend(
    q_THD: Tensor, caches: Caches, scales: Scales, layout: PagedRectangles, options: AttendOptions
) -> Tensor:
    """o [T, H, D] of a planned step."""
    keys, q_THD = key_rows(caches[0]), q_THD.contiguous()
    rectangles = layout.of(options.window)
    return attend_rectangles(
        q_THD, keys, caches[1], rectangles, options.scale, scales, options.sinks
    )


def attend_by_definition(
    q_THD: Tensor,
    caches: Caches,
    scales: Scales,
    step: tuple[Tensor | Sequence[int], Tensor | Sequence[int], Tensor],
    options: AttendOptions,
) -> Tensor:
    """The definition, for comparison on a GPU: widens all of the caches."""
    k, v = (_dequantised(cache, s, q_THD) for cache, s in zip(caches, scales, strict=True))
    starts, lens, tables = step
    return paged_attention_ref(
        q_THD, k, v, starts, lens, tables.long(), options.scale,
        window=options.window, sinks=options.sinks,
    )  # fmt: skip


def paged_attention_ref(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor | Sequence[int],
    seq_lens: Tensor | Sequence[int],
    block_tables: Tensor,
    softmax_scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition, one sequence at a time."""
    starts, lens = ints(query_start_loc), ints(seq_lens)
    group = q_THD.shape[1] // k_cache.shape[2]
    out = torch.empty_like(q_THD)
    for i, length in enumerate(lens):
        lo, hi = starts[i], starts[i + 1]
        blocks = block_tables[i, : -(-length // k_cache.shape[1])]
        k = k_cache[blocks].flatten(0, 1)[:length].transpose(0, 1).repeat_interleave(group, 0)
        v = v_cache[blocks].flatten(0, 1)[:length].transpose(0, 1).repeat_interleave(group, 0)
        scores = q_THD[lo:hi].transpose(0, 1) @ k.transpose(1, 2) * softmax_scale
        position = torch.arange(length - (hi - lo), length, device=q_THD.device).unsqueeze(1)
        key = torch.arange(length, device=q_THD.device)
        hidden = key > position
        if window is not None:
            hidden |= key <= position - window
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            column = sinks.to(scores.dtype)[:, None, None].expand(-1, hi - lo, 1)
            scores = torch.cat([scores, column], -1)
        p = torch.softmax(scores, -1)[:, :, :length]
        out[lo:hi] = (p @ v).transpose(0, 1)
    return out


def _dequantised(cache: Tensor, scale: Tensor | None, q: Tensor) -> Tensor:
    wide = cache.float() if scale is None else cache.float() * scale
    return wide.to(q.dtype)
