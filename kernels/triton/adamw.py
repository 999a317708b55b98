"""Triton kernels of `adamw`: a program takes one chunk of one tensor, whose addresses it reads from
the table. The norm writes a partial sum a chunk; one program adds them in order, in fp64."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tensor_table import CHUNK, TensorTable
from kernels.triton.launch import launch

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
def _load(ptr, at, end, IS_WHOLE: tl.constexpr):
    """fp32. A mask would forbid 16-byte loads, as nothing is known about a size read from memory:
    only the last chunk of a tensor has one."""
    if IS_WHOLE:
        return tl.load(ptr + at).to(tl.float32)
    return tl.load(ptr + at, at < end, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, at, end, x, IS_WHOLE: tl.constexpr):
    if IS_WHOLE:
        tl.store(ptr + at, x)
    else:
        tl.store(ptr + at, x, at < end)


@triton.jit
def _update_chunk(
    p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, first, end, scale, lr, rest1, beta2, rest2, eps,
    weight_decay, correction1, correction2, P_DTYPE: tl.constexpr, HAS_MASTER: tl.constexpr,
    IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = _load(g_ptr, at, end, IS_WHOLE) * scale
        m = _load(m_ptr, at, end, IS_WHOLE)
        v = _load(v_ptr, at, end, IS_WHOLE)
        w = _load(w_ptr, at, end, IS_WHOLE)
        m = m + (g - m) * rest1
        v = beta2 * v + rest2 * g * g
        root = tl.sqrt_rn(v) / correction2 + eps
        w = w - lr * (weight_decay * w + (m / correction1) / root)
        _store(m_ptr, at, end, m, IS_WHOLE)
        _store(v_ptr, at, end, v, IS_WHOLE)
        _store(w_ptr, at, end, w, IS_WHOLE)
        if HAS_MASTER:
            _store(p_ptr, at, end, w.to(P_DTYPE), IS_WHOLE)


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
    if first + CHUNK <= size:
        _update_chunk(
            p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, first, first + CHUNK, scale, lr, rest1, beta2,
            rest2, eps, weight_decay, correction1, correction2, P_DTYPE, HAS_MASTER, True, BLOCK,
        )  # fmt: skip
    else:
        _update_chunk(
            p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, first, size, scale, lr, rest1, beta2, rest2, eps,
            weight_decay, correction1, correction2, P_DTYPE, HAS_MASTER, False, BLOCK,
        )  # fmt: skip


@triton.jit
def _sum_chunk(x_ptr, first, end, IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(first, end, BLOCK):
        x = _load(x_ptr, start + tl.arange(0, BLOCK), end, IS_WHOLE)
        total += x * x
    return tl.sum(total, 0)


def step(
    table: TensorTable, scale: Tensor, lr: float, betas: tuple[float, float], eps: float,
    weight_decay: float, step: int, has_master: bool,
) -> None:  # fmt: skip
    """Computes what needs fp64: 1 − 0.999 in fp32 is off by 1e-5 of itself."""
    if not table.num_chunks:
        return
    params, grads = table.dtypes[:2]
    launch(adamw_kernel, (table.num_chunks,))(
        table.address, table.sizes, table.chunks, scale, table.num_tensors, lr, 1 - betas[0],
        betas[1], 1 - betas[1], eps, weight_decay, 1 - betas[0] ** step,
        (1 - betas[1] ** step) ** 0.5, P_DTYPE=_TL[params], G_DTYPE=_TL[grads],
        HAS_MASTER=has_master, IS_ALIGNED=table.is_aligned, CHUNK=CHUNK, BLOCK=_BLOCK,
    )  # fmt: skip
