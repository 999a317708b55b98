"""Must be rejected: a row times its stride in 32 bits, from rows of 131,072 on rows of 16,384."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from gate_case import GateCase


@triton.jit
def planted_narrow_kernel(x_ptr, stride, N: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, N)
    tl.store(x_ptr + row * stride + cols, cols)


@triton.jit
def planted_wide_kernel(x_ptr, stride, N: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    tl.store(x_ptr + row * stride + cols, cols)


def cases() -> Iterator[GateCase]:
    x = torch.empty(8, 64, dtype=torch.int32, device="meta")
    yield GateCase("planted-narrow", lambda: planted_narrow_kernel[(8,)](x, 64, N=64))
    yield GateCase("planted-wide", lambda: planted_wide_kernel[(8,)](x, 64, N=64))
