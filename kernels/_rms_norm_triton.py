"""Triton kernels of `rms_norm`: one program a row forward; backward, a fixed number of programs
each sum their rows' weight gradient, and the partial sums are added in order (no atomics)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUM_PARTIALS = 256


@triton.jit
def _forward_kernel(
    x_ptr, res_ptr, w_ptr, y_ptr, total_ptr, rstd_ptr, num_cols, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < num_cols
    x = tl.load(x_ptr + row * num_cols + cols, mask, other=0.0)
    if HAS_RESIDUAL:
        res = tl.load(res_ptr + row * num_cols + cols, mask, other=0.0)
        x = (x.to(tl.float32) + res.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(total_ptr + row * num_cols + cols, x, mask)
    x = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / num_cols + eps)
    w = tl.load(w_ptr + cols, mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * num_cols + cols, (x * rstd * w).to(y_ptr.dtype.element_ty), mask)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, partial_ptr, num_rows, num_cols, rows_each,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < num_cols
    w = tl.load(w_ptr + cols, mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    first = program * rows_each
    for row in range(first, tl.minimum(first + rows_each, num_rows)):
        x = tl.load(x_ptr + row * num_cols + cols, mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * num_cols + cols, mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normed = x * rstd
        g = dy * w
        dx = (g - normed * (tl.sum(g * normed, 0) / num_cols)) * rstd
        tl.store(dx_ptr + row * num_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask)
        dw += dy * normed
    tl.store(partial_ptr + program * num_cols + cols, dw, mask)


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
    if num_rows:
        _forward_kernel[(num_rows,)](
            x, x if residual is None else residual.contiguous(), weight, y, total, rstd,
            num_cols, eps, HAS_RESIDUAL=residual is not None,
            BLOCK=triton.next_power_of_2(num_cols),
        )  # fmt: skip
    return y, total, rstd


def backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dy, x = dy.contiguous(), x.contiguous()
    num_cols = x.shape[-1]
    num_rows = x.numel() // num_cols
    dx = torch.empty_like(x)
    rows_each = max(1, triton.cdiv(num_rows, _NUM_PARTIALS))
    num_programs = triton.cdiv(num_rows, rows_each)
    partial = torch.empty(num_programs, num_cols, dtype=torch.float32, device=x.device)
    if num_rows:
        _backward_kernel[(num_programs,)](
            dy, x, weight, rstd, dx, partial, num_rows, num_cols, rows_each,
            BLOCK=triton.next_power_of_2(num_cols),
        )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype)
