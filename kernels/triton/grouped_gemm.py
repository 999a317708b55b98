"""Triton kernels of `grouped_gemm`, which `fused_moe` uses too.

    rows:     ┌ tile 0 of expert 0 ┐        each program: one tile of rows × one tile of columns,
              ├ tile 1 of expert 0 ┤        w[expert] read through its strides, so dx = dy · w is
              ├ tile 0 of expert 2 ┤        the same kernel on the transposed view. Programs of one
              └ ...                ┘        row tile are neighbours: its rows stay in L2.

`gather` reads row m of x from `slots[m] // choices`, `scatter` writes row m of y to `slots[m]`:
sorting rows by expert costs no pass of its own. With SWIGLU a program multiplies by the same
columns of both halves of w[e] (gate and up) and writes silu(gate) · up; the halves themselves go
to `h` where a backward pass will want them. With CLAMPED gate and up are neighbours in w[e] and h
instead of halves, and the activation is `clamped_swiglu`. The weight's gradient is one program a
tile of dw[e], over the expert's rows in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.moe.clamped_swiglu import SWIGLU_ALPHA, SWIGLU_LIMIT
from kernels.triton import tiles as tune
from kernels.triton.launch import launch
from kernels.triton.moe_routing import cut_tiles
from kernels.triton.tiles import Tile, bank

ALPHA: tl.constexpr = tl.constexpr(SWIGLU_ALPHA)
LIMIT: tl.constexpr = tl.constexpr(SWIGLU_LIMIT)


@dataclass(frozen=True)
class ExpertTiles:
    """The runs of rows and their cut into tiles of `rows_a_tile` (kernels/moe/moe_routing.py)."""

    offsets: Tensor
    experts: Tensor
    starts: Tensor
    rows_a_tile: int


@triton.jit
def _rows_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, h_ptr, slot_ptr, offset_ptr, tile_expert_ptr, tile_start_ptr,
    num_out, num_in, choices, stride_xm, stride_we, stride_wo, stride_wi,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, SWIGLU: tl.constexpr, CLAMPED: tl.constexpr,
    KEEP_H: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tile_start_ptr + tile) + tl.arange(0, M)
    is_row = row < tl.load(offset_ptr + expert + 1)
    source, target = row, row
    if GATHER or SCATTER:
        slot = tl.load(slot_ptr + row, is_row, other=0)
        if GATHER:
            source = slot // choices
        if SCATTER:
            target = slot
    out = tl.program_id(0) * N + tl.arange(0, N)
    is_out = out < num_out
    step = tl.arange(0, K)
    x_tile = x_ptr + source.to(tl.int64)[:, None] * stride_xm + step[None, :]
    w_tile = w_ptr + expert.to(tl.int64) * stride_we + step[:, None] * stride_wi
    gate_row, apart = out, num_out  # of w[e], and from there to up's
    if CLAMPED:
        gate_row, apart = 2 * out, 1
    w_tile += gate_row.to(tl.int64)[None, :] * stride_wo
    up_tile = w_tile + tl.cast(apart, tl.int64) * stride_wo
    acc = tl.zeros([M, N], dtype=tl.float32)
    total = acc
    if SWIGLU:
        up = tl.zeros([M, N], dtype=tl.float32)
        up_total = up
    for start in range(0, num_in, K):
        is_in = step < num_in - start
        x = tl.load(x_tile, is_row[:, None] & is_in[None, :], other=0.0)
        w = tl.load(w_tile, is_in[:, None] & is_out[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        if PRECISION == "ieee":
            total, acc = bank(total, acc, start // K)
        if SWIGLU:
            w = tl.load(up_tile, is_in[:, None] & is_out[None, :], other=0.0)
            up = tl.dot(x, w, up, input_precision=PRECISION)
            if PRECISION == "ieee":
                up_total, up = bank(up_total, up, start // K)
            up_tile += K * stride_wi
        x_tile += K
        w_tile += K * stride_wi
    if PRECISION == "ieee":
        acc += total
        if SWIGLU:
            up += up_total
    mask = is_row[:, None] & is_out[None, :]
    kind = y_ptr.dtype.element_ty
    if HAS_BIAS:
        bias_row = bias_ptr + expert.to(tl.int64) * (2 * num_out if SWIGLU else num_out) + gate_row
        acc += tl.load(bias_row, is_out, other=0.0).to(tl.float32)[None, :]
        if SWIGLU:
            up += tl.load(bias_row + apart, is_out, other=0.0).to(tl.float32)[None, :]
    if SWIGLU:
        if KEEP_H:
            h_tile = h_ptr + target.to(tl.int64)[:, None] * (2 * num_out) + gate_row[None, :]
            tl.store(h_tile, acc.to(kind), mask)
            tl.store(h_tile + apart, up.to(kind), mask)
        if CLAMPED:
            acc = tl.minimum(acc, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
            acc = acc * tl.sigmoid(acc * ALPHA) * (up + 1.0)
        else:
            acc = acc * tl.sigmoid(acc) * up
    y_tile = y_ptr + target.to(tl.int64)[:, None] * num_out + out[None, :]
    tl.store(y_tile, acc.to(kind), mask)


@triton.jit
def _weight_grad_kernel(
    dy_ptr, x_ptr, dw_ptr, slot_ptr, offset_ptr, num_out, num_in, choices, stride_dy, stride_x,
    GATHER_DY: tl.constexpr, GATHER_X: tl.constexpr, ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    tiles_in = tl.cdiv(num_in, K)
    first_out = (tl.program_id(0) // tiles_in) * N
    out = first_out + tl.arange(0, N)
    into = (tl.program_id(0) % tiles_in) * K + tl.arange(0, K)
    is_out, is_in = out < num_out, into < num_in
    first, end = tl.load(offset_ptr + expert), tl.load(offset_ptr + expert + 1)
    acc = tl.zeros([N, K], dtype=tl.float32)
    total = acc
    for start in range(first, end, M):
        row = start + tl.arange(0, M)
        is_row = row < end
        token = row
        if GATHER_DY or GATHER_X:
            token = tl.load(slot_ptr + row, is_row, other=0) // choices
        dy_row = (token if GATHER_DY else row).to(tl.int64)
        x_row = (token if GATHER_X else row).to(tl.int64)
        dy_tile = dy_ptr + dy_row[:, None] * stride_dy + out[None, :]
        x_tile = x_ptr + x_row[:, None] * stride_x + into[None, :]
        dy = tl.load(dy_tile, is_row[:, None] & is_out[None, :], other=0.0)
        x = tl.load(x_tile, is_row[:, None] & is_in[None, :], other=0.0)
        acc = tl.dot(tl.trans(dy), x, acc, input_precision=PRECISION)
        if PRECISION == "ieee":
            total, acc = bank(total, acc, (start - first) // M)
    if PRECISION == "ieee":
        acc += total
    target = dw_ptr + (expert * num_out + first_out) * num_in
    target = target + tl.arange(0, N)[:, None] * num_in + into[None, :]
    mask = is_out[:, None] & is_in[None, :]
    if ACCUMULATE:
        acc += tl.load(target, mask, other=0.0)
    tl.store(target, acc.to(dw_ptr.dtype.element_ty), mask)


def rows_a_tile(
    num_rows: int, num_experts: int, dtype: torch.dtype, batch_invariant: bool = False
) -> int:
    """By the mean number of rows of an expert, which is known without asking the device; the most,
    where a row's bits must not depend on how many there are."""
    mean = math.inf if batch_invariant else num_rows / max(1, num_experts)
    return tune.for_rows(_table(dtype), mean).M


