"""Triton kernel of `reshape_and_cache`: a program copies the rows of a few tokens, all key heads of
k and of v. A row is head_dim · heads contiguous elements on both sides, so it moves in 16-byte
pieces. With scales, elements are divided by theirs and rounded to the cache's fp8."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.tiles import tile


@triton.jit
def _store_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_scale_ptr, v_scale_ptr, num_tokens,
    k_token, v_token, SCALED: tl.constexpr, ROW: tl.constexpr, COLS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slots = tl.load(slot_ptr + tokens, tokens < num_tokens, other=-1).to(tl.int64)
    cols = tl.arange(0, COLS)[None, :]
    inside = (slots >= 0)[:, None] & (cols < ROW)
    source = tokens.to(tl.int64)[:, None]
    k = tl.load(k_ptr + source * k_token + cols, inside, other=0.0)
    v = tl.load(v_ptr + source * v_token + cols, inside, other=0.0)
    if SCALED:
        k = k.to(tl.float32) / tl.load(k_scale_ptr)
        v = v.to(tl.float32) / tl.load(v_scale_ptr)
    target = slots[:, None] * ROW + cols
    tl.store(k_cache_ptr + target, k.to(k_cache_ptr.dtype.element_ty), inside)
    tl.store(v_cache_ptr + target, v.to(v_cache_ptr.dtype.element_ty), inside)


def store(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    row = k_TKD.shape[1] * k_TKD.shape[2]
    k_TR, v_TR = (_rows(x, row) for x in (k_TKD, v_TKD))
    cols = triton.next_power_of_2(row)
    t = tile("store_kv", "all")
    tokens = max(1, t.M // cols)
    if k_TR.shape[0]:
        launch(_store_kernel, (triton.cdiv(k_TR.shape[0], tokens),))(
            k_TR, v_TR, k_cache, v_cache, slots_T, k_scale, v_scale, k_TR.shape[0],
            k_TR.stride(0), v_TR.stride(0), SCALED=k_scale is not None, ROW=row, COLS=cols,
            TOKENS=tokens, num_warps=t.num_warps,
        )  # fmt: skip


def _rows(x_TKD: Tensor, row: int) -> Tensor:
    """A view where a token's heads follow each other, as slices of a fused projection do."""
    x_TR = x_TKD.reshape(x_TKD.shape[0], row)
    return x_TR if x_TR.stride(1) == 1 else x_TR.contiguous(memory_format=torch.contiguous_format)
