"""Per-head RMSNorm of queries and keys (Qwen3), then the rotation of `rope.py`, as one op.

Per head, with r = 1 / sqrt(mean(x²) + eps) and w the weight that all heads of q (of k) share:

    n = x·r,   y = R(angle) · (n·w)

and backwards, as a rotation's transpose is the rotation back: g = R(−angle)·dy, dw = Σ over tokens
and heads of g·n, dx = r·(g·w − n·mean(g·w·n)).

On a GPU one pass each way; q and k are read once and only they are kept. PyTorch composes
`rms_norm` and `apply_rope`, which rounds to the input's dtype between the two.
"""

import torch
from torch import Tensor

from kernels.backend import Backend, check_floating, check_tensors, use_triton
from kernels.rms_norm import rms_norm, rms_norm_ref
from kernels.rope import apply_rope, apply_rope_ref, check_rope


def qk_norm_rope_ref(
    q_THD: Tensor,
    k_TKD: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    cos_PD2: Tensor,
    sin_PD2: Tensor,
    positions_T: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The definition, differentiable by autograd alone."""
    q, k = rms_norm_ref(q_THD, q_weight_D, eps), rms_norm_ref(k_TKD, k_weight_D, eps)
    return apply_rope_ref(q, k, cos_PD2, sin_PD2, positions_T)


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, cos, sin, positions, eps):
        from kernels.triton import qk_norm_rope as triton_ops

        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin, positions)
        ctx.eps = eps
        return triton_ops.forward(q, k, q_weight, k_weight, cos, sin, positions, eps)

    @staticmethod
    def backward(ctx, dq, dk):
        from kernels.triton import qk_norm_rope as triton_ops

        q, k, q_weight, k_weight, cos, sin, positions = ctx.saved_tensors
        grads = triton_ops.backward(dq, dk, q, k, q_weight, k_weight, cos, sin, positions, ctx.eps)
        return *grads, None, None, None, None


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
    return _QKNormRope.apply(
        q_THD, k_TKD, q_weight_D, k_weight_D, cos_PD2, sin_PD2, positions_T, eps
    )
