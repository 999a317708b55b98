"""RMSNorm in PyTorch: the definition, and the passes of rms_norm.py where no kernel runs."""

import torch
from torch import Tensor

from kernels.backend import compute_dtype


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition, differentiable by autograd alone."""
    x32 = x.to(compute_dtype(x.dtype))
    rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * rstd * weight.to(x32.dtype)).to(x.dtype)


def forward(x: Tensor, residual: None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, x, 1 / rms of each row [..., 1]); the residual was added before."""
    x32 = x.to(compute_dtype(x.dtype))
    rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * rstd).mul_(weight.to(x32.dtype)).to(x.dtype), x, rstd


def backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dweight) from what `forward` was given and returned."""
    normed = x.to(rstd.dtype) * rstd
    dy32 = dy.to(rstd.dtype)
    dw = (dy32 * normed).flatten(0, -2).sum(0).to(weight.dtype)
    g = dy32 * weight.to(rstd.dtype)
    c = (g * normed).mean(-1, keepdim=True)
    dx = g.sub_(normed.mul_(c)).mul_(rstd).to(x.dtype)
    return dx, dw
