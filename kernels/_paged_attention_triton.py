"""Triton kernel of `paged_attention`: one body for prefill, chunks, prefix hits and decodes in one
launch. (A step of decodes alone takes `_paged_decode_triton.py`, which splits long contexts.)

The query heads that share a key head are rows of one tile: a program holds BLOCK_Q queries x GROUP
heads and walks over the pages of its sequence, so a key is read once a group. Programs are laid out
over the packed queries, not over (longest sequence) x (sequences): sequence i owns the programs
from start_i // BLOCK_Q + i on, found by bisection, so a long prompt among many decodes costs no
empty programs and the host need not know the lengths.

Only tiles on the diagonal are masked. Left out: windows, sinks.

Legend: M rows (queries x heads), N keys of a tile, D head_dim padded to a power of two.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._launch import launch
from kernels._online_softmax_triton import weigh_tile
from kernels._tune import tile

LOG2_E = math.log2(math.e)


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
    MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Online softmax of the rows of q over keys begin..end; row m sees keys up to position[m]."""
    for at in range(begin, end, N):
        keys = at + tl.arange(0, N)
        rows = load_page_rows(keys, end, table_ptr, kv_head, BLOCK_SIZE, NUM_KV)
        k = load_heads(k_cache_ptr, rows, keys < end, HEAD_DIM, D).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2
        if MASKED:
            seen = (keys < end)[None, :] & (keys[None, :] <= position[:, None])
            scores = tl.where(seen, scores, -float("inf"))
        p, shrink, total, top = weigh_tile(total, top, scores, MASKED)
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
    q_ptr, k_cache_ptr, v_cache_ptr, o_ptr, start_ptr, len_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
    q_token, q_head, o_token, o_head, table_stride, num_seqs, scale2,
    SCALED: tl.constexpr, GROUP: tl.constexpr, NUM_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
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
    acc = tl.zeros([M, D], dtype=tl.float32)
    first_position = length - num_q + first
    full = (first_position + 1) // N * N
    end = tl.minimum(length, first_position + BLOCK_Q)
    table_ptr += seq.to(tl.int64) * table_stride
    acc, total, top = attend_pages(
        acc, total, top, q, k_cache_ptr, v_cache_ptr, table_ptr, 0, full, position, kv_head, scale2,
        False, BLOCK_SIZE, NUM_KV, HEAD_DIM, D, N,
    )  # fmt: skip
    acc, total, top = attend_pages(
        acc, total, top, q, k_cache_ptr, v_cache_ptr, table_ptr, full, end, position, kv_head,
        scale2, True, BLOCK_SIZE, NUM_KV, HEAD_DIM, D, N,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SCALED:
        acc *= tl.load(v_scale_ptr)
    o_at = o_ptr + (token * o_token + head * o_head)[:, None] + dims[None, :]
    tl.store(o_at, acc.to(o_ptr.dtype.element_ty), inside)


def padded_dim(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def shape_class(dtype: torch.dtype, padded: int) -> str:
    """Of `_tune.py`: element width and padded head_dim."""
    return f"{'fp32' if dtype == torch.float32 else 'half'}-{min(256, max(64, padded))}"


def attend(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
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
        q_THD, k_cache, v_cache, out, query_start_loc, seq_lens, block_tables, *scales,
        *q_THD.stride()[:2], *out.stride()[:2], block_tables.stride(0), num_seqs, scale * LOG2_E,
        SCALED=scales[0] is not None, GROUP=group, NUM_KV=num_kv, BLOCK_SIZE=k_cache.shape[1],
        HEAD_DIM=head_dim, D=padded_dim(head_dim), BLOCK_Q=block_q, M=t.M, N=t.N,
        num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
