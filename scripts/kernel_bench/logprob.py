"""Benchmark rows of linear_logprob and of its mean as a cross-entropy, forward and backward.

FLOP: 2 · N · H · V forward; backward the same again for the logits and twice for both gradients.
The peer "eager" holds tokens x vocabulary; "compile-chunked" is the same chunks in torch.compile.
"""

from collections.abc import Iterator

import torch
from kernel_bench import _peers
from kernel_bench.case import BenchCase, Op, backward_of, compiled, forward_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels import linear_logprob, pack_weight

MODELS = {"qwen3-0.6b": (1024, 151936), "qwen3-4b": (2560, 151936), "llama-3-8b": (4096, 128256)}


def plain(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    logps = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return logps.gather(1, ids.unsqueeze(1)).squeeze(1)


def cross_entropy(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), ids)


def chunked(ids: Tensor, chunk: int) -> Op:
    """Plain PyTorch, chunk by chunk, each compiled and computed again in the backward pass."""
    piece = compiled(plain)

    def op(hidden: Tensor, weight: Tensor) -> Tensor:
        pairs = zip(hidden.split(chunk), ids.split(chunk), strict=True)
        parts = [checkpoint(piece, h, weight, t, use_reentrant=False) for h, t in pairs]
        return torch.cat(parts)

    return op


def liger_loss(ids: Tensor) -> Op:
    def op(hidden: Tensor, weight: Tensor) -> Tensor:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        loss: Tensor = liger_fused_linear_cross_entropy(hidden, weight, ids)
        return loss

    return op


def rows(
    op: str, shape: str, ours: Op, peers: dict[str, Op], slow: dict[str, Op],
    leaves: list[Tensor], flops: int,
) -> Iterator[BenchCase]:  # fmt: skip
    dtype = str(leaves[0].dtype)[6:]
    for name, step_of, times in (("forward", forward_of, 1), ("backward", backward_of, 3)):
        yield BenchCase(
            name=f"{op}-{name}", op=op, shape=shape, dtype=dtype, run=step_of(ours, leaves),
            peers={peer: step_of(f, leaves) for peer, f in peers.items()}, flops=times * flops,
            slow_peers={peer: step_of(f, leaves) for peer, f in slow.items()},
        )  # fmt: skip


def cases(device: str) -> Iterator[BenchCase]:
    is_gpu = device == "cuda"
    num_tokens = 8192 if is_gpu else 256
    dtype = torch.bfloat16 if is_gpu else torch.float32
    models = MODELS if is_gpu else {"qwen3-0.6b (vocabulary / 16)": (1024, 151936 // 16)}
    for model, (width, vocab) in models.items():
        hidden = torch.randn(num_tokens, width, device=device).to(dtype).requires_grad_()
        weight = (torch.randn(vocab, width, device=device) * width**-0.5).to(dtype)
        leaves = [hidden, weight.requires_grad_()]
        ids = torch.randint(0, vocab, (num_tokens,), device=device)
        packed = pack_weight(weight)  # a CPU engine keeps it; None on a GPU
        shape = f"{model} N={num_tokens} H={width} V={vocab}"
        flops = 2 * num_tokens * width * vocab
        is_middle = not is_gpu or model == "qwen3-4b"  # once: compiling takes its time
        slow: dict[str, Op] = {"compile-chunked": chunked(ids, 2048)} if is_gpu else {}
        yield from rows(
            "linear_logprob", shape,
            lambda h, w, t=ids, p=packed: linear_logprob(h, w, t, packed=p),
            {"eager": lambda h, w, t=ids: plain(h, w, t)}, slow if is_middle else {}, leaves, flops,
        )  # fmt: skip
        if not is_middle:
            continue
        peers: dict[str, Op] = {"eager": lambda h, w, t=ids: cross_entropy(h, w, t)}
        if _peers.has("liger"):
            peers["liger"] = liger_loss(ids)
        yield from rows(
            "cross_entropy", shape,
            lambda h, w, t=ids, p=packed: -linear_logprob(h, w, t, packed=p).mean(),
            peers, {}, leaves, flops,
        )  # fmt: skip
