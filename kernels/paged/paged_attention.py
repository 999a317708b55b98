"""Causal attention of new tokens over the paged cache: prefill, chunked prefill, prefix hits and
decoding in one call.

    o_i = softmax(scale · q_i · Kᵀ) · V,   K and V found through the sequence's block table

The last query of a sequence sits at its last key: query i of n sees `seq_len − n + i + 1` keys,
with `window=w` the last w of those, its own included; one plan serves layers with different
windows. Keys and values of the new tokens are already in the cache (`reshape_and_cache`). A cache
of fp8 holds k / k_scale and v / v_scale; attention multiplies them back.

GPU: Triton (`gpu/paged_attention.py`), with contexts split over programs where every sequence has
one query. CPU: C++ (`cpp/attention.h`), or PyTorch (`torch/paged_attention.py`, with the
definition, `paged_attention_ref`) for a cache of fp8 and dtypes that C++ lacks; planned once a step
for all layers, and fastest over a cache that lies as `make_kv_cache` lays it (PyTorch copies any
other whole, in every call). `sinks` [H] are scores without a value, as in `flash_attn_varlen`. Left
out: gradients.

Legend: T new tokens, B sequences, H query heads, K key heads, D head_dim.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import (
    Backend,
    check_integers,
    check_sinks,
    check_tensors,
    check_window,
    resolve,
    scale_of,
    use_native,
    use_triton,
    wide_sinks,
)
from kernels.cpp.ops import AttendOptions, QueryTiles, attend_paged
from kernels.kv_cache import PagedPlan, check_rows, make_paged_plan
from kernels.paged.cache_checks import check_caches, check_like

_ON_GPU = "kernels.gpu.paged_attention:attend"
_CHECK_RANGE = "kernels.gpu.paged_attention:check_block_range"
_ATTEND = "kernels.torch.paged_attention:attend"
_DEFINITION = "kernels.torch.paged_attention:attend_by_definition"


class PagedLimits(NamedTuple):
    """What a GPU's host knows of a step without reading its indices."""

    query_len: int  # the longest run of queries
    seq_len: int  # the longest sequence
    split_size: int | None
    batch_invariant: bool


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
    check_attention(q_THD, k_cache, v_cache, scales, out)
    check_window(window)
    check_sinks(sinks, q_THD)
    sinks = wide_sinks(sinks, q_THD)
    if plan is None:
        check_integers(
            query_start_loc=query_start_loc, seq_lens=seq_lens, block_tables=block_tables
        )
    scale = scale_of(softmax_scale, q_THD)
    if debug:
        resolve(_CHECK_RANGE)(block_tables, seq_lens, v_cache)
    caches, step = (k_cache, v_cache), (query_start_loc, seq_lens, block_tables)
    options = AttendOptions(scale, window, sinks)
    if use_triton(backend, q_THD, has_cpp=True):
        check_rows(k_cache)
        limits = PagedLimits(max_query_len, max_seq_len, split_size, batch_invariant)
        found: Tensor = resolve(_ON_GPU)(q_THD, caches, scales, step, options, limits, out)
        return found
    if q_THD.device.type != "cpu":
        use_native(backend, q_THD)  # C++ is refused
        return _deliver(resolve(_DEFINITION)(q_THD, caches, scales, step, options), out)
    if plan is None:
        num_heads, dtype = q_THD.shape[1], q_THD.dtype
        plan = make_paged_plan(
            *step, cache=v_cache, num_heads=num_heads, dtype=dtype, backend=backend
        )
    if plan.num_tokens != q_THD.shape[0]:
        raise ValueError(f"plan: made for {plan.num_tokens} tokens, q has {q_THD.shape[0]}")
    made_for = "cpp" if isinstance(plan.layout, QueryTiles) else "torch"
    if backend not in ("auto", made_for):
        raise ValueError(f"plan: made for {made_for!r}, must be made for backend={backend!r}")
    with torch.no_grad():
        if made_for == "cpp":
            return _deliver(attend_paged(q_THD, *caches, plan.layout, options), out)
        return _deliver(resolve(_ATTEND)(q_THD, caches, scales, plan.layout, options), out)


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    out: Tensor | None,
) -> None:
    """Queries that fit the caches, and `out` where it is given."""
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
    check_caches("q", q, (k_cache, v_cache), scales)
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or out.stride(2) != 1):
        raise ValueError(
            f"out: {out.dtype} {tuple(out.shape)} must be q's {q.dtype} {tuple(q.shape)}, dense"
        )
