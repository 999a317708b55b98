"""Benchmark rows of linear_logprob and linear_cross_entropy, forward and backward.

FLOP: 2 · N · H · V forward; backward the same again for the logits and twice for both gradients.
The peer "eager" holds tokens x vocabulary; "compile-chunked" is the same chunks in torch.compile.
"""

from collections.abc import Callable, Iterator

import torch
from kernel_bench.case import BenchCase
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels import linear_cross_entropy, linear_logprob
from kernels.linear_cross_entropy import linear_cross_entropy_ref

MODELS = {"qwen3-0.6b": (1024, 151936), "qwen3-4b": (2560, 151936), "llama-3-8b": (4096, 128256)}
Op = Callable[[Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    logps = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return logps.gather(1, ids.unsqueeze(1)).squeeze(1)


def chunked(ids: Tensor, chunk: int) -> Op:
    """Plain PyTorch, chunk by chunk, each compiled and computed again in the backward pass."""
    compiled = torch.compile(plain)

    def op(hidden: Tensor, weight: Tensor) -> Tensor:
        pairs = zip(hidden.split(chunk), ids.split(chunk), strict=True)
        parts = [checkpoint(compiled, h, weight, t, use_reentrant=False) for h, t in pairs]
        return torch.cat(parts)

    return op


def forward_of(op: Op, leaves: list[Tensor]) -> Callable[[], object]:
    plain = [x.detach() for x in leaves]
    return lambda: op(*plain)


def backward_of(op: Op, leaves: list[Tensor]) -> Callable[[], object]:
    out = op(*leaves)
    return lambda: torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)


def rows(
    op: str, shape: str, ours: Op, peers: dict[str, Op], leaves: list[Tensor], flops: int
) -> Iterator[BenchCase]:
    dtype = str(leaves[0].dtype)[6:]
    for name, time_of, times in (("forward", forward_of, 1), ("backward", backward_of, 3)):
        yield BenchCase(
            name=f"{op}-{name}", op=op, shape=shape, dtype=dtype, run=time_of(ours, leaves),
            peers={peer: time_of(f, leaves) for peer, f in peers.items()},
            bytes=None, flops=times * flops,
        )  # fmt: skip


def cases(device: str) -> Iterator[BenchCase]:
    is_gpu = device == "cuda"
    num_tokens = 8192 if is_gpu else 64
    dtype = torch.bfloat16 if is_gpu else torch.float32
    models = MODELS if is_gpu else {"qwen3-0.6b (vocabulary / 16)": (1024, 151936 // 16)}
    for model, (width, vocab) in models.items():
        hidden = torch.randn(num_tokens, width, device=device).to(dtype).requires_grad_()
        weight = (torch.randn(vocab, width, device=device) * width**-0.5).to(dtype)
        leaves = [hidden, weight.requires_grad_()]
        ids = torch.randint(0, vocab, (num_tokens,), device=device)
        shape = f"{model} N={num_tokens} H={width} V={vocab}"
        flops = 2 * num_tokens * width * vocab
        peers: dict[str, Op] = {"eager": lambda h, w, t=ids: plain(h, w, t)}
        if model == "qwen3-4b":  # once: compiling takes its time
            peers["compile-chunked"] = chunked(ids, 2048)
        yield from rows(
            "linear_logprob", shape, lambda h, w, t=ids: linear_logprob(h, w, t), peers, leaves,
            flops,
        )  # fmt: skip
        if model != "qwen3-4b":
            continue
        yield from rows(
            "linear_cross_entropy", shape, lambda h, w, t=ids: linear_cross_entropy(h, w, t),
            {"eager": lambda h, w, t=ids: linear_cross_entropy_ref(h, w, t)}, leaves, flops,
        )  # fmt: skip
