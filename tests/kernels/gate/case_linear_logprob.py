"""Gate cases of linear_logprob: Qwen3's vocabulary, and an odd one."""

from collections.abc import Callable, Iterator

import torch
from gate_case import GateCase

from kernels import linear_logprob


def inputs(
    vocab: int, width: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.empty(4096, width, dtype=dtype, requires_grad=True)
    weight = torch.empty(vocab, width, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.empty(4096, dtype=torch.int64)


def logprob(
    vocab: int, has_entropy: bool, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], object]:
    def call() -> object:
        hidden, weight, ids = inputs(vocab, 2560, dtype)
        out = linear_logprob(hidden, weight, ids, return_entropy=has_entropy, backend="triton")
        outs = out if isinstance(out, tuple) else (out,)
        return torch.autograd.grad(outs, (hidden, weight), [torch.empty_like(o) for o in outs])

    return call


def cases() -> Iterator[GateCase]:
    need = ("ld128",)
    yield GateCase("linear-logprob", logprob(151936, False), need=need)
    yield GateCase("linear-logprob-entropy", logprob(151936, True), need=need)
    yield GateCase("linear-logprob-odd-vocabulary", logprob(49153, True), need=need)
    yield GateCase("linear-logprob-fp32", logprob(151936, True, torch.float32), need=need)
