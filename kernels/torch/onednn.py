"""oneDNN's products, as PyTorch exposes them: over a weight that was laid out once, and plain.

What the library can do depends on the processor and on the environment (ONEDNN_MAX_CPU_ISA,
ATEN_CPU_CAPABILITY), and it says so by raising. So each ability is tried once, on a small matrix.
Where it does not multiply bf16, operands are widened to fp32, which is exact, and the result is
rounded: up to eight times as fast as PyTorch's own bf16 loops there, and more accurate.

The packed product gives a row the same bits in every batch of two rows or more, and PyTorch's
attention a query: but not in a matrix unit (AMX), which is therefore left alone
(`kernels/linear.py` says so to oneDNN).
"""

import functools
import platform

import torch
from torch import Tensor

_PACK_ROWS = 64  # oneDNN's hint of the batch size; the layout, so the bits, do not depend on it
_PROBE_SIZE = 32


@functools.cache
def can_multiply(dtype: torch.dtype) -> bool:
    """True if oneDNN repacks a weight of this dtype and multiplies by it."""
    x = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype)
    try:
        y = _inner_product(x, _reorder(x))
    except (RuntimeError, AttributeError):  # no such instructions; a PyTorch without oneDNN
        return False
    return bool((y == _PROBE_SIZE).all())


@functools.cache
def is_bf16_fast() -> bool:
    """True if bf16 is multiplied by instructions made for it. (AVX-512 without them: by widening
    inside of oneDNN, slower than fp32.)"""
    if platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_avx512_bf16_supported():
        return False
    return can_multiply(torch.bfloat16)


def pack(weight_OI: Tensor) -> Tensor:
    """A copy in oneDNN's layout; of a bf16 weight in fp32 where there is no bf16 product. Ask
    `can_multiply` in fp32 before."""
    weight = weight_OI.detach().contiguous()
    return _reorder(weight if can_multiply(weight.dtype) else weight.float())


def linear(x_TI: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias from `pack(weight)`, in x's dtype."""
    rows = x_TI.shape[0]
    x = x_TI.to(packed.dtype)
    if rows == 1:  # one row takes another path of oneDNN, rarely other bits in bf16 too
        x = x.expand(2, -1).contiguous()
    bias = None if bias is None else bias.to(packed.dtype)
    return _inner_product(x, packed, bias)[:rows].to(x_TI.dtype)


def matmul(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a · b in fp32. Factors in bf16 are widened."""
    return _inner_product(a_MK.float(), b_KN.float().t())


def _reorder(weight_OI: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACK_ROWS)


def _inner_product(x_TI: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_TI, weight, bias, "none", [], "")
