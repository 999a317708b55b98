"""Triton kernel of the backward pass of `gather_rows`, and of `add_rows_`: a program adds up one
row's copies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.tiles import tile


@triton.jit
def _sum_rows_kernel(
    dy_ptr, dx_ptr, start_ptr, target_ptr, num_cols, ACCUMULATE: tl.constexpr, N: tl.constexpr
):
    row, cols = tl.program_id(0), tl.program_id(1) * N + tl.arange(0, N)
    first, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    if ACCUMULATE and first == end:
        return
    at = dx_ptr + row.to(tl.int64) * num_cols + cols
    acc = tl.zeros([N], dtype=tl.float32)
    if ACCUMULATE:
        acc += tl.load(at, cols < num_cols, other=0.0)
    for i in range(first, end):
        target = tl.load(target_ptr + i).to(tl.int64)
        acc += tl.load(dy_ptr + target * num_cols + cols, cols < num_cols, other=0.0)
    tl.store(at, acc.to(dx_ptr.dtype.element_ty), cols < num_cols)


def sum_rows(dy: Tensor, starts: Tensor, targets: Tensor, total: Tensor | None = None) -> Tensor:
    """Each row's sum, in dy's dtype, or added to a contiguous `total`."""
    dy = dy.contiguous()
    num_rows, num_cols = starts.shape[0] - 1, dy[0].numel() if dy.shape[0] else 0
    dx = total
    if dx is None:
        dx = torch.empty(num_rows, *dy.shape[1:], dtype=dy.dtype, device=dy.device)
    if not dx.numel() or not dy.shape[0]:
        return dx.zero_() if total is None else total
    t = tile("sum_rows", "all")
    launch(_sum_rows_kernel, (num_rows, triton.cdiv(num_cols, t.N)))(
        dy,
        dx,
        starts,
        targets,
        num_cols,
        ACCUMULATE=total is not None,
        N=t.N,
        num_warps=t.num_warps,
    )
    return dx