def _table(dtype: torch.dtype) -> Mapping[int, Tile]:
    return tune.GROUPED_FP32 if dtype == torch.float32 else tune.GROUPED


def make_tiles(offsets: Tensor, num_rows: int, dtype: torch.dtype) -> ExpertTiles:
    block_m = rows_a_tile(num_rows, offsets.shape[0] - 1, dtype)
    return ExpertTiles(offsets, *cut_tiles(offsets, num_rows, block_m), block_m)


@dataclass(frozen=True)
class Route:
    """Where the rows come from and go to: `slots` of k choices a token, in expert order."""

    slots: Tensor
    choices: int
    gather: bool = False
    scatter: bool = False


def rows_by_weight(
    x: Tensor,
    w_EOI: Tensor,
    tiles: ExpertTiles,
    num_rows: int,
    route: Route | None = None,
    bias_EO: Tensor | None = None,
) -> Tensor:
    """y [num_rows, O] = x · w[e]ᵀ + bias[e] for the rows of each expert. `w` may be a transposed
    view."""
    y = x.new_empty(num_rows, w_EOI.shape[1])
    tile = _table(x.dtype)[tiles.rows_a_tile]
    _launch(x, w_EOI, bias_EO, y, None, tiles, tile, tile.N, route, is_swiglu=False)
    return y


