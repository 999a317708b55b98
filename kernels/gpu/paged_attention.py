"""The host's part of paged_attention.py's Triton path: a step's indices beside the queries, and the
choice between the kernel of decoding, which splits contexts over programs, and that of prefill. The
kernels are in `triton/paged_attention.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backend import (
    Backend,
    check_integers,
    check_sinks,
    check_window,
    ints,
    resolve,
    use_triton,
    wide_sinks,
)
from kernels.cpp.ops import AttendOptions
from kernels.kv_cache import check_rows
from kernels.paged.paged_attention import PagedLimits, check_attention, paged_attention

_DECODE = "kernels.triton.paged_attention:decode"
_PREFILL = "kernels.triton.paged_attention:attend"

Caches = tuple[Tensor, Tensor]
Scales = tuple[Tensor | None, Tensor | None]


def attend(
    q_THD: Tensor,
    caches: Caches,
    scales: Scales,
    step: tuple[Tensor | Sequence[int], Tensor | Sequence[int], Tensor],
    options: AttendOptions,
    limits: PagedLimits,
    out: Tensor | None,
) -> Tensor:
    """`paged_attention` of a step (query_start_loc, seq_lens, block_tables)."""
    starts, lens, tables = _device_step(*step, q_THD)
    if starts.shape[0] != lens.shape[0] + 1:
        raise ValueError(
            f"query_start_loc: shape {tuple(starts.shape)} must be seq_lens's + 1, "
            f"{lens.shape[0] + 1}"
        )
    is_decode = limits.query_len == 1 and q_THD.shape[0] == lens.shape[0]
    if is_decode and not limits.batch_invariant:
        split = (None, limits.split_size)
        places = (tables, lens, limits.seq_len)
        return _decode(q_THD, caches, scales, places, options, split, out)
    out = _out_like(q_THD, out)
    prefill = resolve(_PREFILL)
    if q_THD.shape[0]:
        q = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
        scale, window, sinks = options
        prefill(q, *caches, starts, lens, tables, scale, window, sinks, scales, out)
    return out


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
    check_attention(q_BHD, k_cache, v_cache, scales, out)
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
    options = AttendOptions(scale, window, sinks)
    split = (num_splits, split_size)
    return _decode(
        q_BHD, (k_cache, v_cache), scales, (tables, lens, max_seq_len), options, split, out
    )


def _decode(q, caches, scales, places, options, split, out) -> Tensor:
    """`places` are (block_tables, seq_lens, the longest of them)."""
    out = _out_like(q, out)
    decode = resolve(_DECODE)
    if q.shape[0]:
        q = q if q.stride(2) == 1 else q.contiguous()
        decode(q, *caches, *places, *options, scales, split, out)
    return out


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
