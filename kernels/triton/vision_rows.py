"""Triton kernels of `layer_norm` and `gelu`. The norm's are built as those of `rms_norm`: forward a
program normalises a tile of whole rows; backward a fixed number of programs walk over their rows
and keep the gradients of weight and bias in registers, whose partial sums are added in order. Rows
too wide for that go backward in two passes: one for each row's two means, then strips of columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.tiles import NUM_PARTIALS, row_tile, sum_partials

_STAGES = 3
_WIDEST = 8192  # columns whose gradients one program keeps
_STRIP = 2048
_BLOCK = 1024  # elements of a program of `gelu`


@triton.jit
def layer_norm_forward_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, num_rows, num_cols, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (cols < num_cols)
    at = rows * num_cols + cols
    w = tl.load(w_ptr + cols, cols < num_cols, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + cols, cols < num_cols, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1, keep_dims=True) / num_cols
    centred = tl.where(cols < num_cols, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) / num_cols + eps)
    tl.store(y_ptr + at, (centred * rstd * w + b).to(y_ptr.dtype.element_ty), mask)
    tl.store(mean_ptr + rows, mean, rows < num_rows)
    tl.store(rstd_ptr + rows, rstd, rows < num_rows)


@triton.jit
def layer_norm_means_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, means_ptr, num_rows, num_cols, BLOCK: tl.constexpr
):
    """mean(g) and mean(g · n) of a row, [2, rows]."""
    row = tl.program_id(0).to(tl.int64)
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    g_total = tl.zeros([BLOCK], dtype=tl.float32)
    gn_total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * num_cols + cols, cols < num_cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * num_cols + cols, cols < num_cols, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + cols, cols < num_cols, other=0.0).to(tl.float32)
        g = dy * w
        g_total += g
        gn_total += g * (x - mean)
    tl.store(means_ptr + row, tl.sum(g_total, 0) / num_cols)
    tl.store(means_ptr + num_rows + row, tl.sum(gn_total, 0) * rstd / num_cols)


@triton.jit
def layer_norm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, means_ptr, dx_ptr, dw_ptr, db_ptr, num_rows,
    num_cols, rows_each, IN_STRIPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]
    out_cols = tl.arange(0, BLOCK)
    if IN_STRIPS:
        cols += tl.program_id(1) * BLOCK
        out_cols += tl.program_id(1) * BLOCK
    w = tl.load(w_ptr + cols, cols < num_cols, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    db = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    first = program * rows_each
    for start in tl.range(first, first + rows_each, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)[:, None]
        is_row = rows < num_rows
        mask = is_row & (cols < num_cols)
        at = rows * num_cols + cols
        x = tl.load(x_ptr + at, mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, is_row, other=0.0)
        rstd = tl.load(rstd_ptr + rows, is_row, other=0.0)
        normed = (x - mean) * rstd
        g = dy * w
        if IN_STRIPS:
            g_mean = tl.load(means_ptr + rows, is_row, other=0.0)
            gn_mean = tl.load(means_ptr + num_rows + rows, is_row, other=0.0)
        else:
            g_mean = tl.sum(g, 1, keep_dims=True) / num_cols
            gn_mean = tl.sum(g * normed, 1, keep_dims=True) / num_cols
        dx = (g - g_mean - normed * gn_mean) * rstd
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask)
        dw += dy * normed
        db += dy
    out = program * num_cols + out_cols
    tl.store(dw_ptr + out, tl.sum(dw, 0), out_cols < num_cols)
    tl.store(db_ptr + out, tl.sum(db, 0), out_cols < num_cols)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, 1 / deviation)."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    num_cols = x.shape[-1]
    num_rows = x.numel() // num_cols
    y = torch.empty_like(x)
    mean, rstd = (
        torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device) for _ in range(2)
    )
    tile = row_tile(num_cols)
    if num_rows:
        launch(layer_norm_forward_kernel, (triton.cdiv(num_rows, tile.rows),))(
            x, weight, bias, y, mean, rstd, num_rows, num_cols, eps, ROWS=tile.rows,
            BLOCK=tile.block, num_warps=tile.num_warps,
        )  # fmt: skip
    return y, mean, rstd


def layer_norm_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias)."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    num_cols = x.shape[-1]
    num_rows = x.numel() // num_cols
    dx = torch.empty_like(x)
    is_wide = num_cols > _WIDEST
    tile = row_tile(_STRIP if is_wide else num_cols)
    rows_each = triton.cdiv(triton.cdiv(num_rows, NUM_PARTIALS), tile.rows) * tile.rows
    num_programs = triton.cdiv(num_rows, max(1, rows_each))
    dw, db = (
        torch.empty(num_programs, num_cols, dtype=torch.float32, device=x.device) for _ in range(2)
    )
    means = mean
    if num_rows and is_wide:
        means = torch.empty(2, num_rows, dtype=torch.float32, device=x.device)
        launch(layer_norm_means_kernel, (num_rows,))(
            dy, x, weight, mean, rstd, means, num_rows, num_cols, BLOCK=tile.block,
            num_warps=tile.num_warps,
        )  # fmt: skip
    if num_rows:
        strips = triton.cdiv(num_cols, tile.block)
        launch(layer_norm_backward_kernel, (num_programs, strips))(
            dy, x, weight, mean, rstd, means, dx, dw, db, num_rows, num_cols, rows_each,
            IN_STRIPS=is_wide, ROWS=tile.rows, BLOCK=tile.block, STAGES=_STAGES,
            num_warps=tile.num_warps,
        )  # fmt: skip
    return dx, sum_partials(dw, weight.dtype), sum_partials(db, weight.dtype)


@triton.jit
def share_below(x, IS_TANH: tl.constexpr):
    """(Φ(x), Φ'(x)) of fp32 x."""
    if IS_TANH:
        square = x * x
        share = tl.sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * square))
        rest = tl.sigmoid(-x * (1.5957691216057308 + 0.07135481627260025 * square))
        return share, share * rest * (1.5957691216057308 + 0.21406444881780076 * square)
    share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    return share, tl.exp(-0.5 * x * x) * 0.3989422804014327


@triton.jit
def gelu_forward_kernel(x_ptr, y_ptr, size, IS_TANH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < size, other=0.0).to(tl.float32)
    share, _ = share_below(x, IS_TANH)
    tl.store(y_ptr + at, (x * share).to(y_ptr.dtype.element_ty), at < size)


@triton.jit
def gelu_backward_kernel(dy_ptr, x_ptr, dx_ptr, size, IS_TANH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < size, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, at < size, other=0.0).to(tl.float32)
    share, slope = share_below(x, IS_TANH)
    tl.store(dx_ptr + at, (dy * (share + x * slope)).to(dx_ptr.dtype.element_ty), at < size)


def gelu(x: Tensor, is_tanh: bool) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        launch(gelu_forward_kernel, (triton.cdiv(x.numel(), _BLOCK),))(
            x, y, x.numel(), IS_TANH=is_tanh, BLOCK=_BLOCK
        )
    return y


def gelu_gradient(dy: Tensor, x: Tensor, is_tanh: bool) -> Tensor:
    """The gradient by `gelu`'s argument."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    if x.numel():
        launch(gelu_backward_kernel, (triton.cdiv(x.numel(), _BLOCK),))(
            dy, x, dx, x.numel(), IS_TANH=is_tanh, BLOCK=_BLOCK
        )
    return dx
