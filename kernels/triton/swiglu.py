"""Triton kernels of `swiglu`: one program a row and a run of columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch

_BLOCK = 1024


@triton.jit
def swiglu_forward_kernel(x_ptr, y_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(x_ptr + row * 2 * width + cols, mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + cols, mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * width + cols, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def swiglu_backward_kernel(dy_ptr, x_ptr, dx_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(x_ptr + row * 2 * width + cols, mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + cols, mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + cols, mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dy * up * (sigmoid + silu - silu * sigmoid)
    out = dx_ptr + row * 2 * width + cols
    tl.store(out, dgate.to(dx_ptr.dtype.element_ty), mask)
    tl.store(out + width, (dy * silu).to(dx_ptr.dtype.element_ty), mask)


def _grid(x: Tensor, width: int) -> tuple[int, int]:
    return x.numel() // (2 * width), triton.cdiv(width, _BLOCK)


def forward(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], width)
    if y.numel():
        launch(swiglu_forward_kernel, _grid(gate_up, width))(gate_up, y, width, BLOCK=_BLOCK)
    return y


def backward(dy: Tensor, gate_up: Tensor, overwrite: bool = False) -> Tensor:
    """The gradient of gate_up, in its own memory if asked: a program reads what it overwrites."""
    dy, gate_up = dy.contiguous(), gate_up.contiguous()
    grad = gate_up if overwrite else torch.empty_like(gate_up)
    if overwrite:
        torch.autograd.graph.increment_version(gate_up)
    if dy.numel():
        width = dy.shape[-1]
        launch(swiglu_backward_kernel, _grid(gate_up, width))(
            dy, gate_up, grad, width, BLOCK=_BLOCK
        )
    return grad
