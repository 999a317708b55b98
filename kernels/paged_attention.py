"""Causal attention of new tokens over the paged cache: prefill, chunked prefill, prefix hits and
decoding in one call.

    o_i = softmax(scale · q_i · Kᵀ) · V,   K and V found through the sequence's block table

The last query of a sequence sits at its last key: query i of n sees `seq_len − n + i + 1` keys,
with `window=w` the last w of those, its own included; one plan serves layers with different
windows. Keys and values of the new tokens are already in the cache (`reshape_and_cache`). A cache
of fp8 holds k / k_scale and v / v_scale; attention multiplies them back.

GPU: Triton (`triton/paged_attention.py`), with contexts split over programs where every sequence
has one query. CPU: C++ (`cpp/attention.h`), or PyTorch (`attention_torch.py`) for a cache of fp8
and dtypes that C++ lacks; planned once a step for all layers, and fastest over a cache that lies as
`make_kv_cache` lays it (PyTorch copies any other whole, in every call). `sinks` [H] are scores
without a value, as in `flash_attn_varlen`. Left out: gradients.

Legend: T new tokens, B sequences, H query heads, K key heads, D head_dim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels.attention_torch import (
    KeyTable,
    PagedRectangles,
    Scratch,
    attend_rectangles,
)
from kernels.backend import (
    Backend,
    check_integers,
    check_sinks,
    check_tensors,
    check_window,
    ints,
    scale_of,
    use_native,
    use_triton,
    wide_sinks,
)
from kernels.cpp.ops import AttendOptions, QuerySpan, QueryTiles, attend_paged, paged_tiles
from kernels.kv_cache import check_like, check_rows, is_cache_order, key_rows


@dataclass(frozen=True)
class PagedPlan:
    """Where a step's queries find their keys, for attention on a CPU, whatever a layer's window."""

    num_tokens: int
    layout: QueryTiles | PagedRectangles  # for C++, for PyTorch


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
    num_kv = cache.shape[2]
    _check_step(starts, lens, block_tables, cache.shape[1])
    refusal = None if cache.dtype == dtype else f"the cache is {cache.dtype}, queries are {dtype}"
    if use_native(backend, cache, refusal=refusal):
        tiles = paged_tiles(starts, lens, block_tables, cache, num_heads // num_kv)
        return PagedPlan(starts[-1], tiles)
    width = block_tables.shape[1]
    spans = [
        QuerySpan(lo, hi - lo, lens[i], i * width) for i, (lo, hi) in enumerate(pairwise(starts))
    ]
    table = KeyTable(spans, block_tables.flatten(), cache.shape[1], num_kv, dtype)
    rectangles = PagedRectangles(table, Scratch() if scratch is None else scratch)
    return PagedPlan(starts[-1], rectangles)


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


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor | Sequence[int],
    seq_lens: Tensor | Sequence[int],
    block_tables: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    softmax_scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    split_size: int | None = None,
    out: Tensor | None = None,
    plan: PagedPlan | None = None,
    batch_invariant: bool = False,
    backend: Backend = "auto",
    debug: bool = False,
) -> Tensor:
    """o [T, H, D] of packed queries over caches [blocks, block_size, K, D].

    `query_start_loc` [B + 1], `seq_lens` [B] (keys, new tokens included), `block_tables`
    [B, blocks]; entries past a sequence's end are not read. On a GPU pass int32 tensors; the host
    does not read them. `split_size`: see `paged_attention_decode`, which runs when
    `max_query_len` is 1. On a CPU pass `plan` (`make_paged_plan`, once a step); the step's other
    arguments are then not read. `debug` reads the indices back and checks their range.
    `batch_invariant` on a GPU gives a query the same bits however many it comes with, and those of
    `flash_attn_varlen(batch_invariant=True)`: decoding takes the kernel of prefill, which does not
    split a context, and so is slower over long ones. On a CPU it always has them.
    """
    scales = (k_scale, v_scale)
    _check_caches(q_THD, k_cache, v_cache, scales, out)
    check_window(window)
    check_sinks(sinks, q_THD)
    sinks = wide_sinks(sinks, q_THD)
    if plan is None:
        check_integers(
            query_start_loc=query_start_loc, seq_lens=seq_lens, block_tables=block_tables
        )
    scale = scale_of(softmax_scale, q_THD)
    if debug:
        check_block_range(block_tables, seq_lens, v_cache)
    if use_triton(backend, q_THD, has_cpp=True):
        check_rows(k_cache)
        starts, lens, tables = _device_step(query_start_loc, seq_lens, block_tables, q_THD)
        if starts.shape[0] != lens.shape[0] + 1:
            raise ValueError(
                f"query_start_loc: shape {tuple(starts.shape)} must be seq_lens's + 1, "
                f"{lens.shape[0] + 1}"
            )
        out = _out_like(q_THD, out)
        is_decode = max_query_len == 1 and q_THD.shape[0] == lens.shape[0]
        if is_decode and not batch_invariant:
            _run_decode(
                q_THD, k_cache, v_cache, tables, lens, max_seq_len, scale, window, sinks, scales,
                (None, split_size), out,
            )  # fmt: skip
            return out
        from kernels.triton import paged_attention as triton_ops

        if q_THD.shape[0]:
            q = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
            triton_ops.attend(
                q, k_cache, v_cache, starts, lens, tables, scale, window, sinks, scales, out
            )
        return out
    if q_THD.device.type != "cpu":  # the definition, for comparison on a GPU: widens all of it
        use_native(backend, q_THD)  # C++ is refused
        wide = (_dequantised(k_cache, k_scale, q_THD), _dequantised(v_cache, v_scale, q_THD))
        return _deliver(
            paged_attention_ref(
                q_THD,
                *wide,
                query_start_loc,
                seq_lens,
                block_tables.long(),
                scale,
                window=window,
                sinks=sinks,
            ),
            out,
        )
    if plan is None:
        plan = make_paged_plan(
            query_start_loc,
            seq_lens,
            block_tables,
            cache=v_cache,
            num_heads=q_THD.shape[1],
            dtype=q_THD.dtype,
            backend=backend,
        )
    if plan.num_tokens != q_THD.shape[0]:
        raise ValueError(f"plan: made for {plan.num_tokens} tokens, q has {q_THD.shape[0]}")
    made_for = "cpp" if isinstance(plan.layout, QueryTiles) else "torch"
    if backend not in ("auto", made_for):
        raise ValueError(f"plan: made for {made_for!r}, must be made for backend={backend!r}")
    with torch.no_grad():
        if isinstance(plan.layout, QueryTiles):
            options = AttendOptions(scale, window, sinks)
            found = attend_paged(q_THD, k_cache, v_cache, plan.layout, options)
        else:
            layout = plan.layout.of(window)
            keys, q_THD = key_rows(k_cache), q_THD.contiguous()
            found = attend_rectangles(q_THD, keys, v_cache, layout, scale, scales, sinks)
        return _deliver(found, out)


def paged_attention_decode(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor | Sequence[int],
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    max_seq_len: int,
    num_splits: int | None = None,
    split_size: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
    debug: bool = False,
) -> Tensor:
    """o [B, H, D] of one query a sequence, the last; a sequence of length 0 gives 0 on a GPU.

    On a GPU a context (with a window its last tiles) is split over programs: into `num_splits`
    parts, or parts of `split_size` keys (rounded up to the tile), or as many as fill the GPU. Only
    with `split_size` is a sequence's result independent of the rest of the batch, bit for bit.
    """
    for name, value in (("num_splits", num_splits), ("split_size", split_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    if num_splits is not None and split_size is not None:
        raise ValueError(f"num_splits={num_splits}, split_size={split_size}: give one of them")
    scales = (k_scale, v_scale)
    scale = softmax_scale if softmax_scale is not None else q_BHD.shape[-1] ** -0.5
    if not use_triton(backend, q_BHD, has_cpp=True):
        return paged_attention(
            q_BHD, k_cache, v_cache, range(q_BHD.shape[0] + 1), seq_lens, block_tables,
            max_query_len=1, max_seq_len=max_seq_len, softmax_scale=scale, window=window,
            sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=out, backend=backend, debug=debug,
        )  # fmt: skip
    _check_caches(q_BHD, k_cache, v_cache, scales, out)
    check_rows(k_cache)
    check_window(window)
    check_sinks(sinks, q_BHD)
    sinks = wide_sinks(sinks, q_BHD)
    check_integers(seq_lens=seq_lens, block_tables=block_tables)
    if debug:
        check_block_range(block_tables, seq_lens, k_cache)
    _, lens, tables = _device_step(None, seq_lens, block_tables, q_BHD)
    if lens.shape[0] != q_BHD.shape[0]:
        raise ValueError(f"seq_lens: {lens.shape[0]} sequences, must be q's {q_BHD.shape[0]}")
    out = _out_like(q_BHD, out)
    split = (num_splits, split_size)
    _run_decode(
        q_BHD, k_cache, v_cache, tables, lens, max_seq_len, scale, window, sinks, scales, split, out
    )
    return out


def _run_decode(
    q, k_cache, v_cache, tables, lens, max_seq_len, scale, window, sinks, scales, split, out
) -> None:
    from kernels.triton import paged_attention as triton_ops

    if q.shape[0]:
        q = q if q.stride(2) == 1 else q.contiguous()
        triton_ops.decode(
            q, k_cache, v_cache, tables, lens, max_seq_len, scale, window, sinks, scales, split, out
        )


def _device_step(starts, lens, tables: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The step's indices as tensors beside q."""
    device = q.device
    if starts is not None:
        starts = torch.as_tensor(starts, device=device)
        if starts.device.type == "cpu" and int(starts[-1]) != q.shape[0]:
            raise ValueError(
                f"query_start_loc: ends at {int(starts[-1])}, not at {q.shape[0]} of q"
            )
    lens, tables = torch.as_tensor(lens, device=device), tables.to(device)
    if tables.dim() != 2 or tables.stride(1) != 1 or tables.shape[0] != lens.shape[0]:
        raise ValueError(
            f"block_tables: shape {tuple(tables.shape)} must be [the {lens.shape[0]} of seq_lens, "
            "blocks], rows contiguous"
        )
    return starts, lens, tables


