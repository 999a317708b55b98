"""Triton path of `fused_moe`: two grouped matmuls and a sum over each token's choices.

    x ──gather──▶ a = swiglu(x·w13ᵀ) ──▶ a·w2ᵀ ──scatter──▶ [token, choice] ──▶ Σ t·(·)
       (sorted by expert from here)      (back in token order)

Backward, the gradient of the activation, of the router's weight and the activation itself come
from one pass over h. What production kernels add: TMA loads, fp8 experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.moe.grouped_gemm import ExpertMatrices
from kernels.moe.moe_routing import moe_align
from kernels.triton.grouped_gemm import (
    ALPHA,
    LIMIT,
    ExpertTiles,
    Route,
    rows_a_tile,
    rows_by_weight,
    rows_by_weight_swiglu,
    weight_grad,
)
from kernels.triton.launch import launch

_BLOCK = 1024


@triton.jit
def _sum_choices_kernel(
    y_ptr, weight_ptr, out_ptr, hidden, CHOICES: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < hidden
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for j in tl.static_range(CHOICES):
        slot = token * CHOICES + j
        y = tl.load(y_ptr + slot * hidden + col, mask, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            y *= tl.load(weight_ptr + slot)
        total += y
    tl.store(out_ptr + token * hidden + col, total.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _act_backward_kernel(
    g_ptr, h_ptr, weight_ptr, slot_ptr, dh_ptr, weighted_ptr, dweight_ptr, width,
    CLAMPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    weight = tl.load(weight_ptr + slot)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < width
        at, apart = row * 2 * width + col, width  # gate's place in h, and from there to up's
        if CLAMPED:
            at, apart = row * 2 * width + 2 * col, 1
        gate = tl.load(h_ptr + at, mask, other=0.0).to(tl.float32)
        up = tl.load(h_ptr + at + apart, mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * width + col, mask, other=0.0).to(tl.float32)
        dact = g * weight
        if CLAMPED:
            dact_gate = tl.where(gate > LIMIT, 0.0, dact)
            dact_up = tl.where(tl.abs(up) > LIMIT, 0.0, dact)
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
            sigmoid = tl.sigmoid(gate * ALPHA)
            silu = gate * sigmoid
            dgate = dact_gate * up * (sigmoid + silu * ALPHA * (1.0 - sigmoid))
        else:
            dact_up = dact
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            dgate = dact * up * (sigmoid + silu - silu * sigmoid)
        products += g * silu * up
        kind = dh_ptr.dtype.element_ty
        tl.store(dh_ptr + at, dgate.to(kind), mask)
        tl.store(dh_ptr + at + apart, (dact_up * silu).to(kind), mask)
        tl.store(weighted_ptr + row * width + col, (silu * up * weight).to(kind), mask)
    tl.store(dweight_ptr + slot, tl.sum(products, 0))


def sum_choices(y_SH: Tensor, weights_NK: Tensor | None, num_tokens: int, k: int) -> Tensor:
    """Σ_j t_nj · y[n · k + j] in fp32."""
    hidden = y_SH.shape[1]
    out = y_SH.new_empty(num_tokens, hidden)
    if out.numel():
        launch(_sum_choices_kernel, (num_tokens, triton.cdiv(hidden, _BLOCK)))(
            y_SH, y_SH if weights_NK is None else weights_NK, out, hidden,
            CHOICES=k, HAS_WEIGHTS=weights_NK is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def forward(
    x: Tensor,
    experts: ExpertMatrices,
    weights: Tensor,
    ids: Tensor,
    is_clamped: bool,
    keeps_h: bool,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor | None, ExpertTiles, Tensor]:
    """(y, h in expert order where it is kept, tiles and slots of that order)."""
    w13, w2, b13, b2 = experts
    num_tokens, k = ids.shape
    num_slots = num_tokens * k
    block_m = rows_a_tile(num_slots, w13.shape[0], x.dtype, batch_invariant)
    alignment = moe_align(ids, w13.shape[0], block_m, backend="triton")
    tiles = ExpertTiles(alignment.offsets, alignment.tile_experts, alignment.tile_starts, block_m)
    gather = Route(alignment.slots, k, gather=True)
    act, h = rows_by_weight_swiglu(x, w13, b13, tiles, gather, keeps_h, is_clamped)
    scatter = Route(alignment.slots, k, scatter=True)
    y_SH = rows_by_weight(act, w2, tiles, num_slots, scatter, b2)
    return sum_choices(y_SH, weights.contiguous(), num_tokens, k), h, tiles, alignment.slots


def backward(
    dy: Tensor,
    x: Tensor,
    experts: ExpertMatrices,
    weights: Tensor,
    ids: Tensor,
    h: Tensor,
    tiles: ExpertTiles,
    slots: Tensor,
    needs: Sequence[bool],
    is_clamped: bool,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients by x, the weights, w13, w2 and, where there are some, the biases. `needs`: whether
    x, w13 and w2 want theirs."""
    (w13, w2, _, b2), (num_tokens, k) = experts, weights.shape
    offsets = tiles.offsets
    num_slots, width = h.shape[0], w2.shape[2]
    gather, scatter = Route(slots, k, gather=True), Route(slots, k, scatter=True)
    dy = dy.contiguous()
    g = rows_by_weight(dy, w2.transpose(1, 2), tiles, num_slots, gather)
    dh, weighted = torch.empty_like(h), torch.empty_like(g)
    dweights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    if num_slots:
        launch(_act_backward_kernel, (num_slots,))(
            g, h, weights.contiguous(), slots, dh, weighted, dweights, width, CLAMPED=is_clamped,
            BLOCK=_BLOCK,
        )  # fmt: skip
    dx = dw13 = dw2 = db13 = db2 = None
    if b2 is not None:  # sums of rows are products with one column
        ones, t_S1 = h.new_ones(num_slots, 1), weights.reshape(-1, 1)[slots.long()].to(h.dtype)
        db13 = weight_grad(dh, ones, offsets, w13[:, :, :1]).squeeze(2)
        db2 = weight_grad(dy, t_S1, offsets, w2[:, :, :1], gather, gathers_dy=True).squeeze(2)
        dweights += torch.mm(dy.float(), b2.float().t()).gather(1, ids.long())
    if needs[2]:
        dw2 = weight_grad(dy, weighted, offsets, w2, gather, gathers_dy=True)
    if needs[1]:
        dw13 = weight_grad(dh, x, offsets, w13, gather)
    if needs[0]:
        dx_SH = rows_by_weight(dh, w13.transpose(1, 2), tiles, num_slots, scatter)
        dx = sum_choices(dx_SH, None, num_tokens, k)
    return dx, dweights, dw13, dw2, db13, db2
