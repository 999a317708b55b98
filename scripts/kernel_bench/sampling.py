"""Benchmark rows of sample, apply_penalties_ and apply_token_bitmask_."""

from collections.abc import Callable, Iterator

import torch
from kernel_bench.case import BenchCase
from torch import Tensor

from kernels import apply_penalties_, apply_token_bitmask_, sample
from kernels.logits.sampling import apply_penalties_ref, apply_token_bitmask_ref

KINDS = {"plain": (0, 1.0), "top_k": (50, 1.0), "top_p": (0, 0.9), "top_k-top_p": (50, 0.9)}


def cases(device: str) -> Iterator[BenchCase]:
    is_gpu = device == "cuda"
    rows, vocab = (128, 131072) if is_gpu else (4, 8192)
    logits = 3 * torch.randn(rows, vocab, device=device)
    at = torch.arange(rows, device=device)
    shape, one_read = f"({rows}, {vocab})", logits.numel() * logits.element_size()
    for name, (top_k, top_p) in KINDS.items():
        yield BenchCase(
            name=f"sample-{name}", op="sample", shape=shape, dtype="float32",
            run=draw("auto", logits, at, top_k, top_p),
            peers={"eager": draw("torch", logits, at, top_k, top_p)},
            bytes=2 * one_read,
        )  # fmt: skip
    counts = torch.randint(0, 2, logits.shape, device=device, dtype=torch.int32)
    prompt = counts.bool()
    ones = torch.ones(rows, device=device)
    options = {"repetition": 1.1 * ones, "frequency": 0 * ones, "presence": 0 * ones}
    yield BenchCase(
        name="apply_penalties", op="apply_penalties", shape=shape, dtype="float32",
        run=lambda: apply_penalties_(logits, counts, prompt, **options),
        peers={"eager": lambda: apply_penalties_ref(logits, counts, prompt, **options)},
        bytes=logits.numel() * (4 + 4 + 4 + 1),
    )  # fmt: skip
    words = torch.full((rows, vocab // 32), 0x55555555, device=device, dtype=torch.int32)
    yield BenchCase(
        name="apply_token_bitmask", op="apply_token_bitmask", shape=shape, dtype="float32",
        run=lambda: apply_token_bitmask_(logits, words),
        peers={"eager": lambda: apply_token_bitmask_ref(logits, words)},
        bytes=one_read // 2 + words.numel() * 4,
    )  # fmt: skip


def draw(
    backend: str, logits: Tensor, at: Tensor, top_k: int, top_p: float
) -> Callable[[], object]:
    ones = torch.ones(len(at), device=at.device)
    k = (ones * top_k).int() if top_k else None
    p = ones * top_p if top_p < 1 else None
    return lambda: sample(logits, ones, k, p, None, at, at, backend=backend)
