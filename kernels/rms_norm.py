"""Root-mean-square layer norm: y = x / sqrt(mean(x²) + eps) · weight, over the last dimension.

With r = 1 / sqrt(mean(x²) + eps), n = x·r and g = dy·weight:

    dx = r · (g − n · mean(g·n)),   dweight = Σ over rows of dy·n

Computed in fp32 and rounded once, at the end. `add_rms_norm` first adds the residual stream and
returns the sum too. The backward pass keeps x and one number a row.

On a CPU each is one pass of C++ (`cpp/rows.h`, `cpp/rows_gradient.h`), on a GPU of Triton
(`triton/rms_norm.py`), elsewhere PyTorch's ops (`torch/rms_norm.py`, with `rms_norm_ref`).
"""

import torch
from torch import Tensor

from kernels.backend import (
    Backend,
    check_floating,
    check_tensors,
    chosen,
    resolve,
    use_native,
    use_triton,
)
from kernels.cpp import ops as cpp_ops

# (y, x + residual, 1 / rms) of (x, residual, weight, eps)
_FORWARD = {
    "triton": "kernels.triton.rms_norm:forward",
    "torch": "kernels.torch.rms_norm:forward",
}
# (dx, dweight) of (dy, x + residual, weight, 1 / rms)
_BACKWARD = {
    "triton": "kernels.triton.rms_norm:backward",
    "torch": "kernels.torch.rms_norm:backward",
}


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, path):
        if path == "cpp":
            y, rstd = cpp_ops.rms_norm(x, weight, eps)
        else:
            y, _, rstd = resolve(_FORWARD[path])(x, None, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.path = path
        return y

    @staticmethod
    def backward(ctx, dy):
        run = cpp_ops.rms_norm_gradient if ctx.path == "cpp" else resolve(_BACKWARD[ctx.path])
        x, weight, rstd = ctx.saved_tensors
        return *run(dy, x, weight, rstd), None, None


class _AddRMSNorm(torch.autograd.Function):
    """The fused form: one pass reads x and the residual and writes both results."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, path):
        run = cpp_ops.add_rms_norm if path == "cpp" else resolve(_FORWARD[path])
        y, total, rstd = run(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.path = path
        return y, total

    @staticmethod
    def backward(ctx, dy, dtotal):
        run = cpp_ops.rms_norm_gradient if ctx.path == "cpp" else resolve(_BACKWARD[ctx.path])
        total, weight, rstd = ctx.saved_tensors
        dx, dw = run(dy, total, weight, rstd, dtotal)
        return dx, dx, dw, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: Backend = "auto") -> Tensor:
    """RMSNorm over the last dimension; any leading shape; output in x's dtype."""
    _check(x, weight, eps)
    on_triton = use_triton(backend, x, has_cpp=True)
    check_tensors(x, "x", on_triton, weight=weight)
    is_native = use_native(backend, x, weight)
    if is_native and not torch.is_grad_enabled():  # autograd's bookkeeping takes longer than a row
        return cpp_ops.rms_norm(x, weight, eps)[0]
    return _RMSNorm.apply(x, weight, eps, chosen(on_triton, is_native))


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """`residual + x` and its RMSNorm: returns (y, new residual)."""
    if x.shape != residual.shape:
        raise ValueError(f"residual: shape {tuple(residual.shape)} must be x's {tuple(x.shape)}")
    _check(x, weight, eps)
    on_triton = use_triton(backend, x, has_cpp=True)
    check_tensors(x, "x", on_triton, residual=residual, weight=weight)
    if residual.dtype != x.dtype:
        raise ValueError(f"residual: dtype {residual.dtype} must be x's {x.dtype}")
    is_native = use_native(backend, x, weight)
    if is_native and not torch.is_grad_enabled():
        return cpp_ops.add_rms_norm(x, residual, weight, eps)[:2]
    if on_triton or is_native:
        return _AddRMSNorm.apply(x, residual, weight, eps, chosen(on_triton, is_native))
    total = residual + x  # PyTorch has no fused form
    return rms_norm(total, weight, eps, backend=backend), total


def _check(x: Tensor, weight: Tensor, eps: float) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight: shape {tuple(weight.shape)} must be x's last dimension {tuple(x.shape[-1:])}"
        )
    check_floating(weight=weight)
    if not eps > 0:
        raise ValueError(f"eps={eps}: must be positive")
