"""Rotary position embedding, NeoX layout: the first half of a head pairs with the second half.

    y1 = x1·cos − x2·sin,   y2 = x2·cos + x1·sin

Tables are fp32, `[positions, head_dim / 2]`. The backward pass is the rotation by −angle, so
nothing of q or k is kept.
"""

import torch
from torch import Tensor

from kernels.backend import (
    Backend,
    check_floating,
    check_integers,
    check_tensors,
    use_native,
    use_triton,
)
from kernels.cpp import ops as cpp_ops


def apply_rope_ref(
    q_THD: Tensor, k_TKD: Tensor, cos_PD2: Tensor, sin_PD2: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, differentiable by autograd alone."""
    cos = torch.cat([cos_PD2[positions_T]] * 2, -1).unsqueeze(1)
    sin = torch.cat([sin_PD2[positions_T]] * 2, -1).unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.to(cos.dtype).chunk(2, -1)
        return (torch.cat([x1, x2], -1) * cos + torch.cat([-x2, x1], -1) * sin).to(x.dtype)

    return rotate(q_THD), rotate(k_TKD)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, positions, backend):
        ctx.save_for_backward(cos, sin, positions)
        ctx.backend = backend
        return _rotate_both(q, k, cos, sin, positions, 1.0, backend)

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin, positions = ctx.saved_tensors
        grads = _rotate_both(dq, dk, cos, sin, positions, -1.0, ctx.backend)
        return *grads, None, None, None, None


def _rotate_both(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    sign: float,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    if use_triton(backend, q, has_cpp=True):
        from kernels.triton import rope as triton_ops

        return triton_ops.rotate(q, k, cos, sin, positions, sign)
    if positions is not None:
        cos, sin = cos.index_select(0, positions), sin.index_select(0, positions)
    sin = sin if sign > 0 else sin.neg()
    refusal = None
    if not cos.dtype == sin.dtype == torch.float32:
        refusal = f"cos, sin: dtypes {cos.dtype}, {sin.dtype} must be float32"
    if use_native(backend, q, k, refusal=refusal):
        return cpp_ops.rope(q, k, cos, sin)
    cos_T, sin_T = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate(q, cos_T, sin_T), _rotate(k, cos_T, sin_T)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y1, y2 = y.chunk(2, -1)
    if x.dtype == cos.dtype:
        torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-1)
        torch.mul(x2, cos, out=y2).addcmul_(x1, sin)
        return y
    x1, x2 = x1.to(cos.dtype), x2.to(cos.dtype)
    y1.copy_((x1 * cos).addcmul_(x2, sin, value=-1))
    y2.copy_((x2 * cos).addcmul_(x1, sin))
    return y


def apply_rope(
    q_THD: Tensor,
    k_TKD: Tensor,
    cos_PD2: Tensor,
    sin_PD2: Tensor,
    positions_T: Tensor | None,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys (any number of heads each) by their positions. Without positions
    the tables hold one row a token."""
    check_rope(q_THD, k_TKD, cos_PD2, sin_PD2, positions_T)
    on_triton = use_triton(backend, q_THD, has_cpp=True)
    check_tensors(q_THD, "q", on_triton, k=k_TKD, cos=cos_PD2, sin=sin_PD2, positions=positions_T)
    if not (torch.is_grad_enabled() and (q_THD.requires_grad or k_TKD.requires_grad)):
        return _rotate_both(q_THD, k_TKD, cos_PD2, sin_PD2, positions_T, 1.0, backend)
    return _Rope.apply(q_THD, k_TKD, cos_PD2, sin_PD2, positions_T, backend)


def check_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> None:
    """Shapes and kinds of dtype, for every op that rotates."""
    if q.dim() != 3 or k.dim() != 3:
        raise ValueError(
            f"q, k: must be [tokens, heads, head_dim], got {q.dim()}-d and {k.dim()}-d"
        )
    half = q.shape[-1] // 2
    if q.shape[-1] % 2 or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"head_dim: must be even and equal, got q {q.shape[-1]}, k {k.shape[-1]}")
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[1] != half:
        raise ValueError(
            f"cos, sin: must both be [positions, {half}], got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}"
        )
    rows = cos.shape[:1] if positions is None else positions.shape
    if rows != q.shape[:1] or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"positions: shape {tuple(rows)} must be the {q.shape[0]} tokens of q and k"
        )
    check_floating(k=k, cos=cos, sin=sin)
    check_integers(positions=positions)
