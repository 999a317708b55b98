"""Must be rejected: s · scale − top is left to the compiler, which fuses it in the loop without a
mask and not in the loop with one. On an H100 that gave a rollout other log-probs than the trainer.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from gate_case import GateCase


@triton.jit
def _attention_kernel(x_ptr, y_ptr, n, full, scale, N: tl.constexpr, IS_FUSED: tl.constexpr):
    cols = tl.arange(0, N)
    total = tl.zeros([N], dtype=tl.float32)
    top = tl.load(y_ptr)
    for start in range(0, full, N):
        x = tl.load(x_ptr + start + cols)
        total += tl.exp2(tl.fma(x, scale, -top) if IS_FUSED else x * scale - top)
    for start in range(full, n, N):
        x = tl.load(x_ptr + start + cols)
        is_seen = start + cols < n
        if IS_FUSED:
            total += tl.exp2(tl.fma(tl.where(is_seen, x, -float("inf")), scale, -top))
        else:
            total += tl.exp2(tl.where(is_seen, x * scale, -float("inf")) - top)
            total += tl.exp2(tl.where(is_seen, x + scale, -float("inf")) - top)
    tl.store(y_ptr + cols, total)


def run(is_fused: bool) -> None:
    x, y = torch.empty(8192), torch.empty(8192)
    _attention_kernel[(1,)](x, y, 8000, 4096, 0.5, N=256, IS_FUSED=is_fused)


def cases() -> Iterator[GateCase]:
    yield GateCase("planted-fused", lambda: run(True))
    yield GateCase("planted-loose", lambda: run(False))
