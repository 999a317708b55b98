"""Triton kernels over the paged cache: writing new keys, and one attention body for prefill,
chunks, prefix hits and decoding.

A program takes one sequence, one key head and a run of queries; the query heads that share the key
head are rows of the same tile, so keys are read once a group. Left out: splitting one long context
over programs for decoding (comes with the GPU benchmarks).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_N = 64


@triton.jit
def _store_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, row, k_stride, v_stride, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        cols = tl.arange(0, BLOCK)
        mask = cols < row
        k = tl.load(k_ptr + token * k_stride + cols, mask)
        v = tl.load(v_ptr + token * v_stride + cols, mask)
        tl.store(k_cache_ptr + slot * row + cols, k, mask)
        tl.store(v_cache_ptr + slot * row + cols, v, mask)


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    row = k.shape[1] * k.shape[2]
    k, v = k.reshape(-1, row), v.reshape(-1, row)
    if k.shape[0]:
        _store_kernel[(k.shape[0],)](
            k, v, k_cache, v_cache, slots, row, k.stride(0), v.stride(0),
            BLOCK=triton.next_power_of_2(row),
        )  # fmt: skip


@triton.jit
def _attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, o_ptr, start_ptr, len_ptr, table_ptr, table_stride,
    num_heads, num_kv, head_dim, block_size, scale,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    seq, kv_head = tl.program_id(1), tl.program_id(2)
    start = tl.load(start_ptr + seq)
    num_queries = tl.load(start_ptr + seq + 1) - start
    first = tl.program_id(0) * BLOCK_Q
    if first < num_queries:
        length = tl.load(len_ptr + seq)
        rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        query = first + rows // GROUP
        is_row = (rows < BLOCK_Q * GROUP) & (query < num_queries)
        head = kv_head * GROUP + rows % GROUP
        at = ((start + query).to(tl.int64) * num_heads + head)[:, None] * head_dim + dims[None, :]
        tile = is_row[:, None] & (dims < head_dim)[None, :]
        q = tl.load(q_ptr + at, tile, other=0.0)
        position = length - num_queries + query
        top = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        end = tl.minimum(length, length - num_queries + first + BLOCK_Q)
        for begin in range(0, end, BLOCK_N):
            keys = begin + tl.arange(0, BLOCK_N)
            is_key = keys < end
            block = tl.load(table_ptr + seq * table_stride + keys // block_size, is_key, other=0)
            slot = block.to(tl.int64) * block_size + keys % block_size
            source = (slot * num_kv + kv_head)[:, None] * head_dim + dims[None, :]
            inside = is_key[:, None] & (dims < head_dim)[None, :]
            k = tl.load(k_cache_ptr + source, inside, other=0.0)
            v = tl.load(v_cache_ptr + source, inside, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            visible = is_key[None, :] & (keys[None, :] <= position[:, None])
            scores = tl.where(visible, scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            # a padding row before its first key: keep exp's argument finite
            safe_top = tl.where(new_top == -float("inf"), 0.0, new_top)
            shrink = tl.exp(top - safe_top)
            p = tl.exp(scores - safe_top[:, None])
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            top = new_top
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(o_ptr + at, out.to(o_ptr.dtype.element_ty), tile)


def attend(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    max_query_len: int,
    scale: float,
) -> Tensor:
    q_THD = q_THD.contiguous()
    _, num_heads, head_dim = q_THD.shape
    num_kv, block_size = k_cache.shape[2], k_cache.shape[1]
    group = num_heads // num_kv
    block_q = 1 if max_query_len == 1 else max(1, 64 // triton.next_power_of_2(group))
    out = torch.empty_like(q_THD)
    grid = (triton.cdiv(max_query_len, block_q), seq_lens.shape[0], num_kv)
    _attention_kernel[grid](
        q_THD, k_cache, v_cache, out, query_start_loc, seq_lens, block_tables,
        block_tables.stride(0), num_heads, num_kv, head_dim, block_size, scale,
        GROUP=group, BLOCK_Q=block_q,
        BLOCK_M=max(16, triton.next_power_of_2(block_q * group)), BLOCK_N=_BLOCK_N,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
    )  # fmt: skip
    return out
