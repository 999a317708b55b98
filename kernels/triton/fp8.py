"""Triton kernels of `fp8`: quantisation in one pass over a group, and the scaled matmul."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton import tiles as tune
from kernels.triton.launch import launch

_FP8_MAX = tl.constexpr(448.0)
_SMALLEST_MAX = tl.constexpr(1e-12)
_ROW_BLOCK = 4096
_GROUP_ROWS = 16  # rows of 1 x 128 groups a program takes


@triton.jit
def _quantize(x, scale):
    """Multiplies by the correctly rounded reciprocal: the reference's bits."""
    x = x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.minimum(tl.maximum(x, -_FP8_MAX), _FP8_MAX).to(tl.float8e4nv)


@triton.jit
def _scale_of(largest):
    largest = tl.maximum(largest, _SMALLEST_MAX)
    return tl.div_rn(largest, tl.full(largest.shape, _FP8_MAX, tl.float32))


@triton.jit
def _quantize_row_kernel(x_ptr, q_ptr, scale_ptr, num_cols, stride_x, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_cols, BLOCK):
        mask = cols < num_cols - start
        x = tl.load(x_ptr + row * stride_x + start + cols, mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    scale = _scale_of(tl.max(largest, 0, keep_dims=True))
    for start in range(0, num_cols, BLOCK):
        mask = cols < num_cols - start
        x = tl.load(x_ptr + row * stride_x + start + cols, mask, other=0.0).to(tl.float32)
        tl.store(q_ptr + row * num_cols + start + cols, _quantize(x, scale), mask)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)


@triton.jit
def _quantize_group_kernel(
    x_ptr, q_ptr, scale_ptr, num_rows, num_cols, num_groups, stride_x,
    ROWS: tl.constexpr, COLS: tl.constexpr, ONE_SCALE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    col = group * COLS + tl.arange(0, COLS)
    mask = (row < num_rows)[:, None] & (col < num_cols)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_x + col[None, :], mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 1, keep_dims=True)
    if ONE_SCALE:
        largest = tl.max(largest, 0, keep_dims=True)
    scale = _scale_of(largest)
    tl.store(q_ptr + row[:, None] * num_cols + col[None, :], _quantize(x, scale), mask)
    if ONE_SCALE:
        one = tl.arange(0, 1)
        place = tl.program_id(0).to(tl.int64) * num_groups + group + one[:, None] + one[None, :]
        tl.store(scale_ptr + place, scale)
    else:
        place = (row * num_groups + group)[:, None]
        tl.store(scale_ptr + place, scale, (row < num_rows)[:, None])


@triton.jit
def _linear_kernel(
    x_ptr, w_ptr, y_ptr, x_scale_ptr, w_scale_ptr, num_rows, num_out, num_in, stride_x, stride_w,
    num_groups, BY_BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * M + tl.arange(0, M)
    out = tl.program_id(0) * N + tl.arange(0, N)
    is_row, is_out = row < num_rows, out < num_out
    step = tl.arange(0, K)
    x_tile = x_ptr + row[:, None] * stride_x + step[None, :]
    w_tile = w_ptr + out.to(tl.int64)[None, :] * stride_w + step[:, None]
    acc = tl.zeros([M, N], dtype=tl.float32)
    for group in range(0, tl.cdiv(num_in, K)):
        is_in = step < num_in - group * K
        x = tl.load(x_tile, is_row[:, None] & is_in[None, :], other=0.0)
        w = tl.load(w_tile, is_in[:, None] & is_out[None, :], other=0.0)
        if BY_BLOCK:
            x_scale = tl.load(x_scale_ptr + row * num_groups + group, is_row, other=0.0)
            w_scale = tl.load(
                w_scale_ptr + (out // K).to(tl.int64) * num_groups + group, is_out, other=0.0
            )
            acc += tl.dot(x, w) * x_scale[:, None] * w_scale[None, :]
        else:
            acc = tl.dot(x, w, acc, max_num_imprecise_acc=K)
        x_tile += K
        w_tile += K
    if not BY_BLOCK:
        acc *= tl.load(x_scale_ptr + row, is_row, other=0.0)[:, None]
        acc *= tl.load(w_scale_ptr + out, is_out, other=0.0)[None, :]
    y_tile = y_ptr + row[:, None] * num_out + out[None, :]
    tl.store(y_tile, acc.to(y_ptr.dtype.element_ty), is_row[:, None] & is_out[None, :])


def quantize(x: Tensor, rows: int, cols: int, by_row: bool) -> tuple[Tensor, Tensor]:
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, num_cols = x.shape
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    num_groups = triton.cdiv(num_cols, cols)
    shape = (num_rows,) if by_row else (triton.cdiv(num_rows, rows), num_groups)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    if not scale.numel():
        return q, scale
    if by_row:
        block = min(_ROW_BLOCK, triton.next_power_of_2(max(16, num_cols)))
        launch(_quantize_row_kernel, (num_rows,))(x, q, scale, num_cols, x.stride(0), BLOCK=block)
    else:
        rows_each = _GROUP_ROWS if rows == 1 else rows
        launch(_quantize_group_kernel, (triton.cdiv(num_rows, rows_each), num_groups))(
            x, q, scale, num_rows, num_cols, num_groups, x.stride(0),
            ROWS=rows_each, COLS=cols, ONE_SCALE=rows > 1, num_warps=4 if rows == 1 else 8,
        )  # fmt: skip
    return q, scale


def linear(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    x, w = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, w))
    num_rows, num_in = x.shape
    num_out = w.shape[0]
    y = torch.empty(num_rows, num_out, dtype=out_dtype, device=x.device)
    by_block = x_scale.dim() == 2
    tile = tune.for_rows(tune.FP8, num_rows)
    if y.numel():
        grid = (triton.cdiv(num_out, tile.N), triton.cdiv(num_rows, tile.M))
        launch(_linear_kernel, grid)(
            x, w, y, x_scale.contiguous(), w_scale.contiguous(), num_rows, num_out, num_in,
            x.stride(0), w.stride(0), triton.cdiv(num_in, tile.K),
            BY_BLOCK=by_block, M=tile.M, N=tile.N, K=tile.K,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return y
