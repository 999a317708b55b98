"""GELU: y = x · Φ(x), where Φ is the standard normal distribution, or near it.

    "none"    Φ(x) = ½ erfc(−x/√2),                Φ'(x) = exp(−x²/2) / √(2π)
    "tanh"    Φ(x) = σ(z),  z = 2·√(2/π)·(x + 0.044715·x³),   Φ'(x) = σ·(1 − σ)·z'

    dx = dy · (Φ(x) + x·Φ'(x))

The second is Hendrycks and Gimpel's approximation by tanh (2016, arXiv 1606.08415), written as the
sigmoid that it is. Computed in fp32 (fp64 for fp64), rounded once; the backward pass keeps x alone.

On a CPU each is a pass of C++ (`cpp/vision_rows.h`), on a GPU of Triton (`triton/vision_rows.py`),
elsewhere PyTorch's ops, here. The gated form is `geglu`.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import (
    Backend,
    check_tensors,
    chosen,
    compute_dtype,
    resolve,
    use_native,
    use_triton,
)

Approximation = Literal["none", "tanh"]

_FORWARD = {
    "cpp": "kernels.cpp.vision_ops:gelu",
    "triton": "kernels.triton.vision_rows:gelu",
    "torch": "kernels.vision.gelu:activate",
}
_BACKWARD = {
    "cpp": "kernels.cpp.vision_ops:gelu_gradient",
    "triton": "kernels.triton.vision_rows:gelu_gradient",
    "torch": "kernels.vision.gelu:differentiate",
}
_SLOPE = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_LARGEST = 1e38  # of exp(−z): its product with σ must be 1, not infinity times 0


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, is_tanh, path):
        ctx.save_for_backward(x)
        ctx.is_tanh, ctx.path = is_tanh, path
        return resolve(_FORWARD[path])(x, is_tanh)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return resolve(_BACKWARD[ctx.path])(dy, x, ctx.is_tanh), None, None


def gelu(x: Tensor, approximate: Approximation = "none", *, backend: Backend = "auto") -> Tensor:
    """x · Φ(x), element by element, in x's dtype; `approximate` as in PyTorch. `ValueError` for
    another approximation, and where a named back end cannot take x."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate={approximate!r}: must be 'none' or 'tanh'")
    on_triton = use_triton(backend, x, has_cpp=True)
    check_tensors(x, "x", on_triton)
    path, is_tanh = chosen(on_triton, use_native(backend, x)), approximate == "tanh"
    if not torch.is_grad_enabled():
        out: Tensor = resolve(_FORWARD[path])(x, is_tanh)
        return out
    return _Gelu.apply(x, is_tanh, path)


def gelu_ref(x: Tensor, approximate: Approximation) -> Tensor:
    """The definition, differentiable by autograd alone."""
    return F.gelu(x.to(compute_dtype(x.dtype)), approximate=approximate).to(x.dtype)


def activate(x: Tensor, is_tanh: bool) -> Tensor:
    """The forward pass where no kernel runs. torch's own rounds the rest of a vector differently,
    so that the bits of a row would depend on where it lies (`torch/swiglu.py`); `exp` and `erfc`
    do not."""
    x32 = x.to(compute_dtype(x.dtype))
    if is_tanh:
        return (x32 / (1 + _exp_of_minus_z(x32))).to(x.dtype)
    return (torch.erfc(x32 * -math.sqrt(0.5)).mul_(0.5) * x32).to(x.dtype)


def differentiate(dy: Tensor, x: Tensor, is_tanh: bool) -> Tensor:
    """The backward pass where no kernel runs."""
    x32 = x.to(compute_dtype(x.dtype))
    if is_tanh:
        e = _exp_of_minus_z(x32)
        share = (e + 1).reciprocal_()
        z_slope = x32.square().mul_(3 * _CUBIC * _SLOPE).add_(_SLOPE)
        # e·σ is 1 − σ, without the digits that a difference near 0 would lose
        density = e.mul_(share).mul_(share).mul_(z_slope)
    else:
        share = torch.erfc(x32 * -math.sqrt(0.5)).mul_(0.5)
        density = x32.square().mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    return density.mul_(x32).add_(share).mul_(dy.to(x32.dtype)).to(x.dtype)


def _exp_of_minus_z(x: Tensor) -> Tensor:
    z = x.square().mul_(_CUBIC).add_(1).mul_(x).mul_(_SLOPE)
    return z.neg_().exp_().clamp_(max=_LARGEST)
