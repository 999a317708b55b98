"""SwiGLU: silu(gate) · up, where one matmul produced gate and up side by side (`[tokens, 2F]`).

Computed in fp32, rounded once. The backward pass keeps `gate_up` alone. On a CPU the sigmoid is
written with `exp`: torch's own vectorised `sigmoid` and `silu` round the last few elements of a
run differently, so a token's bits would depend on where in the batch it lies.
"""

import torch
from torch import Tensor

from kernels._dispatch import Backend, compute_dtype, use_triton

_CHUNK_ELEMENTS = 1 << 18


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
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    gate_up, flat = gate_up.flatten(0, -2), out.flatten(0, -2)
    for rows in _chunks(gate_up):
        gate, up = _halves(gate_up[rows])
        flat[rows] = gate.div_(gate.neg().exp_().add_(1)).mul_(up)
    return out


def _backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    grad = torch.empty_like(gate_up)
    dy, gate_up, flat = dy.flatten(0, -2), gate_up.flatten(0, -2), grad.flatten(0, -2)
    for rows in _chunks(gate_up):
        gate, up = _halves(gate_up[rows])
        dgate, dup = flat[rows].chunk(2, -1)
        dy32 = dy[rows].to(gate.dtype)
        sigmoid = gate.neg().exp_().add_(1).reciprocal_()
        silu = gate.mul_(sigmoid)
        dup.copy_(silu * dy32)
        slope = torch.addcmul(silu, silu, sigmoid, value=-1).add_(sigmoid)
        dgate.copy_(slope.mul_(up).mul_(dy32))
    return grad


def _chunks(x_RC: Tensor) -> list[slice]:
    """Rows a chunk, so that the fp32 intermediates stay in the processor's cache."""
    step = max(1, _CHUNK_ELEMENTS // x_RC.shape[1]) if x_RC.device.type == "cpu" else len(x_RC)
    return [slice(lo, lo + step) for lo in range(0, len(x_RC), max(1, step))]


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gate (a copy, to overwrite) and up, in fp32 (fp64)."""
    gate, up = gate_up.chunk(2, -1)
    wide = compute_dtype(gate_up.dtype)
    return gate.to(wide, copy=True), up.to(wide)


def swiglu(gate_up_T2F: Tensor, *, backend: Backend = "auto") -> Tensor:
    """silu(first half) · second half of the last dimension."""
    if gate_up_T2F.shape[-1] % 2:
        raise ValueError(f"gate_up: last dimension {gate_up_T2F.shape[-1]} must be even")
    use_triton(backend, gate_up_T2F)
    if torch.is_grad_enabled() and gate_up_T2F.requires_grad:
        return _SwiGLU.apply(gate_up_T2F)
    return _forward(gate_up_T2F)
