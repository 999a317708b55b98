"""Root-mean-square layer norm: y = x / sqrt(mean(x²) + eps) · weight, over the last dimension.

With r = 1 / sqrt(mean(x²) + eps), n = x·r and g = dy·weight:

    dx = r · (g − n · mean(g·n)),   dweight = Σ over rows of dy·n

Computed in fp32 and rounded once, at the end. `add_rms_norm` first adds the residual stream and
returns the sum too. The backward pass keeps x and one number a row.

On a CPU each is one pass of C++ (`cpp/rows.h`, `cpp/rows_gradient.h`), or PyTorch's ops.
"""

import torch
from torch import Tensor

from kernels.backend import (
    Backend,
    check_floating,
    check_tensors,
    compute_dtype,
    use_native,
    use_triton,
)
from kernels.cpp import ops as cpp_ops


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition, differentiable by autograd alone."""
    x32 = x.to(compute_dtype(x.dtype))
    rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * rstd * weight.to(x32.dtype)).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, on_triton, is_native):
        if is_native:
            y, rstd = cpp_ops.rms_norm(x, weight, eps)
        else:
            y, rstd = _triton_forward(x, weight, eps) if on_triton else _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.on_triton, ctx.is_native = on_triton, is_native
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        if ctx.is_native:
            return *cpp_ops.rms_norm_gradient(dy, x, weight, rstd), None, None, None
        return *_any_backward(dy, x, weight, rstd, ctx.on_triton), None, None, None


class _AddRMSNorm(torch.autograd.Function):
    """The fused form: one pass reads x and the residual and writes both results."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, on_triton):
        ctx.on_triton = on_triton
        if on_triton:
            from kernels.triton import rms_norm as triton_ops

            y, total, rstd = triton_ops.forward(x, residual, weight, eps)
        else:
            y, total, rstd = cpp_ops.add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        return y, total

    @staticmethod
    def backward(ctx, dy, dtotal):
        total, weight, rstd = ctx.saved_tensors
        if ctx.on_triton:
            from kernels.triton import rms_norm as triton_ops

            dx, dw = triton_ops.backward(dy, total, weight, rstd, dtotal)
        else:
            dx, dw = cpp_ops.rms_norm_gradient(dy, total, weight, rstd, dtotal)
        return dx, dx, dw, None, None


def _triton_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from kernels.triton import rms_norm as triton_ops

    y, _, rstd = triton_ops.forward(x, None, weight, eps)
    return y, rstd


def _any_backward(dy, x, weight, rstd, on_triton) -> tuple[Tensor, Tensor]:
    if not on_triton:
        return _backward(dy, x, weight, rstd)
    from kernels.triton import rms_norm as triton_ops

    return triton_ops.backward(dy, x, weight, rstd)


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x32 = x.to(compute_dtype(x.dtype))
    rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * rstd).mul_(weight.to(x32.dtype)).to(x.dtype), rstd


def _backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    normed = x.to(rstd.dtype) * rstd
    dy32 = dy.to(rstd.dtype)
    dw = (dy32 * normed).flatten(0, -2).sum(0).to(weight.dtype)
    g = dy32 * weight.to(rstd.dtype)
    c = (g * normed).mean(-1, keepdim=True)
    dx = g.sub_(normed.mul_(c)).mul_(rstd).to(x.dtype)
    return dx, dw


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: Backend = "auto") -> Tensor:
    """RMSNorm over the last dimension; any leading shape; output in x's dtype."""
    _check(x, weight, eps)
    on_triton = use_triton(backend, x, has_cpp=True)
    check_tensors(x, "x", on_triton, weight=weight)
    is_native = use_native(backend, x, weight)
    if is_native and not torch.is_grad_enabled():  # autograd's bookkeeping takes longer than a row
        return cpp_ops.rms_norm(x, weight, eps)[0]
    return _RMSNorm.apply(x, weight, eps, on_triton, is_native)


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
        return _AddRMSNorm.apply(x, residual, weight, eps, on_triton)
    total = residual + x
    return rms_norm(total, weight, eps, backend=backend), total


def _check(x: Tensor, weight: Tensor, eps: float) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight: shape {tuple(weight.shape)} must be x's last dimension {tuple(x.shape[-1:])}"
        )
    check_floating(weight=weight)
    if not eps > 0:
        raise ValueError(f"eps={eps}: must be positive")