def rows_by_weight_swiglu(
    x: Tensor,
    w_EOI: Tensor,
    bias_EO: Tensor | None,
    tiles: ExpertTiles,
    route: Route,
    keeps_h: bool,
    is_clamped: bool,
) -> tuple[Tensor, Tensor | None]:
    """(silu(gate) · up [num_rows, O / 2], and where wanted gate and up side by side). `is_clamped`:
    of `clamped_swiglu`, by turns."""
    num_rows = route.slots.shape[0]
    y = x.new_empty(num_rows, w_EOI.shape[1] // 2)
    h = x.new_empty(num_rows, w_EOI.shape[1]) if keeps_h else None
    tile = _table(x.dtype)[tiles.rows_a_tile]
    half = tile.N // 2
    _launch(
        x, w_EOI, bias_EO, y, h, tiles, tile, half, route, is_swiglu=True, is_clamped=is_clamped
    )
    return y, h


def _launch(
    x: Tensor,
    w_EOI: Tensor,
    bias_EO: Tensor | None,
    y: Tensor,
    h: Tensor | None,
    tiles: ExpertTiles,
    tile: Tile,
    columns: int,
    route: Route | None,
    *,
    is_swiglu: bool,
    is_clamped: bool = False,
) -> None:
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_out = y.shape[1]
    if y.numel() == 0:
        return
    launch(_rows_kernel, (triton.cdiv(num_out, columns), tiles.experts.shape[0]))(
        x, w_EOI, None if bias_EO is None else bias_EO.contiguous(), y, y if h is None else h,
        tiles.offsets if route is None else route.slots,
        tiles.offsets, tiles.experts, tiles.starts, num_out, x.shape[1],
        1 if route is None else route.choices, x.stride(0), *w_EOI.stride(),
        GATHER=route is not None and route.gather, SCATTER=route is not None and route.scatter,
        SWIGLU=is_swiglu, CLAMPED=is_clamped, KEEP_H=h is not None, HAS_BIAS=bias_EO is not None,
        PRECISION=_precision(x.dtype),
        M=tiles.rows_a_tile, N=columns, K=tile.K,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def weight_grad(
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    weight_EOI: Tensor,
    route: Route | None = None,
    *,
    gathers_dy: bool = False,
) -> Tensor:
    """dw[e] = Σ dyᵀ · x over each expert's rows: added to `weight.main_grad`, or fresh. With a
    route, one of the two is in token order: dy if `gathers_dy`, else x."""
    dy, x = (t if t.stride(-1) == 1 else t.contiguous() for t in (dy, x))
    main_grad: object = getattr(weight_EOI, "main_grad", None)
    has_buffer = isinstance(main_grad, Tensor)
    num_experts, num_out, num_in = weight_EOI.shape
    dw = main_grad if isinstance(main_grad, Tensor) else weight_EOI.new_empty(weight_EOI.shape)
    tile = tune.WEIGHT_GRAD_FP32 if x.dtype == torch.float32 else tune.WEIGHT_GRAD
    tiles = triton.cdiv(num_out, tile.N) * triton.cdiv(num_in, tile.K)
    if dw.numel():
        launch(_weight_grad_kernel, (tiles, num_experts))(
            dy, x, dw, offsets if route is None else route.slots, offsets, num_out, num_in,
            1 if route is None else route.choices, dy.stride(0), x.stride(0),
            GATHER_DY=route is not None and gathers_dy,
            GATHER_X=route is not None and not gathers_dy, ACCUMULATE=has_buffer,
            PRECISION=_precision(x.dtype), M=tile.M, N=tile.N, K=tile.K,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return dw


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"
