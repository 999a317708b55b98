"""The clamped SwiGLU of gpt-oss, where one matmul produced gate and up by turns (`[tokens, 2F]`:
gate 0, up 0, gate 1, up 1, ...).

With g = min(gate, limit), u = up within ±limit and σ = sigmoid(α·g): y = (u + 1)·g·σ, and backwards

    dup = dy·g·σ,   dgate = dy·(u + 1)·σ·(1 + α·g·(1 − σ)),   0 where the clamp has moved it

Computed in fp32, rounded once; PyTorch on every device. Source: `GptOssExperts` of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import compute_dtype

SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


def clamped_swiglu_ref(gate_up_T2F: Tensor) -> Tensor:
    """The definition, differentiable by autograd alone."""
    wide = gate_up_T2F.to(compute_dtype(gate_up_T2F.dtype))
    gate = wide[..., ::2].clamp(max=SWIGLU_LIMIT)
    up = wide[..., 1::2].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return ((up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)).to(gate_up_T2F.dtype)


def clamped_swiglu(gate_up_T2F: Tensor) -> Tensor:
    """(up + 1) · gate · sigmoid(α · gate) after the clamps. No gradient: see the other function."""
    gate, up, sigmoid = _parts(gate_up_T2F)
    return up.add_(1).mul_(gate.mul_(sigmoid)).to(gate_up_T2F.dtype)


def clamped_swiglu_gradient(dy_TF: Tensor, gate_up_T2F: Tensor) -> Tensor:
    """The gradient by `clamped_swiglu`'s argument."""
    gate, up, sigmoid = _parts(gate_up_T2F)
    dy = dy_TF.to(gate.dtype)
    glu = gate * sigmoid
    dup = (dy * glu).masked_fill_(gate_up_T2F[..., 1::2].abs() > SWIGLU_LIMIT, 0.0)
    slope = glu.mul_(1 - sigmoid).mul_(SWIGLU_ALPHA).add_(sigmoid)
    dgate = slope.mul_(up.add_(1)).mul_(dy)
    dgate.masked_fill_(gate_up_T2F[..., ::2] > SWIGLU_LIMIT, 0.0)
    return torch.stack((dgate, dup), -1).flatten(-2).to(gate_up_T2F.dtype)


def _parts(gate_up_T2F: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gate and up after the clamps, and sigmoid(α · gate), in fp32 (fp64) and contiguous. torch's
    own sigmoid rounds the rest of a vector differently, so that the bits of a row would depend on
    where it lies (swiglu.py): written with `exp`, it has no such seam."""
    wide = compute_dtype(gate_up_T2F.dtype)
    gate = gate_up_T2F[..., ::2].to(wide, memory_format=torch.contiguous_format, copy=True)
    up = gate_up_T2F[..., 1::2].to(wide, memory_format=torch.contiguous_format, copy=True)
    gate.clamp_(max=SWIGLU_LIMIT)
    sigmoid = (gate * -SWIGLU_ALPHA).exp_().add_(1).reciprocal_()
    return gate, up.clamp_(-SWIGLU_LIMIT, SWIGLU_LIMIT), sigmoid
