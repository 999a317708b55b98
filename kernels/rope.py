"""Rotary position embedding, NeoX layout: the first half of a head pairs with the second half.

    y1 = x1·cos − x2·sin,   y2 = x2·cos + x1·sin

Tables are fp32, `[positions, head_dim / 2]`. The backward pass is the rotation by −angle, so
nothing of q or k is kept.

`qk_norm_rope` first normalises each head (Qwen3), with r = 1 / sqrt(mean(x²) + eps) and w the
weight that all heads of q (of k) share:

    n = x·r,   y = R(angle) · (n·w)

On a CPU both are passes of C++ (`cpp/rows.h`), the norm's and the rotation's, rounded to the
input's dtype between the two; on a GPU one pass of Triton each way, for which q and k are read once
(`triton/rope.py`, `gpu/qk_norm_rope.py`). Elsewhere PyTorch's ops (`torch/rope.py`, with
`apply_rope_ref` and `qk_norm_rope_ref`).
"""

import torch
from torch import Tensor

from kernels.backend import (
    Backend,
    check_floating,
    check_integers,
    check_tensors,
    resolve,
    use_native,
    use_triton,
)
from kernels.cpp import ops as cpp_ops
from kernels.rms_norm import rms_norm

_ROTATE = {"triton": "kernels.triton.rope:rotate", "torch": "kernels.torch.rope:rotate"}
_NORM_ROPE = "kernels.gpu.qk_norm_rope:QKNormRope"


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
        return resolve(_ROTATE["triton"])(q, k, cos, sin, positions, sign)
    if positions is not None:  # Triton reads the tables' rows where they are
        cos, sin = cos.index_select(0, positions), sin.index_select(0, positions)
    sin = sin if sign > 0 else sin.neg()
    refusal = None
    if not cos.dtype == sin.dtype == torch.float32:
        refusal = f"cos, sin: dtypes {cos.dtype}, {sin.dtype} must be float32"
    if use_native(backend, q, k, refusal=refusal):
        return cpp_ops.rope(q, k, cos, sin)
    return resolve(_ROTATE["torch"])(q, k, cos, sin)


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


def qk_norm_rope(
    q_THD: Tensor,
    k_TKD: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    cos_PD2: Tensor,
    sin_PD2: Tensor,
    positions_T: Tensor | None,
    eps: float = 1e-6,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Normalised and rotated (q, k). Without positions the tables hold one row a token."""
    check_rope(q_THD, k_TKD, cos_PD2, sin_PD2, positions_T)
    for name, weight in (("q_weight", q_weight_D), ("k_weight", k_weight_D)):
        if weight.shape != q_THD.shape[-1:]:
            raise ValueError(
                f"{name}: shape {tuple(weight.shape)} must be head_dim {tuple(q_THD.shape[-1:])}"
            )
    if not eps > 0:
        raise ValueError(f"eps={eps}: must be positive")
    on_triton = use_triton(backend, q_THD, has_cpp=True)
    check_floating(q_weight=q_weight_D, k_weight=k_weight_D)
    check_tensors(
        q_THD, "q", on_triton, k=k_TKD, cos=cos_PD2, sin=sin_PD2, positions=positions_T,
        q_weight=q_weight_D, k_weight=k_weight_D,
    )  # fmt: skip
    if not on_triton:
        q_THD = rms_norm(q_THD, q_weight_D, eps, backend=backend)
        k_TKD = rms_norm(k_TKD, k_weight_D, eps, backend=backend)
        return apply_rope(q_THD, k_TKD, cos_PD2, sin_PD2, positions_T, backend=backend)
    return resolve(_NORM_ROPE).apply(
        q_THD, k_TKD, q_weight_D, k_weight_D, cos_PD2, sin_PD2, positions_T, eps
    )


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
