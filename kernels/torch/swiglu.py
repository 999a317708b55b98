"""SwiGLU in PyTorch: the definition, and the passes of swiglu.py where no kernel runs."""

import torch
from torch import Tensor

from kernels.backend import compute_dtype

_CHUNK_ELEMENTS = 1 << 18


def swiglu_ref(gate_up_T2F: Tensor) -> Tensor:
    """The definition, differentiable by autograd alone."""
    gate, up = gate_up_T2F.to(compute_dtype(gate_up_T2F.dtype)).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up_T2F.dtype)


def forward(gate_up: Tensor) -> Tensor:
    """silu(gate) · up by chunks of rows."""
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    gate_up, flat = gate_up.flatten(0, -2), out.flatten(0, -2)
    for rows in _chunks(gate_up):
        gate, sigmoid, up = _parts(gate_up[rows])
        flat[rows] = gate.mul_(sigmoid).mul_(up)
    return out


def backward(dy: Tensor, gate_up: Tensor, overwrite: bool = False) -> Tensor:
    """The gradient by `gate_up`, in memory of its own whatever `overwrite` says."""
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
