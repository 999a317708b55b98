"""Grouped matmul: every run of rows has its own weight, one run an expert.

    y[m] = x[m] · w[e]ᵀ      for offsets[e] ≤ m < offsets[e + 1]
    dx[m] = dy[m] · w[e]     dw[e] = Σ_m dy[m]ᵀ · x[m]

On a CPU one packed matmul an expert (`linear_rows`), so that a row's bits do not depend on how
many rows its expert has; experts without rows cost nothing. On a GPU one launch: the tiles of all
experts side by side (`triton/grouped_gemm.py`), and in dw each tile of the weight is summed by
one program over its expert's rows in order, so no atomics.

Left out: fp8 weights, a bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import Backend, check_tensors, check_triton_dtype, use_triton
from kernels.linear import add_weight_grad, linear_rows, matmul_rows

PackedExperts = Sequence[Tensor | None]
"""`pack_weight` of each expert's matrix."""


class ExpertMatrices(NamedTuple):
    """Those of a mixture of gated experts, and their biases where they have some."""

    w13: Tensor  # [experts, 2 * width, hidden]: gate and up
    w2: Tensor  # [experts, hidden, width]: down
    b13: Tensor | None  # [experts, 2 * width]
    b2: Tensor | None  # [experts, hidden]


def grouped_gemm_ref(x_MI: Tensor, w_EOI: Tensor, expert_offsets: Tensor) -> Tensor:
    """The definition, differentiable by autograd alone."""
    bounds = pairwise(expert_offsets.tolist())
    return torch.cat([x_MI[lo:hi] @ w.t() for w, (lo, hi) in zip(w_EOI, bounds, strict=True)])


def runs(bounds: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) for the experts that have rows."""
    for expert, (lo, hi) in enumerate(pairwise(bounds)):
        if lo < hi:
            yield expert, slice(lo, hi)


def rows_times_expert(
    x_MI: Tensor,
    w_EOI: Tensor,
    expert: int,
    packed: PackedExperts | None,
    bias_EO: Tensor | None = None,
) -> Tensor:
    """x · w[expert]ᵀ + bias[expert], row-invariant on a CPU."""
    bias = None if bias_EO is None else bias_EO[expert]
    return linear_rows(x_MI, w_EOI[expert], bias, None if packed is None else packed[expert])


def weight_grad_buffer(w_EOI: Tensor) -> Tensor:
    """`main_grad`, or zeros in fp32 (fp64) to sum into."""
    main_grad = getattr(w_EOI, "main_grad", None)
    if isinstance(main_grad, Tensor):
        return main_grad
    wide = torch.promote_types(w_EOI.dtype, torch.float32)
    return torch.zeros(w_EOI.shape, dtype=wide, device=w_EOI.device)


def hand_over(w_EOI: Tensor, dw_EOI: Tensor) -> Tensor | None:
    """The gradient for autograd: None where the sum went to `main_grad`."""
    return None if dw_EOI is getattr(w_EOI, "main_grad", None) else dw_EOI.to(w_EOI.dtype)


def add_expert_grad(dw_EOI: Tensor, expert: int, dy_MO: Tensor, x_MI: Tensor) -> None:
    add_weight_grad(dw_EOI[expert], dy_MO, x_MI)


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, offsets, packed, on_triton):
        ctx.on_triton = on_triton
        ctx.save_for_backward(x)
        ctx.w = w  # itself: activation checkpointing gives back copies without main_grad
        if on_triton:
            from kernels.triton import grouped_gemm as gpu  # here: not every machine has Triton

            ctx.tiles = gpu.make_tiles(offsets, x.shape[0], x.dtype)
            return gpu.rows_by_weight(x, w, ctx.tiles, x.shape[0])
        ctx.bounds = offsets.tolist()
        y = x.new_empty(x.shape[0], w.shape[1])
        for expert, rows in runs(ctx.bounds):
            y[rows] = rows_times_expert(x[rows], w, expert, packed)
        return y

    @staticmethod
    def backward(ctx, dy):
        if ctx.on_triton:
            return *_triton_backward(ctx, dy), None, None, None
        (x,), w = ctx.saved_tensors, ctx.w
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw = weight_grad_buffer(w) if ctx.needs_input_grad[1] else None
        for expert, rows in runs(ctx.bounds):
            if dx is not None:
                dx[rows] = matmul_rows(dy[rows], w[expert])
            if dw is not None:
                add_expert_grad(dw, expert, dy[rows], x[rows])
        return dx, None if dw is None else hand_over(w, dw), None, None, None


def _triton_backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    from kernels.triton import grouped_gemm as gpu  # here: not every machine has Triton

    (x,), w = ctx.saved_tensors, ctx.w
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = gpu.rows_by_weight(dy, w.transpose(1, 2), ctx.tiles, x.shape[0])
    if ctx.needs_input_grad[1]:
        dw = hand_over(w, gpu.weight_grad(dy, x, ctx.tiles.offsets, w))
    return dx, dw


def grouped_gemm(
    x_MI: Tensor,
    w_EOI: Tensor,
    expert_offsets: Tensor,
    *,
    packed: PackedExperts | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """y [M, O]: rows `expert_offsets[e]` to `expert_offsets[e + 1]` of x, times w[e]ᵀ.

    `expert_offsets` [E + 1] int32 starts with 0, ends with M and does not fall. `packed` is for
    the CPU: `pack_weight` of each expert, kept fresh by the caller.
    """
    _check(x_MI, w_EOI, expert_offsets)
    on_triton = use_triton(backend, x_MI)
    check_tensors(x_MI, "x", on_triton, w=w_EOI, expert_offsets=expert_offsets)
    if on_triton:
        check_triton_dtype("x", x_MI.dtype)
    y_MO: Tensor = _GroupedGemm.apply(x_MI, w_EOI, expert_offsets, packed, on_triton)
    return y_MO


def _check(x: Tensor, w: Tensor, offsets: Tensor) -> None:
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(
            f"x: shape {tuple(x.shape)} must be [rows, {w.shape[-1]}] to match w "
            f"{tuple(w.shape)}, [experts, out, in]"
        )
    if x.dtype != w.dtype:
        raise ValueError(f"x: dtype {x.dtype} must be w's {w.dtype}; cast one of them")
    if offsets.shape != (w.shape[0] + 1,) or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"expert_offsets: {offsets.dtype} {tuple(offsets.shape)} must be int32 "
            f"[{w.shape[0] + 1}], one more than w has experts"
        )
    if offsets.device.type == "cpu":
        bounds = offsets.tolist()
        if bounds[0] != 0 or bounds[-1] != x.shape[0] or bounds != sorted(bounds):
            raise ValueError(
                f"expert_offsets: {bounds} must rise from 0 to the {x.shape[0]} rows of x"
            )