def _out_like(q: Tensor, out: Tensor | None) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def _dequantised(cache: Tensor, scale: Tensor | None, q: Tensor) -> Tensor:
    wide = cache.float() if scale is None else cache.float() * scale
    return wide.to(q.dtype)


def check_block_range(
    block_tables: Tensor, seq_lens: Tensor | Sequence[int], cache: Tensor
) -> None:
    """Raises where a sequence's blocks are too few or outside the cache. Reads the indices back."""
    num_blocks, block_size = cache.shape[:2]
    for i, length in enumerate(ints(seq_lens)):
        used = block_tables[i, : -(-length // block_size)].tolist()
        if len(used) * block_size < length:
            raise ValueError(
                f"block_tables[{i}]: {len(used)} blocks of {block_size} cannot hold "
                f"seq_lens[{i}]={length}"
            )
        for j, block in enumerate(used):
            if not 0 <= block < num_blocks:
                raise ValueError(f"block_tables[{i}, {j}]={block}: must be in [0, {num_blocks})")


def _check_caches(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    out: Tensor | None,
) -> None:
    if q.dim() != 3 or v_cache.dim() != 4:
        raise ValueError(
            "q: must be [tokens, heads, head_dim], v_cache [blocks, size, heads, head_dim], got "
            f"{tuple(q.shape)}, {tuple(v_cache.shape)}"
        )
    check_like(k_cache, v_cache)
    if q.shape[2] != v_cache.shape[3] or q.shape[1] % v_cache.shape[2]:
        raise ValueError(
            f"q: heads and head_dim {tuple(q.shape[1:])} do not fit caches of "
            f"{tuple(v_cache.shape[2:])}"
        )
    check_tensors(q, "q", False, k_scale=scales[0], v_scale=scales[1], out=out)
    is_fp8 = k_cache.dtype.itemsize == 1
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.device != q.device or not is_cache_order(cache):
            raise ValueError(f"{name}: must be contiguous and on {q.device}, is on {cache.device}")
        if cache.dtype != (k_cache.dtype if is_fp8 else q.dtype):
            raise ValueError(f"{name}: dtype {cache.dtype}, must be q's {q.dtype} or fp8")
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if (scale is not None) != is_fp8 or (scale is not None and scale.numel() != 1):
            raise ValueError(f"{name}: one fp32 element for a cache of fp8, None for any other")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or out.stride(2) != 1):
        raise ValueError(
            f"out: {out.dtype} {tuple(out.shape)} must be q's {q.dtype} {tuple(q.shape)}, dense"
        )
