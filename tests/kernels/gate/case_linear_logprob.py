"""Gate cases of linear_logprob and logits_logprob, the trainer's and the rollouts': Qwen3's
vocabulary, and an odd one, whose rows begin at odd addresses in a rollout."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from gate_case import GateCase

from kernels import linear_logprob, logits_logprob


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


def sampled(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    ids = torch.empty(rows, dtype=torch.int64)
    return logits_logprob(torch.empty(rows, vocab, dtype=dtype), ids, backend="triton")


def cases() -> Iterator[GateCase]:
    bf16 = torch.bfloat16

    def case(name: str, call: Callable[[], object], dtype: torch.dtype = bf16) -> GateCase:
        return GateCase(name, call, need=("ld128",), alike=f"log-probs of {dtype}")

    yield case("linear-logprob", logprob(151936, False))
    yield case("linear-logprob-entropy", logprob(151936, True))
    yield case("linear-logprob-odd-vocabulary", logprob(49153, True))
    yield case("linear-logprob-fp32", logprob(151936, True, torch.float32), torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        for rows, vocab in ((256, 151936), (256, 49153), (1, 49153), (1, 50257)):
            name = f"logits-logprob-{rows}-{vocab}-{str(dtype)[6:]}"
            yield case(name, partial(sampled, rows, vocab, dtype), dtype)
