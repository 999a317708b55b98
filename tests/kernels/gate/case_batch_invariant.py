"""Gate cases of the batch-invariant ops, at layers and the vocabulary of Qwen3-4B."""

from collections.abc import Callable, Iterator

import torch
from gate_case import GateCase

from kernels import linear, log_softmax_batch_invariant


def matmul(rows: int, dtype: torch.dtype) -> Callable[[], object]:
    def call() -> object:
        a = torch.empty(rows, 2560, dtype=dtype, requires_grad=True)
        w = torch.empty(9728, 2560, dtype=dtype, requires_grad=True)
        y = linear(a, w, batch_invariant=True, backend="triton")
        return torch.autograd.grad(y, (a, w), torch.empty_like(y))

    return call


def log_softmax(dtype: torch.dtype) -> object:
    x = torch.empty(512, 151936, dtype=dtype, requires_grad=True)
    y = log_softmax_batch_invariant(x, backend="triton")
    return torch.autograd.grad(y, x, torch.empty_like(y))


def cases() -> Iterator[GateCase]:
    for rows in (4096, 8):
        need = ("wgmma", "ld128")
        yield GateCase(f"invariant-matmul-{rows}", matmul(rows, torch.bfloat16), need=need)
    yield GateCase("invariant-matmul-fp32", matmul(4096, torch.float32))
    for dtype in (torch.bfloat16, torch.float32):
        yield GateCase(
            f"invariant-log-softmax-{str(dtype)[6:]}", lambda d=dtype: log_softmax(d), ("ld128",)
        )
