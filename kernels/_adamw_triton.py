"""Triton kernels of `adamw`: a program takes one chunk of one tensor, whose addresses it reads from
the table. The norm writes a partial sum a chunk; one program adds them in order, in fp64."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adamw import CHUNK, TensorTable

_BLOCK = 1024
_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    if IS_ALIGNED:
        address = tl.multiple_of(address, 16)
    pointer = address.to(tl.pointer_type(DTYPE))
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def adamw_kernel(
    address_ptr, size_ptr, chunk_ptr, scale_ptr, num_tensors, lr, rest1, beta2, rest2, eps,
    weight_decay, correction1, correction2, P_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr,
    HAS_MASTER: tl.constexpr, IS_ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor = tl.load(chunk_ptr + 2 * tl.program_id(0))
    first = tl.load(chunk_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    size = tl.load(size_ptr + tensor)
    scale = tl.load(scale_ptr)
    p_ptr = _pointer(tl.load(address_ptr + tensor), P_DTYPE, IS_ALIGNED)
    g_ptr = _pointer(tl.load(address_ptr + num_tensors + tensor), G_DTYPE, IS_ALIGNED)
    m_ptr = _pointer(tl.load(address_ptr + 2 * num_tensors + tensor), tl.float32, IS_ALIGNED)
    v_ptr = _pointer(tl.load(address_ptr + 3 * num_tensors + tensor), tl.float32, IS_ALIGNED)
    w_ptr = _pointer(tl.load(address_ptr + 4 * num_tensors + tensor), tl.float32, IS_ALIGNED)
    for start in range(0, CHUNK, BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        mask = at < size
        g = tl.load(g_ptr + at, mask, other=0.0).to(tl.float32) * scale
        m = tl.load(m_ptr + at, mask, other=0.0)
        v = tl.load(v_ptr + at, mask, other=0.0)
        w = tl.load(w_ptr + at, mask, other=0.0)
        m = m + (g - m) * rest1
        v = beta2 * v + rest2 * g * g
        root = tl.sqrt_rn(v) / correction2 + eps
        w = w - lr * (weight_decay * w + (m / correction1) / root)
        tl.store(m_ptr + at, m, mask)
        tl.store(v_ptr + at, v, mask)
        tl.store(w_ptr + at, w, mask)
        if HAS_MASTER:
            tl.store(p_ptr + at, w.to(P_DTYPE), mask)


@triton.jit
def sum_of_squares_kernel(
    address_ptr, size_ptr, chunk_ptr, partial_ptr, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor = tl.load(chunk_ptr + 2 * tl.program_id(0))
    first = tl.load(chunk_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    size = tl.load(size_ptr + tensor)
    x_ptr = _pointer(tl.load(address_ptr + tensor), DTYPE, IS_ALIGNED)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, CHUNK, BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, at < size, other=0.0).to(tl.float32)
        total += x * x
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def finish_norm_kernel(partial_ptr, out_ptr, num_partials, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for start in range(0, num_partials, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + at, at < num_partials, other=0.0).to(tl.float64)
    tl.store(out_ptr, tl.sqrt(tl.sum(total, 0)).to(tl.float32))


def l2norm(table: TensorTable, device: torch.device) -> Tensor:
    partial = torch.empty(table.num_chunks, dtype=torch.float32, device=device)
    norm = torch.empty((), dtype=torch.float32, device=device)
    if table.num_chunks:
        sum_of_squares_kernel[(table.num_chunks,)](
            table.address, table.sizes, table.chunks, partial, DTYPE=_TL[table.dtypes[0]],
            IS_ALIGNED=table.is_aligned, CHUNK=CHUNK, BLOCK=_BLOCK,
        )  # fmt: skip
    finish_norm_kernel[(1,)](partial, norm, table.num_chunks, BLOCK=_BLOCK)
    return norm


def step(
    table: TensorTable, scale: Tensor, lr: float, betas: tuple[float, float], eps: float,
    weight_decay: float, step: int, has_master: bool,
) -> None:  # fmt: skip
    """What needs fp64 is computed here: 1 − 0.999 in fp32 is off by 1e-5 of itself."""
    if not table.num_chunks:
        return
    params, grads = table.dtypes[:2]
    adamw_kernel[(table.num_chunks,)](
        table.address, table.sizes, table.chunks, scale, table.num_tensors, lr, 1 - betas[0],
        betas[1], 1 - betas[1], eps, weight_decay, 1 - betas[0] ** step,
        (1 - betas[1] ** step) ** 0.5, P_DTYPE=_TL[params], G_DTYPE=_TL[grads],
        HAS_MASTER=has_master, IS_ALIGNED=table.is_aligned, CHUNK=CHUNK, BLOCK=_BLOCK,
    )  # fmt: skip
