"""Mixture of experts: each token through k gated experts, summed with the router's weights.

    h_s = x_n · w13[e]ᵀ      a_s = silu(first half of h_s) · second half     (slot s = n · k + j)
    y_n = Σ_j t_nj · a_s · w2[e]ᵀ

Backward, with g_s = dy_n · w2[e] (the gradient by a_s before the weight t):

    dt_nj = g_s · a_s        dh_s = swiglu'(h_s) · t_nj · g_s
    dw2[e] = Σ dy_nᵀ · (t_nj · a_s)      dw13[e] = Σ dh_sᵀ · x_n      dx_n = Σ_j dh_s · w13[e]

With biases h_s = x_n · w13[e]ᵀ + b13[e], and each choice gives a_s · w2[e]ᵀ + b2[e] before its
weight, so dt_nj has dy_n · b2[e] too, db13[e] = Σ dh_s and db2[e] = Σ t_nj · dy_n. The activation
is SwiGLU of the two halves of h, or the clamped one of gpt-oss, in which gate and up alternate
(clamped_swiglu.py).

Slots are sorted by expert, so each expert is one matmul over its run of rows. The k contributions
of a token are summed in fp32 in the order of its choices, whatever place the sort gave its slots:
on a CPU a token's bits depend on itself alone (on a GPU the tile follows the number of rows). h is
kept for the backward pass; a is computed again. No atomics: outputs go to one row a slot and are
then summed a token.

Left out: expert parallelism (who owns which expert is the engine's matter), fp8 experts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernels.backend import (
    Backend,
    check_floating,
    check_integers,
    check_tensors,
    check_triton_dtype,
    use_triton,
)
from kernels.linear import matmul_rows
from kernels.moe.clamped_swiglu import clamped_swiglu, clamped_swiglu_gradient, clamped_swiglu_ref
from kernels.moe.grouped_gemm import (
    ExpertMatrices,
    PackedExperts,
    add_expert_grad,
    hand_over,
    rows_times_expert,
    runs,
    weight_grad_buffer,
)
from kernels.moe.moe_routing import check_expert_ids, moe_align
from kernels.swiglu import swiglu
from kernels.torch.swiglu import swiglu_ref

PackedPair = tuple[PackedExperts, PackedExperts]
"""Packed w13 and packed w2."""

BiasPair = tuple[Tensor, Tensor]
"""b13 [experts, 2 * width] and b2 [experts, hidden]."""

Activation = Literal["swiglu", "clamped_swiglu"]


def fused_moe_ref(
    x_NH: Tensor,
    w13_E2FH: Tensor,
    w2_EHF: Tensor,
    topk_weights_NK: Tensor,
    topk_ids_NK: Tensor,
    *,
    biases: BiasPair | None = None,
    activation: Activation = "swiglu",
) -> Tensor:
    """The definition, token by token and differentiable by autograd alone."""
    act_of = swiglu_ref if activation == "swiglu" else clamped_swiglu_ref
    wide = torch.promote_types(x_NH.dtype, torch.float32)
    rows = []
    for x, weights, experts in zip(x_NH, topk_weights_NK, topk_ids_NK.tolist(), strict=True):
        y = torch.zeros_like(x, dtype=wide)
        for weight, expert in zip(weights, experts, strict=True):
            h = w13_E2FH[expert] @ x
            h = h if biases is None else h + biases[0][expert]
            out = w2_EHF[expert] @ act_of(h)
            out = out if biases is None else out + biases[1][expert]
            y = y + weight * out.to(wide)
        rows.append(y.to(x.dtype))
    return torch.stack(rows) if rows else x_NH.clone()


class _Call(NamedTuple):
    """All about a call but the tensors that it is differentiable by."""

    ids: Tensor
    activation: Activation
    packed: PackedPair | None
    batch_invariant: bool
    has_backward: bool


class _FusedMoe(torch.autograd.Function):
    """The CPU path: expert by expert, each over the rows the sort gave it."""

    @staticmethod
    def forward(ctx, call, x, weights, *experts):
        (w13, w2, b13, b2), k = experts, call.ids.shape[1]
        packed13, packed2 = (None, None) if call.packed is None else call.packed
        alignment = moe_align(call.ids, w13.shape[0], 1, backend="torch")
        slots, bounds = alignment.slots.long(), alignment.offsets.tolist()
        h_S2F = x.new_empty(len(slots), w13.shape[1])
        y_SH = x.new_empty(len(slots), w2.shape[1])  # one row a slot, in slot order
        for expert, rows in runs(bounds):
            x_rows = x.index_select(0, slots[rows] // k)
            h_S2F[rows] = rows_times_expert(x_rows, w13, expert, packed13, b13)
            act = _activate(h_S2F[rows], call.activation)
            y_SH[slots[rows]] = rows_times_expert(act, w2, expert, packed2, b2)
        ctx.save_for_backward(x, weights, slots, h_S2F, b2)
        ctx.w = w13, w2  # as in grouped_gemm
        ctx.bounds, ctx.activation = bounds, call.activation
        return sum_of_choices(y_SH.view(-1, k, w2.shape[1]), weights)

    @staticmethod
    def backward(ctx, dy):
        (x, weights, slots, h_S2F, b2), (w13, w2) = ctx.saved_tensors, ctx.w
        k = weights.shape[1]
        needs_x, needs_t, needs_13, needs_2 = ctx.needs_input_grad[1:5]
        db13 = h_S2F.new_zeros(w13.shape[:2], dtype=weights.dtype) if b2 is not None else None
        db2 = h_S2F.new_zeros(w2.shape[:2], dtype=weights.dtype) if b2 is not None else None
        dw13 = weight_grad_buffer(w13) if needs_13 else None
        dw2 = weight_grad_buffer(w2) if needs_2 else None
        t_S, dt_S = weights.reshape(-1), weights.new_empty(weights.numel())
        dx_SH = x.new_empty(len(slots), x.shape[1]) if needs_x else None
        for expert, rows in runs(ctx.bounds):
            tokens = slots[rows] // k
            dy_rows, t = dy.index_select(0, tokens), t_S[slots[rows]].unsqueeze(1)
            g = matmul_rows(dy_rows, w2[expert])
            act, dh = _activate_and_gradient(h_S2F[rows], (g * t).to(g.dtype), ctx.activation)
            dt = (g.to(t.dtype) * act).sum(-1)
            if db13 is not None and db2 is not None:
                dt += (dy_rows.to(t.dtype) * b2[expert]).sum(-1)
                db13[expert] = dh.sum(0, dtype=t.dtype)
                db2[expert] = (dy_rows * t).sum(0)
            dt_S[slots[rows]] = dt
            if dw2 is not None:
                add_expert_grad(dw2, expert, dy_rows, (act * t).to(act.dtype))
            if dw13 is not None:
                add_expert_grad(dw13, expert, dh, x.index_select(0, tokens))
            if dx_SH is not None:
                dx_SH[slots[rows]] = matmul_rows(dh, w13[expert])
        dx = None if dx_SH is None else sum_of_choices(dx_SH.view(-1, k, x.shape[1]), None)
        dw13, dw2 = (None if dw is None else hand_over(w, dw) for w, dw in ((w13, dw13), (w2, dw2)))
        db13, db2 = (None if db is None else db.to(x.dtype) for db in (db13, db2))
        dweights = dt_S.view(weights.shape) if needs_t else None
        return None, dx, dweights, dw13, dw2, db13, db2


def sum_of_choices(y_NKH: Tensor, weights_NK: Tensor | None) -> Tensor:
    """Σ_j t_nj · y_nj in fp32, j ascending; multiply and add apart, so no element is fused."""
    wide = torch.promote_types(y_NKH.dtype, torch.float32)
    total = torch.zeros(y_NKH.shape[0], y_NKH.shape[2], dtype=wide, device=y_NKH.device)
    for j in range(y_NKH.shape[1]):
        part = y_NKH[:, j].to(wide)
        total += part if weights_NK is None else part * weights_NK[:, j, None]
    return total.to(y_NKH.dtype)


def _activate(h_S2F: Tensor, activation: Activation) -> Tensor:
    if activation == "clamped_swiglu":
        return clamped_swiglu(h_S2F)
    out: Tensor = swiglu(h_S2F, backend="torch")
    return out


def _activate_and_gradient(
    h_S2F: Tensor, dact_SF: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    if activation == "clamped_swiglu":
        return clamped_swiglu(h_S2F), clamped_swiglu_gradient(dact_SF, h_S2F)
    with torch.enable_grad():
        h = h_S2F.detach().requires_grad_()
        act = swiglu(h, backend="torch")
    return act.detach(), torch.autograd.grad(act, h, dact_SF)[0]


class _TritonMoe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, x, weights, *experts):
        from kernels.triton import moe as triton_ops  # here: not every machine has Triton

        matrices = ExpertMatrices(*experts)
        is_clamped = call.activation == "clamped_swiglu"
        y, h_S2F, tiles, slots = triton_ops.forward(
            x, matrices, weights, call.ids, is_clamped, call.has_backward, call.batch_invariant
        )
        ctx.save_for_backward(x, weights, call.ids, h_S2F)
        ctx.experts = matrices  # themselves: as in grouped_gemm
        ctx.tiles, ctx.slots, ctx.is_clamped = tiles, slots, is_clamped
        return y

    @staticmethod
    def backward(ctx, dy):
        from kernels.triton import moe as triton_ops  # here: not every machine has Triton

        x, weights, ids, h_S2F = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad[1:5]
        dx, dt, *dws, db13, db2 = triton_ops.backward(
            dy, x, ctx.experts, weights, ids, h_S2F, ctx.tiles, ctx.slots, (needs_x, *needs),
            ctx.is_clamped,
        )  # fmt: skip
        pairs = zip(ctx.experts[:2], dws, strict=True)
        dw13, dw2 = (None if dw is None else hand_over(w, dw) for w, dw in pairs)
        return None, dx, dt, dw13, dw2, db13, db2


def fused_moe(
    x_NH: Tensor,
    w13_E2FH: Tensor,
    w2_EHF: Tensor,
    topk_weights_NK: Tensor,
    topk_ids_NK: Tensor,
    *,
    biases: BiasPair | None = None,
    activation: Activation = "swiglu",
    packed: PackedPair | None = None,
    batch_invariant: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """y [N, H] in x's dtype. `w13` holds each expert's gate rows, then its up rows; for
    `clamped_swiglu` gate 0, up 0, gate 1 and so on. The ids of a
    token are distinct experts. Weights are fp32 (`topk_softmax`). Differentiable in all but ids;
    a weight's `main_grad` takes its gradient where there is one. `batch_invariant`: see `linear`.
    """
    _check(x_NH, w13_E2FH, w2_EHF, topk_weights_NK, topk_ids_NK)
    _check_biases(biases, w13_E2FH, w2_EHF)
    b13, b2 = (None, None) if biases is None else biases
    arguments = (x_NH, topk_weights_NK, w13_E2FH, w2_EHF, b13, b2)
    has_backward = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in arguments
    )
    call = _Call(topk_ids_NK, activation, packed, batch_invariant, has_backward)
    y_NH: Tensor
    if use_triton(backend, x_NH):
        check_triton_dtype("x", x_NH.dtype)
        y_NH = _TritonMoe.apply(call, *arguments)
    else:
        y_NH = _FusedMoe.apply(call, *arguments)
    return y_NH


def _check_biases(biases: BiasPair | None, w13: Tensor, w2: Tensor) -> None:
    if biases is None:
        return
    for name, bias, weight in zip(("b13", "b2"), biases, (w13, w2), strict=True):
        if bias.shape != weight.shape[:2] or bias.dtype != weight.dtype:
            raise ValueError(
                f"biases: {name} is {bias.dtype} {tuple(bias.shape)}, must be {weight.dtype} "
                f"{tuple(weight.shape[:2])}, one number for each row of each expert"
            )
        check_tensors(weight, "w", False, **{name: bias})


def _check(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> None:
    experts, hidden, width = w2.shape if w2.dim() == 3 else (0, 0, 0)
    if w2.dim() != 3 or w13.shape != (experts, 2 * width, hidden):
        raise ValueError(
            f"w13: shape {tuple(w13.shape)} must be [experts, 2 * width, hidden] for w2 "
            f"{tuple(w2.shape)}, [experts, hidden, width]"
        )
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"x: shape {tuple(x.shape)} must be [tokens, {hidden}]")
    if not x.dtype == w13.dtype == w2.dtype:
        raise ValueError(f"x: dtype {x.dtype} must be that of w13 {w13.dtype} and w2 {w2.dtype}")
    if ids.dim() != 2 or ids.shape[0] != x.shape[0]:
        raise ValueError(f"topk_ids: shape {tuple(ids.shape)} must be [x's {x.shape[0]}, k]")
    if weights.shape != ids.shape:
        raise ValueError(
            f"topk_weights: shape {tuple(weights.shape)} must be that of topk_ids "
            f"{tuple(ids.shape)}"
        )
    check_tensors(x, "x", False, w13=w13, w2=w2, topk_weights=weights, topk_ids=ids)
    check_floating(topk_weights=weights)
    check_integers(topk_ids=ids)
    check_expert_ids(ids, experts)
