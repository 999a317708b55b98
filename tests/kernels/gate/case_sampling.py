"""sample, apply_penalties_ and apply_token_bitmask_ at the vocabulary of Qwen3."""

from collections.abc import Iterator

import torch
from gate_case import GateCase

from kernels import apply_penalties_, apply_token_bitmask_, sample

ROWS, VOCAB = 128, 151936


def per_row(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(ROWS, dtype=dtype)


def draw(dtype: torch.dtype, truncates: bool) -> None:
    k, p, min_p = (per_row(torch.int32), per_row(), per_row()) if truncates else (None,) * 3
    logits = torch.empty(ROWS, VOCAB, dtype=dtype)
    ids = per_row(torch.int64), per_row(torch.int64)
    sample(logits, per_row(), k, p, min_p, *ids, backend="triton")


def penalise(dtype: torch.dtype, has_prompt: bool) -> None:
    counts = torch.empty(ROWS, VOCAB, dtype=torch.int32)
    apply_penalties_(
        torch.empty(ROWS, VOCAB, dtype=dtype), counts,
        counts.to(torch.bool) if has_prompt else None,
        repetition=per_row(), frequency=per_row(), presence=per_row(), backend="triton",
    )  # fmt: skip


def mask() -> None:
    bitmask = torch.empty(ROWS, VOCAB // 32, dtype=torch.int32)
    apply_token_bitmask_(torch.empty(ROWS, VOCAB), bitmask, backend="triton")


def cases() -> Iterator[GateCase]:
    for dtype in (torch.bfloat16, torch.float32):
        for truncates in (False, True):
            name = f"sample-{str(dtype)[6:]}{'-truncated' if truncates else ''}"
            yield GateCase(name, lambda d=dtype, t=truncates: draw(d, t), ("ld128",))
    bf16, fp32 = torch.bfloat16, torch.float32
    yield GateCase("apply_penalties", lambda: penalise(bf16, True), ("ld128",))
    yield GateCase("apply_penalties-fp32-no_prompt", lambda: penalise(fp32, False), ("ld128",))
    yield GateCase("apply_token_bitmask", mask)
