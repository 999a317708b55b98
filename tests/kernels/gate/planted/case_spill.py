"""Must be rejected: a 128 x 256 fp32 accumulator on four warps needs more registers than exist."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from gate_case import GateCase


@triton.jit
def planted_matmul_kernel(
    a_ptr, b_ptr, c_ptr, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    rows, cols, inner = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    acc = tl.zeros([M, N], dtype=tl.float32)
    for start in range(0, k, K):
        a = tl.load(a_ptr + rows * k + (start + inner)[None, :])
        b = tl.load(b_ptr + (start + inner)[:, None] * N + cols)
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + rows * N + cols, acc)


def multiply() -> None:
    a, b = torch.empty(128, 512, dtype=torch.bfloat16), torch.empty(512, 256, dtype=torch.bfloat16)
    planted_matmul_kernel[(1,)](a, b, torch.empty(128, 256), 512, M=128, N=256, K=64, num_warps=4)


def cases() -> Iterator[GateCase]:
    yield GateCase("planted-spill", multiply, need=("wgmma",))
