"""GeGLU: gelu(gate) · up, where one matmul produced gate and up side by side (`[tokens, 2F]`).

gelu is its approximation by tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415), which is a sigmoid:
with z = 2·√(2/π)·(g + 0.044715·g³) and σ = sigmoid(z), gelu(g) = g·σ. So y = g·σ·up, and backwards

    dup = dy·g·σ,   dgate = dy·up·(σ + g·σ·(1 − σ)·z')

Computed in fp32, rounded once. The backward pass keeps `gate_up` alone. PyTorch on every device.
"""

import math

import torch
from torch import Tensor

from kernels.backend import compute_dtype

_CHUNK_ELEMENTS = 1 << 18
_SLOPE = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_LARGEST = 1e38  # of exp(−z): its product with σ must be 1, not infinity times 0


def geglu_ref(gate_up_T2F: Tensor) -> Tensor:
    """The definition, differentiable by autograd alone."""
    gate, up = gate_up_T2F.to(compute_dtype(gate_up_T2F.dtype)).chunk(2, -1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up_T2F.dtype)


def geglu(gate_up_T2F: Tensor) -> Tensor:
    """gelu(first half) · second half of the last dimension."""
    if gate_up_T2F.shape[-1] % 2:
        raise ValueError(f"gate_up: last dimension {gate_up_T2F.shape[-1]} must be even")
    out: Tensor = _GeGLU.apply(gate_up_T2F)
    return out


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        gate_up, flat = gate_up.flatten(0, -2), out.flatten(0, -2)
        for rows in _chunks(gate_up):
            gate, e, up = _parts(gate_up[rows])
            flat[rows] = e.add_(1).reciprocal_().mul_(gate).mul_(up)
        return out

    @staticmethod
    def backward(ctx, dy):
        (gate_up,) = ctx.saved_tensors
        grad = torch.empty_like(gate_up)
        dy, gate_up, flat = dy.flatten(0, -2), gate_up.flatten(0, -2), grad.flatten(0, -2)
        for rows in _chunks(gate_up):
            gate, e, up = _parts(gate_up[rows])
            sigmoid = (e + 1).reciprocal_()
            dgate, dup = flat[rows].chunk(2, -1)
            dy32 = dy[rows].to(gate.dtype)
            gelu = gate * sigmoid
            dup.copy_(gelu * dy32)
            z_slope = gate.square_().mul_(3 * _CUBIC * _SLOPE).add_(_SLOPE)
            # e·σ is 1 − σ, without the digits that a difference near 0 would lose
            slope = gelu.mul_(e.mul_(sigmoid)).mul_(z_slope).add_(sigmoid)
            dgate.copy_(slope.mul_(up).mul_(dy32))
        return grad


def _parts(gate_up_RC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gate, exp(−z) and up, in fp32 (fp64). σ is 1 / (1 + exp(−z)): torch's own sigmoid rounds the
    rest of a vector differently, so that the bits of a row would depend on where it lies
    (swiglu.py)."""
    wide = compute_dtype(gate_up_RC.dtype)
    gate, up = (x.to(wide, copy=True) for x in gate_up_RC.chunk(2, -1))
    z = gate.square().mul_(_CUBIC).add_(1).mul_(gate).mul_(_SLOPE)
    return gate, z.neg_().exp_().clamp_(max=_LARGEST), up


def _chunks(x_RC: Tensor) -> list[slice]:
    """Rows a chunk, so that the fp32 intermediates stay in the processor's cache."""
    step = len(x_RC)
    if x_RC.device.type == "cpu":
        step = max(2, _CHUNK_ELEMENTS // x_RC.shape[1])
    return [slice(lo, lo + step) for lo in range(0, len(x_RC), max(1, step))]
