"""Must be rejected: rows of 4095 are read an element at a time, so they are summed in another order
than rows of 4096. With an odd vocabulary a rollout's log-probs were the trainer's but for that.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from gate_case import GateCase


@triton.jit
def planted_sum_kernel(x_ptr, y_ptr, stride, N: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    x = tl.load(x_ptr + row * stride + cols, cols < stride, other=0.0)
    tl.store(y_ptr + row, tl.sum(x.to(tl.float32), 0))


def add_up(width: int) -> None:
    x, y = torch.empty(64, width, dtype=torch.bfloat16), torch.empty(64)
    planted_sum_kernel[(64,)](x, y, x.stride(0), N=4096)


def cases() -> Iterator[GateCase]:
    for name, width in (("planted-sums", 4096), ("planted-sums-again", 2048)):
        yield GateCase(name, lambda w=width: add_up(w), alike="planted")
    yield GateCase("planted-other-sums", lambda: add_up(4095), alike="planted")
