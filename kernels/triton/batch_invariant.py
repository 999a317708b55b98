"""Triton kernels of `batch_invariant` and of `linear(batch_invariant=True)`: plain on purpose. What
makes them slower than cuBLAS makes them right: one tile for every number of rows, and the whole
reduction in one program, in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton import tiles as tune
from kernels.triton.launch import launch
from kernels.triton.tiles import bank

_BLOCK = 4096
_BAND = 8  # row tiles that share a column tile's reads in L2


@triton.jit(do_not_specialize=["num_rows"])  # one kernel for all numbers of rows
def _matmul_kernel(
    a_ptr, b_ptr, y_ptr, num_rows, num_out, num_in,
    stride_am, stride_ak, stride_bk, stride_bn, stride_ym,
    PRECISION: tl.constexpr, BAND: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(num_rows, M), tl.cdiv(num_out, N)
    band, within = tl.program_id(0) // (BAND * tiles_n), tl.program_id(0) % (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    row = (band * BAND + within % height).to(tl.int64) * M + tl.arange(0, M)
    out = (within // height).to(tl.int64) * N + tl.arange(0, N)
    is_row, is_out = row < num_rows, out < num_out
    step = tl.arange(0, K)
    a_tile = a_ptr + row[:, None] * stride_am + step[None, :] * stride_ak
    b_tile = b_ptr + step[:, None] * stride_bk + out[None, :] * stride_bn
    acc = tl.zeros([M, N], dtype=tl.float32)
    total = acc
    for start in range(0, num_in, K):
        is_in = step < num_in - start
        a = tl.load(a_tile, is_row[:, None] & is_in[None, :], other=0.0)
        b = tl.load(b_tile, is_in[:, None] & is_out[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if PRECISION == "ieee":
            total, acc = bank(total, acc, start // K)
        a_tile += K * stride_ak
        b_tile += K * stride_bk
    if PRECISION == "ieee":
        acc += total
    y_tile = y_ptr + row[:, None] * stride_ym + out[None, :]
    tl.store(y_tile, acc.to(y_ptr.dtype.element_ty), is_row[:, None] & is_out[None, :])


@triton.jit
def _log_softmax_kernel(x_ptr, y_ptr, num_cols, stride_x, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    y_ptr += row * num_cols
    cols = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    for start in range(0, num_cols, BLOCK):
        x = tl.load(x_ptr + start + cols, cols < num_cols - start, other=-float("inf"))
        top = tl.maximum(top, x.to(tl.float32))
    highest = tl.max(top, 0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_cols, BLOCK):
        x = tl.load(x_ptr + start + cols, cols < num_cols - start, other=-float("inf"))
        total += tl.exp(x.to(tl.float32) - highest)
    log_total = tl.log(tl.sum(total, 0))
    for start in range(0, num_cols, BLOCK):
        mask = cols < num_cols - start
        x = tl.load(x_ptr + start + cols, mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + start + cols, x - highest - log_total, mask)


@triton.jit
def _log_softmax_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, num_cols, stride_dy, stride_y, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_cols, BLOCK):
        mask = cols < num_cols - start
        sums += tl.load(dy_ptr + row * stride_dy + start + cols, mask, other=0.0)
    total = tl.sum(sums, 0)
    for start in range(0, num_cols, BLOCK):
        mask = cols < num_cols - start
        dy = tl.load(dy_ptr + row * stride_dy + start + cols, mask, other=0.0)
        p = tl.exp(tl.load(y_ptr + row * stride_y + start + cols, mask, other=0.0))
        dx = (dy - p * total).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + row * num_cols + start + cols, dx, mask)


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a · b, into `out` where given, whose rows may be padded."""
    num_rows, num_in = a.shape
    num_out = b.shape[1]
    y = torch.empty(num_rows, num_out, dtype=a.dtype, device=a.device) if out is None else out
    is_fp32 = a.dtype == torch.float32
    tile = tune.BATCH_INVARIANT_FP32 if is_fp32 else tune.BATCH_INVARIANT
    if y.numel():
        launch(_matmul_kernel, (triton.cdiv(num_rows, tile.M) * triton.cdiv(num_out, tile.N),))(
            a, b, y, num_rows, num_out, num_in, *a.stride(), *b.stride(), y.stride(0),
            PRECISION="ieee" if is_fp32 else "tf32", BAND=_BAND,
            M=tile.M, N=tile.N, K=tile.K, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return y


def _block(num_cols: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(max(16, num_cols)))


def log_softmax(x_RV: Tensor) -> Tensor:
    x_RV = x_RV if x_RV.stride(1) == 1 else x_RV.contiguous()
    num_rows, num_cols = x_RV.shape
    y_RV = torch.empty(num_rows, num_cols, dtype=torch.float32, device=x_RV.device)
    if num_rows:
        launch(_log_softmax_kernel, (num_rows,))(
            x_RV, y_RV, num_cols, x_RV.stride(0), BLOCK=_block(num_cols), num_warps=8
        )
    return y_RV


def log_softmax_backward(dy_RV: Tensor, y_RV: Tensor, dtype: torch.dtype) -> Tensor:
    dy_RV = dy_RV if dy_RV.stride(1) == 1 else dy_RV.contiguous()
    num_rows, num_cols = y_RV.shape
    dx_RV = torch.empty(num_rows, num_cols, dtype=dtype, device=y_RV.device)
    if num_rows:
        launch(_log_softmax_backward_kernel, (num_rows,))(
            dy_RV, y_RV, dx_RV, num_cols, dy_RV.stride(0), y_RV.stride(0),
            BLOCK=_block(num_cols), num_warps=8,
        )  # fmt: skip
    return dx_RV
