"""SwiGLU: silu(gate) · up, where one matmul produced gate and up side by side (`[tokens, 2F]`).

With σ = sigmoid(gate) and s = gate·σ: y = s·up, and backwards

    dup = dy·s,   dgate = dy·up·(σ + s − s·σ)

Computed in fp32, rounded once. The backward pass keeps `gate_up` alone. On a CPU each is one pass
of C++ (`cpp/rows.h`, `cpp/rows_gradient.h`), on a GPU of Triton (`triton/swiglu.py`), elsewhere
PyTorch's ops (`torch/swiglu.py`, with `swiglu_ref`).
"""

import torch
from torch import Tensor

from kernels.backend import Backend, check_tensors, chosen, resolve, use_native, use_triton
from kernels.cpp import ops as cpp_ops

_FORWARD = {"triton": "kernels.triton.swiglu:forward", "torch": "kernels.torch.swiglu:forward"}
_BACKWARD = {"triton": "kernels.triton.swiglu:backward", "torch": "kernels.torch.swiglu:backward"}


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, path, overwrite):
        ctx.save_for_backward(gate_up)
        ctx.path, ctx.overwrite = path, overwrite
        return cpp_ops.swiglu(gate_up) if path == "cpp" else resolve(_FORWARD[path])(gate_up)

    @staticmethod
    def backward(ctx, dy):
        (gate_up,) = ctx.saved_tensors
        if ctx.path == "cpp":
            return cpp_ops.swiglu_gradient(dy, gate_up), None, None
        return resolve(_BACKWARD[ctx.path])(dy, gate_up, ctx.overwrite), None, None


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
    return _SwiGLU.apply(gate_up_T2F, chosen(on_triton, is_native), overwrite_gate_up)
