"""Adds the partial sums of a weight gradient in a fixed order: the second pass of every backward
kernel here that reduces over rows. Atomics would add in the order programs happen to finish."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._launch import launch

_ROWS, _COLS = 32, 32


@triton.jit
def _sum_partials_kernel(
    partial_ptr, out_ptr, num_partials, num_cols, ROWS: tl.constexpr, COLS: tl.constexpr
):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    total = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for start in range(0, num_partials, ROWS):
        rows = tl.arange(0, ROWS)[:, None]
        mask = (rows < num_partials - start) & (cols < num_cols)
        first = partial_ptr + tl.cast(start, tl.int64) * num_cols
        total += tl.load(first + rows * num_cols + cols, mask, other=0.0)
    out_cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    out = tl.sum(total, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_cols, out, out_cols < num_cols)


def sum_partials(partial_PC: Tensor, dtype: torch.dtype) -> Tensor:
    """Column sums of fp32 partials, rounded once to `dtype`; zeros where there are none."""
    num_partials, num_cols = partial_PC.shape
    out = torch.empty(num_cols, dtype=dtype, device=partial_PC.device)
    launch(_sum_partials_kernel, (triton.cdiv(num_cols, _COLS),))(
        partial_PC, out, num_partials, num_cols, ROWS=_ROWS, COLS=_COLS
    )
    return out
