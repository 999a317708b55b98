"""Rows of a tensor by index, with a backward pass that adds in a fixed order.

    y_i = x[index_i],    dx_r = Σ_{i: index_i = r} dy_i   (in fp32, i ascending)

PyTorch's own backward of `index_select` adds with atomics on a GPU, in a different order every
time. Here the plan (`make_row_gather`, once for all layers) lists for each row of x where it went;
a program owns a row's sum. The plan is sorted on the host; `add_rows`, the gradient of an
embedding (`kernels.add_rows_`), sorts its own index on the GPU, where the token ids are.

Legend: R rows of x, G rows of y.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import Backend, compute_dtype, resolve, use_triton

_SUM_ROWS = "kernels.triton.gather_rows:sum_rows"


@dataclass(frozen=True)
class RowGather:
    """`targets[starts[r] : starts[r + 1]]` are the rows of y that copy row r of x."""

    index_G: Tensor
    starts: Tensor  # [R + 1] int32
    targets_G: Tensor  # int32


def make_row_gather(
    index: Tensor, num_rows: int, device: torch.device | str | None = None
) -> RowGather:
    """A plan for `gather_rows` of [num_rows, ...] tensors on `device`."""
    index = index.to("cpu", torch.int64)
    if index.dim() != 1 or (
        len(index) and not 0 <= int(index.min()) <= int(index.max()) < num_rows
    ):
        raise ValueError(f"index: must be a list of rows below {num_rows}")
    starts = torch.bincount(index, minlength=num_rows).cumsum(0)
    starts = torch.cat([starts.new_zeros(1), starts]).int()
    targets = torch.argsort(index, stable=True).int()
    return RowGather(index.to(device), starts.to(device), targets.to(device))


def gather_rows_ref(x: Tensor, index: Tensor) -> Tensor:
    """The definition, differentiable by autograd alone."""
    return x[index]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gather, on_triton):
        ctx.gather, ctx.on_triton, ctx.shape = gather, on_triton, x.shape
        return x.index_select(0, gather.index_G)

    @staticmethod
    def backward(ctx, dy):
        if ctx.on_triton:
            dx = resolve(_SUM_ROWS)(dy, ctx.gather.starts, ctx.gather.targets_G)
            return dx, None, None
        dx = torch.zeros(ctx.shape, dtype=compute_dtype(dy.dtype), device=dy.device)
        dx.index_add_(0, ctx.gather.index_G, dy.to(dx.dtype))
        return dx.to(dy.dtype), None, None


def gather_rows(x: Tensor, gather: RowGather, *, backend: Backend = "auto") -> Tensor:
    """y [G, ...] of x [R, ...]."""
    if x.shape[0] != gather.starts.shape[0] - 1:
        raise ValueError(f"x: {x.shape[0]} rows, the plan is for {gather.starts.shape[0] - 1}")
    if gather.index_G.device != x.device and not x.is_meta:
        raise ValueError(f"gather: on {gather.index_G.device}, must be on x's {x.device}")
    return _GatherRows.apply(x, gather, use_triton(backend, x))


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """total[index] += rows, in order; `kernels.add_rows_` has checked the arguments."""
    ordered, targets = torch.sort(index.long(), stable=True)
    starts = torch.searchsorted(ordered, torch.arange(total.shape[0] + 1, device=index.device))
    resolve(_SUM_ROWS)(rows, starts, targets, total)
