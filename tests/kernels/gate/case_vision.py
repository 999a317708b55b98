"""Gate cases of a vision tower: layer_norm and gelu, forward and backward, and attention in which
all see all, at the widths of Qwen3-VL's towers (1024 and 1152, heads of 64 and 72, mergers of
4608)."""

from collections.abc import Iterator

import torch
from gate_case import GateCase

from kernels import flash_attn_varlen
from kernels.vision.gelu import Approximation, gelu
from kernels.vision.layer_norm import layer_norm

BF16 = torch.bfloat16
PATCHES = 8192
SECOND_PASS = {"_sum_partials_kernel": ()}


def norm(width: int, dtype: torch.dtype) -> None:
    x = torch.empty(PATCHES, width, dtype=dtype, requires_grad=True)
    weight, bias = (torch.empty(width, dtype=dtype, requires_grad=True) for _ in "wb")
    y = layer_norm(x, weight, bias, backend="triton")
    y.backward(torch.empty_like(y))


def activate(width: int, approximate: Approximation, dtype: torch.dtype) -> None:
    x = torch.empty(PATCHES, width, dtype=dtype, requires_grad=True)
    y = gelu(x, approximate, backend="triton")
    y.backward(torch.empty_like(y))


def attend(head_dim: int) -> None:
    q, k, v = (
        torch.empty(PATCHES, 16, head_dim, dtype=BF16, requires_grad=True) for _ in "qkv"
    )  # fmt: skip
    cu = torch.empty(9, dtype=torch.int32)
    out = flash_attn_varlen(q, k, v, cu, cu, 1024, 1024, causal=False, backend="triton")
    torch.autograd.grad(out, (q, k, v), torch.empty_like(out))


def cases() -> Iterator[GateCase]:
    for kind, dtype in (("", BF16), ("-fp32", torch.float32)):
        for width in (1024, 1152, 4608, 12800):
            yield GateCase(
                f"layer_norm-{width}{kind}", lambda w=width, d=dtype: norm(w, d), ("ld128",),
                need_of=SECOND_PASS,
            )  # fmt: skip
        for approximate in ("none", "tanh"):
            yield GateCase(
                f"gelu-{approximate}{kind}",
                lambda a=approximate, d=dtype: activate(4304, a, d), ("ld128",),
            )  # fmt: skip
    for head_dim in (64, 72):
        yield GateCase(
            f"flash-whole-half-{head_dim}", lambda d=head_dim: attend(d), ("wgmma", "ld128"),
            need_of={"_delta_kernel": ("ld128",)},
        )  # fmt: skip
