"""SwiGLU: silu(gate) · up, where one matmul produced gate and up side by side (`[tokens, 2F]`).

With σ = sigmoid(gate) and s = gate·σ: y = s·up, and backwards

    dup = dy·s,   dgate = dy·up·(σ + s − s·σ)

Computed in fp32, rounded once. The backward pass keeps `gate_up` alone. On a CPU each is one pass
of C++ (`cpp/rows.h`, `cpp/rows_gradient.h`), or PyTorch's ops.
"""

import torch
from torch import Tensor

from kernels.backend import Backend, check_tensors, compute_dtype, use_native, use_triton
from kernels.cpp import ops as cpp_ops

_CHUNK_ELEMENTS = 1 << 18


def swiglu_ref(gate_up_T2F: Tensor) -> Tensor:
    """The definition, differentiable by autograd alone."""
    gate, up = gate_up_T2F.to(compute_dtype(gate_up_T2F.dtype)).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up_T2F.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, on_triton, overwrite, is_native):
        ctx.save_for_backward(gate_up)
        ctx.on_triton, ctx.overwrite, ctx.is_native = on_triton, overwrite, is_native
        if is_native:
            return cpp_ops.swiglu(gate_up)
        if not on_triton:
            return _forward(gate_up)
        from kernels.triton import swiglu as triton_ops

        return triton_ops.forward(gate_up)

    @staticmethod
    def backward(ctx, dy):
        (gate_up,) = ctx.saved_tensors
        if ctx.is_native:
            return cpp_ops.swiglu_gradient(dy, gate_up), None, None, None
        if not ctx.on_triton:
            return _backward(dy, gate_up), None, None, None
        from kernels.triton import swiglu as triton_ops

        return triton_ops.backward(dy, gate_up, ctx.overwrite), None, None, None


def _forward(gate_up: Tensor) -> Tensor:
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    gate_up, flat = gate_up.flatten(0, -2), out.flatten(0, -2)
    for rows in _chunks(gate_up):
        gate, sigmoid, up = _parts(gate_up[rows])
        flat[rows] = gate.mul_(sigmoid).mul_(up)
    return out


def _backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    grad = torch.empty_like(gate_up)
    dy, gate_up, flat = dy.flatten(0, -2), gate_up.flatten(0, -2), grad.flatten(0, -2)
    for rows in _chunks(gate_up):
        gate, sigmoid, up = _parts(gate_up[rows])
        dgate, dup = flat[rows].chunk(2, -1)
        dy32 = dy[rows].to(gate.dtype)
        silu = gate.mul_(sigmoid)
        slope = torch.addcmul(silu, silu, sigmoid, value=-1).add_(sigmoid)
        dup.copy_(silu.mul_(dy32))
        dgate.copy_(slope.mul_(up).mul_(dy32))
    return grad


def _chunks(x_RC: Tensor) -> list[slice]:
    """Rows a chunk, so that the fp32 intermediates stay in the processor's cache."""
    step = len(x_RC)
    if x_RC.device.type == "cpu":
        step = max(2, _CHUNK_ELEMENTS // x_RC.shape[1] // 2 * 2)
    return [slice(lo, lo + step) for lo in range(0, len(x_RC), max(1, step))]


def _parts(gate_up_RC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gate (a copy, to overwrite), its sigmoid and up, in fp32 (fp64)."""
    gate, up = gate_up_RC.chunk(2, -1)
    wide = compute_dtype(gate_up_RC.dtype)
    num_rows, width = gate.shape
    padded = torch.empty(num_rows + num_rows % 2, width, dtype=wide, device=gate.device)
    padded[:num_rows] = gate
    padded[num_rows:] = 0
    return padded[:num_rows], _sigmoid(padded)[:num_rows], up.to(wide)


def _sigmoid(x_RC: Tensor) -> Tensor:
    """sigmoid with the same bits wherever a row lies; an even number of rows.

    torch's own is vectorised in runs of 32 elements and rounds the rest of a run, and of a
    thread's share, differently: whole rows on one or two threads never leave a rest. Otherwise
    it is written with `exp`, which has no such seam and takes three times as long.
    """
    if x_RC.device.type != "cpu" or (x_RC.shape[1] % 32 == 0 and torch.get_num_threads() <= 2):
        return torch.sigmoid(x_RC)
    return x_RC.neg().exp_().add_(1).reciprocal_()


def swiglu(
    gate_up_T2F: Tensor, *, overwrite_gate_up: bool = False, backend: Backend = "auto"
) -> Tensor:
    """silu(first half) · second half of the last dimension.

    `overwrite_gate_up` lets a Triton backward pass write the gradient over `gate_up`, which saves
    the largest buffer of a layer: only where nothing reads it again. A second backward pass then
    raises. The PyTorch path ignores it.
    """
    if gate_up_T2F.shape[-1] % 2:
        raise ValueError(f"gate_up: last dimension {gate_up_T2F.shape[-1]} must be even")
    on_triton = use_triton(backend, gate_up_T2F, has_cpp=True)
    check_tensors(gate_up_T2F, "gate_up", on_triton)
    is_native = use_native(backend, gate_up_T2F)
    if is_native and not torch.is_grad_enabled():  # autograd's bookkeeping takes longer than a row
        return cpp_ops.swiglu(gate_up_T2F)
    return _SwiGLU.apply(gate_up_T2F, on_triton, overwrite_gate_up, is_native)
