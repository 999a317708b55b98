"""gae and fused_adamw_."""

from collections.abc import Iterator

import torch
from gate_case import GateCase

from kernels import fused_adamw_, gae

TOKENS = 65536


def tokens() -> torch.Tensor:
    return torch.empty(TOKENS)


def bounds() -> torch.Tensor:
    return torch.empty(257, dtype=torch.int32)


def advantages(has_mask: bool) -> None:
    mask = torch.empty(TOKENS, dtype=torch.bool) if has_mask else None
    gae(tokens(), tokens(), bounds(), 1.0, 0.95, mask_T=mask, backend="triton")


def adamw(has_master: bool) -> None:
    shapes = [(4096, 4096), (4096,)]
    wide = [[torch.empty(s) for s in shapes] for _ in range(3)]
    params = [torch.empty(s, dtype=torch.bfloat16) for s in shapes] if has_master else wide[2]
    grads = [torch.empty(s, dtype=torch.bfloat16) for s in shapes] if has_master else wide[0]
    fused_adamw_(
        params, grads, wide[0], wide[1], wide[2] if has_master else None, lr=1e-6,
        betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=3, grad_scale=torch.empty(()),
        backend="triton",
    )  # fmt: skip


def cases() -> Iterator[GateCase]:
    for has_mask in (False, True):
        yield GateCase(f"gae{'-mask' if has_mask else ''}", lambda m=has_mask: advantages(m))
    yield GateCase("fused_adamw-bf16", lambda: adamw(True), ("ld128",))
    yield GateCase("fused_adamw-fp32", lambda: adamw(False), ("ld128",))
