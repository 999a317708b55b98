"""Triton kernels of attention over the paged cache: `decode` where every sequence has one query,
`attend` for any other step (prefill, chunks, prefix hits and decodes in one launch).

Decoding reads every key and value once and computes next to nothing, so it is bound by memory; with
few sequences, one program a (sequence, key head) would leave most of the GPU idle. Each program
therefore takes a part of the keys of one sequence and key head (all query heads of the group are
rows of its tile) and leaves its part of o and lse2 = log2 Σ exp2; `_merge_kernel` adds the parts,

    o = Σ_s 2^(lse2_s − top) · o_s / Σ_s 2^(lse2_s − top),

one after the other from the first split on. With a fixed split size, a sequence's parts and the
order of their sum depend on its own length alone: that makes decoding batch-invariant. Without one
each sequence divides its own length by the number of splits, on the GPU: the host need know only an
upper bound of the lengths, as in a CUDA graph, and short sequences among long ones are split too.

`attend`: the query heads that share a key head are rows of one tile. A program holds BLOCK_Q
queries x GROUP heads and walks over the pages of its sequence, so a key is read once a group.
Programs are laid out over the packed queries, not over (longest sequence) x (sequences): sequence i
owns the programs from start_i // BLOCK_Q + i on, found by bisection, so a long prompt among many
decodes costs no empty programs and the host need not know the lengths. Only tiles on the diagonal
are masked.

With a window (the last w keys, the query's own included) every tile is masked, and both kernels
begin at the first tile that a query of the program sees. A decode splits what is left from there.

A head's sink (a score of no value) is the first that a row meets; of a split context, that its
first part meets.

Legend: M rows (queries x heads), N keys of a tile, D head_dim padded to a power of two.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.tiles import NUM_MULTIPROCESSORS, meet_sinks, tile, weigh_tile

LOG2_E = math.log2(math.e)
_WAVES = 2  # programs wanted for each multiprocessor
_SHORTEST_SPLIT = 256  # keys; a shorter part costs more to merge than it saves


@triton.jit
def _part_size(length, smallest, num_splits, BY_LENGTH: tl.constexpr, N: tl.constexpr):
    """Keys of one part: `smallest`, or as many as make `num_splits` parts of the length."""
    size = smallest
    if BY_LENGTH:
        size = tl.maximum(smallest, tl.cdiv(tl.cdiv(length, num_splits), N) * N)
    return size


@triton.jit
def _first_tile(position, window, WINDOWED: tl.constexpr, N: tl.constexpr):
    """The first key of the first tile of which the query at `position` sees any."""
    first = 0
    if WINDOWED:
        first = tl.maximum(0, position - window + 1) // N * N
    return first


@triton.jit
def _decode_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, sink_ptr, o_ptr, lse_ptr, len_ptr, table_ptr, k_scale_ptr,
    v_scale_ptr,
    q_token, q_head, o_token, o_head, o_split, lse_seq, lse_head, table_stride, smallest, scale2,
    window, IS_PART: tl.constexpr, BY_LENGTH: tl.constexpr, SCALED: tl.constexpr,
    WINDOWED: tl.constexpr, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, NUM_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    kv_head, rows = group_rows(tl.program_id(0), GROUP, M)
    split, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(len_ptr + seq)
    first = _first_tile(length - 1, window, WINDOWED, N)
    size = _part_size(length - first, smallest, tl.num_programs(1), BY_LENGTH, N)
    # of the last parts it may lie past the end
    begin = (first + split.to(tl.int64) * size).to(tl.int32)
    end = tl.minimum(length, begin + size)
    if IS_PART and begin >= length:
        return
    dims = tl.arange(0, D)
    head = (kv_head * GROUP + rows).to(tl.int64)
    is_row = rows < GROUP
    inside = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = q_ptr + seq * q_token + head[:, None] * q_head + dims[None, :]
    q = tl.load(q_at, inside, other=0.0)
    if SCALED:
        scale2 *= tl.load(k_scale_ptr)
    top = tl.full([M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    if HAS_SINKS:  # noqa: SIM102 (the compiler knows this one, and skips the other)
        if split == 0:
            top, total = meet_sinks(tl.load(sink_ptr + head, is_row, other=0.0), top)
    acc = tl.zeros([M, D], dtype=tl.float32)
    # without a window the part's own last key will do, and `length` need not stay in a register
    last = tl.zeros([M], dtype=tl.int32) + ((length if WINDOWED else end) - 1)
    table_ptr += seq * table_stride
    acc, total, top = attend_pages(
        acc, total, top, q, k_cache_ptr, v_cache_ptr, table_ptr, begin, end, last, kv_head, scale2,
        window, True, WINDOWED, BLOCK_SIZE, NUM_KV, HEAD_DIM, D, N,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SCALED:
        acc *= tl.load(v_scale_ptr)
    o_at = o_ptr + seq * o_token + head[:, None] * o_head + split.to(tl.int64) * o_split
    tl.store(o_at + dims[None, :], acc.to(o_ptr.dtype.element_ty), inside)
    if IS_PART:
        lse_at = lse_ptr + seq * lse_seq + head * lse_head + split
        tl.store(lse_at, top + tl.log2(total), is_row)


@triton.jit
def _merge_kernel(
    part_ptr, lse_ptr, o_ptr, len_ptr, part_seq, part_head, part_split, lse_seq, lse_head, o_token,
    o_head, smallest, num_splits, window, BY_LENGTH: tl.constexpr, WINDOWED: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    head, seq = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, D)
    part_ptr += seq * part_seq + head * part_head
    lse_ptr += seq * lse_seq + head * lse_head
    top, total = -float("inf"), 0.0
    acc = tl.zeros([D], dtype=tl.float32)
    length = tl.load(len_ptr + seq)
    length -= _first_tile(length - 1, window, WINDOWED, N)
    for split in range(0, tl.cdiv(length, _part_size(length, smallest, num_splits, BY_LENGTH, N))):
        lse = tl.load(lse_ptr + split)
        part = tl.load(part_ptr + dims, dims < HEAD_DIM, other=0.0)
        part_ptr += part_split
        new_top = tl.maximum(top, lse)
        shrink, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
        acc = acc * shrink + part * weight
        total = total * shrink + weight
        top = new_top
    out = acc / tl.where(total > 0, total, 1.0)
    o_at = o_ptr + seq * o_token + head * o_head + dims
    tl.store(o_at, out.to(o_ptr.dtype.element_ty), dims < HEAD_DIM)


def choose_split(
    num_seqs: int,
    num_kv: int,
    max_seq_len: int,
    num_splits: int | None,
    split_size: int | None,
    step: int,
) -> tuple[int, int, bool]:
    """(number of splits; keys of each, a multiple of the tile's `step`; whether those are only the
    fewest, and a sequence divides its own length)."""
    if split_size is not None:
        split_size = triton.cdiv(split_size, step) * step
        return triton.cdiv(max(1, max_seq_len), split_size), split_size, False
    if num_splits is not None:
        return num_splits, step, True
    wanted = triton.cdiv(_WAVES * NUM_MULTIPROCESSORS, max(1, num_seqs * num_kv))
    return max(1, min(wanted, max_seq_len // _SHORTEST_SPLIT)), _SHORTEST_SPLIT, True


def decode(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None],
    split: tuple[int | None, int | None],
    out: Tensor,
) -> None:
    """Writes o into `out`; `split` is (num_splits, split_size)."""
    num_seqs, num_heads, head_dim = q_BHD.shape
    num_kv, device = k_cache.shape[2], q_BHD.device
    group, padded = num_heads // num_kv, padded_dim(head_dim)
    t = tile("paged_decode", shape_class(q_BHD.dtype, padded))
    rows = min(t.M, max(16, triton.next_power_of_2(group)))
    most_keys = max_seq_len if window is None else min(max_seq_len, window + t.N - 1)
    limits = (num_seqs, num_kv, most_keys)
    num_splits, smallest, by_length = choose_split(*limits, *split, step=t.N)
    is_part = num_splits > 1
    part, lse = out, None
    part_strides: tuple[int, ...] = (*out.stride()[:2], 0)
    lse_strides: tuple[int, ...] = (0, 0)
    if is_part:
        shape = (num_seqs, num_heads, num_splits)
        part = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
        lse = torch.empty(shape, dtype=torch.float32, device=device)
        part_strides, lse_strides = part.stride()[:3], lse.stride()[:2]
    launch(_decode_kernel, (num_kv * triton.cdiv(group, rows), num_splits, num_seqs))(
        q_BHD, k_cache, v_cache, sinks, part, lse, seq_lens, block_tables, *scales,
        *q_BHD.stride()[:2], *part_strides, *lse_strides, block_tables.stride(0), smallest,
        scale * LOG2_E, window or 0,
        IS_PART=is_part, BY_LENGTH=by_length, SCALED=scales[0] is not None,
        WINDOWED=window is not None, HAS_SINKS=sinks is not None, GROUP=group, NUM_KV=num_kv,
        BLOCK_SIZE=k_cache.shape[1], HEAD_DIM=head_dim, D=padded, M=rows, N=t.N,
        num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
    if is_part:
        launch(_merge_kernel, (num_heads, num_seqs))(
            part, lse, out, seq_lens, *part_strides, *lse_strides, *out.stride()[:2], smallest,
            num_splits, window or 0, BY_LENGTH=by_length, WINDOWED=window is not None,
            HEAD_DIM=head_dim, D=padded, N=t.N, num_warps=1,
        )  # fmt: skip


@triton.jit
def group_rows(index, GROUP: tl.constexpr, M: tl.constexpr):
    """(key head, rows): a program's share of a key head's GROUP rows, M of them where they do not
    all fit one tile. Rows from GROUP on are padding."""
    NUM_PARTS: tl.constexpr = (GROUP + M - 1) // M
    return index // NUM_PARTS, index % NUM_PARTS * M + tl.arange(0, M)


@triton.jit
def load_page_rows(
    keys, end, table_ptr, kv_head, BLOCK_SIZE: tl.constexpr, NUM_KV: tl.constexpr
):  # fmt: skip
    """The cache row of each key: one entry of the block table a page."""
    block = tl.load(table_ptr + keys // BLOCK_SIZE, keys < end, other=0).to(tl.int64)
    return (block * BLOCK_SIZE + keys % BLOCK_SIZE) * NUM_KV + kv_head


@triton.jit
def load_heads(base, rows, is_row, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """[rows, D] of contiguous heads; zeros where `is_row` is false."""
    dims = tl.arange(0, D)
    inside = is_row[:, None]
    if HEAD_DIM != D:
        inside = inside & (dims < HEAD_DIM)[None, :]
    return tl.load(base + rows[:, None] * HEAD_DIM + dims[None, :], inside, other=0.0)


@triton.jit
def attend_pages(
    acc, total, top, q, k_cache_ptr, v_cache_ptr, table_ptr, begin, end, position, kv_head, scale2,
    window, MASKED: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Online softmax of the rows of q over keys begin..end; row m sees keys up to position[m], the
    last `window` of them if WINDOWED."""
    for at in range(begin, end, N):
        keys = at + tl.arange(0, N)
        rows = load_page_rows(keys, end, table_ptr, kv_head, BLOCK_SIZE, NUM_KV)
        k = load_heads(k_cache_ptr, rows, keys < end, HEAD_DIM, D).to(q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = (keys < end)[None, :] & (keys[None, :] <= position[:, None])
            if WINDOWED:
                seen = seen & (keys[None, :] > position[:, None] - window)
            products = tl.where(seen, products, -float("inf"))
        p, shrink, total, top = weigh_tile(total, top, products, scale2, MASKED)
        v = load_heads(v_cache_ptr, rows, keys < end, HEAD_DIM, D).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, total, top


@triton.jit
def _find_sequence(start_ptr, index, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence whose first program is not after `index`."""
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        is_before = tl.load(start_ptr + middle) // BLOCK_Q + middle <= index
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    return low - 1


@triton.jit
def _attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, sink_ptr, o_ptr, start_ptr, len_ptr, table_ptr, k_scale_ptr,
    v_scale_ptr, q_token, q_head, o_token, o_head, table_stride, num_seqs, scale2, window,
    SCALED: tl.constexpr, WINDOWED: tl.constexpr, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr,
    NUM_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_Q: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    kv_head, rows = group_rows(tl.program_id(1), BLOCK_Q * GROUP, M)
    seq = _find_sequence(start_ptr, index, num_seqs, BLOCK_Q)
    start = tl.load(start_ptr + seq)
    num_q = tl.load(start_ptr + seq + 1) - start
    first = (index - (start // BLOCK_Q + seq)) * BLOCK_Q
    if first >= num_q:
        return
    query = first + rows // GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (query < num_q)
    length = tl.load(len_ptr + seq)
    position = length - num_q + query
    token = (start + query).to(tl.int64)
    head = (kv_head * GROUP + rows % GROUP).to(tl.int64)
    dims = tl.arange(0, D)
    inside = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = q_ptr + (token * q_token + head * q_head)[:, None] + dims[None, :]
    q = tl.load(q_at, inside, other=0.0)
    if SCALED:
        scale2 *= tl.load(k_scale_ptr)
    top = tl.full([M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    if HAS_SINKS:
        top, total = meet_sinks(tl.load(sink_ptr + head, is_row, other=0.0), top)
    acc = tl.zeros([M, D], dtype=tl.float32)
    first_position = length - num_q + first
    end = tl.minimum(length, first_position + BLOCK_Q)
    table_ptr += seq.to(tl.int64) * table_stride
    if WINDOWED:
        masked = _first_tile(first_position, window, WINDOWED, N)
    else:
        masked = (first_position + 1) // N * N
        acc, total, top = attend_pages(
            acc, total, top, q, k_cache_ptr, v_cache_ptr, table_ptr, 0, masked, position, kv_head,
            scale2, window, False, WINDOWED, BLOCK_SIZE, NUM_KV, HEAD_DIM, D, N,
        )  # fmt: skip
    acc, total, top = attend_pages(
        acc, total, top, q, k_cache_ptr, v_cache_ptr, table_ptr, masked, end, position, kv_head,
        scale2, window, True, WINDOWED, BLOCK_SIZE, NUM_KV, HEAD_DIM, D, N,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SCALED:
        acc *= tl.load(v_scale_ptr)
    o_at = o_ptr + (token * o_token + head * o_head)[:, None] + dims[None, :]
    tl.store(o_at, acc.to(o_ptr.dtype.element_ty), inside)


def padded_dim(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def shape_class(dtype: torch.dtype, padded: int) -> str:
    """The class of shapes in `tiles.py`: element width and padded head_dim."""
    return f"{'fp32' if dtype == torch.float32 else 'half'}-{min(256, max(64, padded))}"


def attend(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None],
    out: Tensor,
) -> None:
    """Writes o into `out`."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv, num_seqs = k_cache.shape[2], seq_lens.shape[0]
    group = num_heads // num_kv
    t = tile("paged_prefill", shape_class(q_THD.dtype, padded_dim(head_dim)))
    block_q = max(1, t.M // group)
    grid = (num_tokens // block_q + num_seqs, num_kv * triton.cdiv(group, t.M))
    launch(_attention_kernel, grid)(
        q_THD, k_cache, v_cache, sinks, out, query_start_loc, seq_lens, block_tables, *scales,
        *q_THD.stride()[:2], *out.stride()[:2], block_tables.stride(0), num_seqs, scale * LOG2_E,
        window or 0, SCALED=scales[0] is not None, WINDOWED=window is not None,
        HAS_SINKS=sinks is not None, GROUP=group, NUM_KV=num_kv, BLOCK_SIZE=k_cache.shape[1],
        HEAD_DIM=head_dim, D=padded_dim(head_dim), BLOCK_Q=block_q, M=t.M, N=t.N,
        num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
