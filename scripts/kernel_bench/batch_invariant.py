"""Benchmark rows of the batch-invariant ops; the peers are the fastest PyTorch has, which varies
its algorithm with the batch: the ratio is the price of invariance."""

from collections.abc import Iterator

import torch
from kernel_bench.case import BenchCase, Step, compiled

from kernels import linear, log_softmax_batch_invariant
from kernels.logits.batch_invariant import log_softmax_batch_invariant_ref

SHAPES = {"qwen3-0.6b": (1024, 6144), "qwen3-4b": (2560, 19456), "llama-3-8b": (4096, 28672)}


def cases(device: str) -> Iterator[BenchCase]:
    is_gpu = device == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    for model, (width, out) in SHAPES.items() if is_gpu else [("reduced", (512, 1024))]:
        for rows in (8192, 64) if is_gpu else (64,):
            a = torch.randn(rows, width, device=device, dtype=dtype)
            w = torch.randn(out, width, device=device, dtype=dtype)
            yield BenchCase(
                name="linear_batch_invariant", op="linear",
                shape=f"{model} {rows}x{width}x{out}", dtype=str(dtype)[6:],
                run=lambda a=a, w=w: linear(a, w, batch_invariant=True),
                peers={"eager": lambda a=a, w=w: a @ w.t()},
                flops=2 * rows * width * out,
            )  # fmt: skip
    rows, vocab = (2048, 151936) if is_gpu else (32, 49152)
    x = torch.randn(rows, vocab, device=device, dtype=dtype)
    slow: dict[str, Step] = {}
    if is_gpu:
        made = compiled(log_softmax_batch_invariant_ref)
        slow["compile"] = lambda: made(x)
    yield BenchCase(
        name="log_softmax_batch_invariant", op="log_softmax_batch_invariant",
        shape=f"{rows}x{vocab}", dtype=str(dtype)[6:],
        run=lambda: log_softmax_batch_invariant(x),
        peers={"eager": lambda: log_softmax_batch_invariant_ref(x)}, slow_peers=slow,
        bytes=x.nbytes + 4 * x.numel(),
    )  # fmt: skip
