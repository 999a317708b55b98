"""SwiGLU: silu(gate) · up, where one matmul produced gate and up side by side (`[tokens, 2F]`).

Computed in fp32, rounded once. The backward pass keeps `gate_up` alone.
"""

import torch
from torch import Tensor

from kernels._dispatch import Backend, compute_dtype, use_triton


def swiglu_ref(gate_up_T2F: Tensor) -> Tensor:
    """The definition, differentiable by autograd alone."""
    gate, up = gate_up_T2F.to(compute_dtype(gate_up_T2F.dtype)).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up_T2F.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return _forward(gate_up)

    @staticmethod
    def backward(ctx, dy):
        (gate_up,) = ctx.saved_tensors
        return _backward(dy, gate_up)


def _forward(gate_up: Tensor) -> Tensor:
    wide = compute_dtype(gate_up.dtype)
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate.to(wide)).mul_(up).to(gate_up.dtype)


def _backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    wide = compute_dtype(gate_up.dtype)
    gate, up = gate_up.chunk(2, -1)
    gate = gate.to(wide)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    out = torch.empty_like(gate_up)
    dgate, dup = out.chunk(2, -1)
    dup.copy_(silu * dy)
    dgate.copy_((sigmoid + silu * (1 - sigmoid)).mul_(up).mul_(dy))
    return out


def swiglu(gate_up_T2F: Tensor, *, backend: Backend = "auto") -> Tensor:
    """silu(first half) · second half of the last dimension."""
    if gate_up_T2F.shape[-1] % 2:
        raise ValueError(f"gate_up: last dimension {gate_up_T2F.shape[-1]} must be even")
    use_triton(backend, gate_up_T2F)
    if torch.is_grad_enabled() and gate_up_T2F.requires_grad:
        return _SwiGLU.apply(gate_up_T2F)
    return _forward(gate_up_T2F)
