"""Per-head RMSNorm and rotation on a GPU, differentiable: one pass of Triton each way.

With r = 1 / sqrt(mean(x²) + eps), n = x·r and y = R(angle) · (n·w), backwards, as a rotation's
transpose is the rotation back: g = R(−angle)·dy, dw = Σ over tokens and heads of g·n,
dx = r·(g·w − n·mean(g·w·n)). q and k are read once and only they are kept.
"""

import torch

from kernels.triton import qk_norm_rope as triton_ops


class QKNormRope(torch.autograd.Function):
    """(q, k), normalised and rotated; `kernels.qk_norm_rope` has checked the arguments."""

    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, cos, sin, positions, eps):
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin, positions)
        ctx.eps = eps
        return triton_ops.forward(q, k, q_weight, k_weight, cos, sin, positions, eps)

    @staticmethod
    def backward(ctx, dq, dk):
        q, k, q_weight, k_weight, cos, sin, positions = ctx.saved_tensors
        grads = triton_ops.backward(dq, dk, q, k, q_weight, k_weight, cos, sin, positions, ctx.eps)
        return *grads, None, None, None, None
