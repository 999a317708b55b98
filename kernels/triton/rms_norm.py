"""Triton kernels of `rms_norm`. Forward: a program normalises a tile of whole rows. Backward: a
fixed number of programs walk over their rows, keep the weight's gradient in registers and write
one partial sum each; `_partials` adds those in order (no atomics).

Rows too wide for that (x, dy, the weight and its gradient must fit the registers) go backward in
two passes: one for each row's mean(g·n), then strips of columns, which need nothing else of their
row. That reads x and dy twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.tiles import NUM_PARTIALS, row_tile, sum_partials

_STAGES = 3
_WIDEST = 8192  # columns whose gradient one program keeps
_STRIP = 2048


@triton.jit
def rms_norm_forward_kernel(
    x_ptr, res_ptr, w_ptr, y_ptr, total_ptr, rstd_ptr, num_rows, num_cols, eps,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (cols < num_cols)
    at = rows * num_cols + cols
    w = tl.load(w_ptr + cols, cols < num_cols, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask, other=0.0)
    if HAS_RESIDUAL:
        res = tl.load(res_ptr + at, mask, other=0.0)
        x = (x.to(tl.float32) + res.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(total_ptr + at, x, mask)
    x = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / num_cols + eps)
    tl.store(y_ptr + at, (x * rstd * w).to(y_ptr.dtype.element_ty), mask)
    tl.store(rstd_ptr + rows, rstd, rows < num_rows)


@triton.jit
def rms_norm_mean_kernel(dy_ptr, x_ptr, w_ptr, rstd_ptr, mean_ptr, num_cols, BLOCK: tl.constexpr):
    """mean(g · n) of a row."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * num_cols + cols, cols < num_cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * num_cols + cols, cols < num_cols, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + cols, cols < num_cols, other=0.0).to(tl.float32)
        total += dy * w * x
    tl.store(mean_ptr + row, tl.sum(total, 0) * tl.load(rstd_ptr + row) / num_cols)


@triton.jit
def rms_norm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, mean_ptr, dtotal_ptr, dx_ptr, partial_ptr, num_rows, num_cols,
    rows_each, HAS_DTOTAL: tl.constexpr, IN_STRIPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]
    out_cols = tl.arange(0, BLOCK)
    if IN_STRIPS:
        cols += tl.program_id(1) * BLOCK
        out_cols += tl.program_id(1) * BLOCK
    w = tl.load(w_ptr + cols, cols < num_cols, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    first = program * rows_each
    for start in tl.range(first, first + rows_each, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)[:, None]
        mask = (rows < num_rows) & (cols < num_cols)
        at = rows * num_cols + cols
        x = tl.load(x_ptr + at, mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, rows < num_rows, other=0.0)
        normed = x * rstd
        g = dy * w
        if IN_STRIPS:
            mean = tl.load(mean_ptr + rows, rows < num_rows, other=0.0)
        else:
            mean = tl.sum(g * normed, 1, keep_dims=True) / num_cols
        dx = (g - normed * mean) * rstd
        if HAS_DTOTAL:
            dx += tl.load(dtotal_ptr + at, mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask)
        dw += dy * normed
    tl.store(partial_ptr + program * num_cols + out_cols, tl.sum(dw, 0), out_cols < num_cols)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, x + residual, rstd); without a residual the second is x."""
    x = x.contiguous()
    num_cols = x.shape[-1]
    num_rows = x.numel() // num_cols
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    tile = row_tile(num_cols)
    if num_rows:
        launch(rms_norm_forward_kernel, (triton.cdiv(num_rows, tile.rows),))(
            x, x if residual is None else residual.contiguous(), weight.contiguous(), y, total,
            rstd, num_rows, num_cols, eps, HAS_RESIDUAL=residual is not None, ROWS=tile.rows,
            BLOCK=tile.block, num_warps=tile.num_warps,
        )  # fmt: skip
    return y, total, rstd


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dtotal: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(dx, dw); `dtotal` is the gradient that reaches x past the norm, added to dx."""
    dy, x = dy.contiguous(), x.contiguous()
    num_cols = x.shape[-1]
    num_rows = x.numel() // num_cols
    dx = torch.empty_like(x)
    is_wide = num_cols > _WIDEST
    tile = row_tile(_STRIP if is_wide else num_cols)
    rows_each = triton.cdiv(triton.cdiv(num_rows, NUM_PARTIALS), tile.rows) * tile.rows
    num_programs = triton.cdiv(num_rows, max(1, rows_each))
    partial = torch.empty(num_programs, num_cols, dtype=torch.float32, device=x.device)
    weight, mean = weight.contiguous(), rstd
    if num_rows and is_wide:
        mean = torch.empty_like(rstd)
        launch(rms_norm_mean_kernel, (num_rows,))(
            dy, x, weight, rstd, mean, num_cols, BLOCK=tile.block, num_warps=tile.num_warps
        )
    if num_rows:
        strips = triton.cdiv(num_cols, tile.block)
        launch(rms_norm_backward_kernel, (num_programs, strips))(
            dy, x, weight, rstd, mean, x if dtotal is None else dtotal.contiguous(), dx, partial,
            num_rows, num_cols, rows_each, HAS_DTOTAL=dtotal is not None, IN_STRIPS=is_wide,
            ROWS=tile.rows, BLOCK=tile.block, STAGES=_STAGES, num_warps=tile.num_warps,
        )  # fmt: skip
    return dx, sum_partials(partial, weight.dtype)
