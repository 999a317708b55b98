"""rms_norm, add_rms_norm, rope, qk_norm_rope and swiglu, forward and backward, at the widths of
Qwen3-0.6B, Qwen3-4B and Llama-3-8B."""

from collections.abc import Iterator

import torch
from gate_case import GateCase

from kernels import add_rms_norm, apply_rope, qk_norm_rope, rms_norm, swiglu

BF16 = torch.bfloat16
TOKENS = 8192
SECOND_PASS = {"_sum_partials_kernel": ()}
HEADS = {"qwen3-0.6b": (16, 8, 128), "qwen3-4b": (32, 8, 128), "smollm2-135m": (9, 3, 64)}


def backward(*outs: torch.Tensor) -> None:
    torch.autograd.backward(outs, [torch.empty_like(out) for out in outs])


def leaf(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=BF16, requires_grad=True)


def norm(width: int) -> None:
    backward(rms_norm(leaf(TOKENS, width), leaf(width), backend="triton"))


def add_norm(width: int) -> None:
    x, residual = leaf(TOKENS, width), leaf(TOKENS, width)
    backward(*add_rms_norm(x, residual, leaf(width), backend="triton"))


def angles(dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    table = torch.empty(40960, dim // 2)
    return table, torch.empty_like(table), torch.empty(TOKENS, dtype=torch.int64)


def fused_qkv(q_heads: int, k_heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    qkv = leaf(TOKENS, (q_heads + 2 * k_heads) * dim)
    widths = (q_heads * dim, k_heads * dim, k_heads * dim)
    q, k, _ = (x.view(TOKENS, -1, dim) for x in qkv.split(widths, -1))
    return q, k


def rope(q_heads: int, k_heads: int, dim: int) -> None:
    q, k = fused_qkv(q_heads, k_heads, dim)
    backward(*apply_rope(q, k, *angles(dim), backend="triton"))


def norm_rope(q_heads: int, k_heads: int, dim: int) -> None:
    q, k = fused_qkv(q_heads, k_heads, dim)
    weights = leaf(dim), leaf(dim)
    backward(*qk_norm_rope(q, k, *weights, *angles(dim), 1e-6, backend="triton"))


def engine_norm_rope(q_heads: int, k_heads: int, dim: int) -> None:
    """As the model calls it: one row of the tables a token, no positions."""
    q, k = fused_qkv(q_heads, k_heads, dim)
    table = torch.empty(TOKENS, dim // 2)
    backward(*qk_norm_rope(q, k, leaf(dim), leaf(dim), table, table, None, backend="triton"))


def gated(width: int) -> None:
    backward(swiglu(leaf(TOKENS, 2 * width), backend="triton"))


def cases() -> Iterator[GateCase]:
    for width in (1024, 2560, 4096):
        need = ("ld128",)
        yield GateCase(f"rms_norm-{width}", lambda w=width: norm(w), need, need_of=SECOND_PASS)
        yield GateCase(
            f"add_rms_norm-{width}", lambda w=width: add_norm(w), need, need_of=SECOND_PASS
        )
    for model, heads in HEADS.items():
        yield GateCase(f"rope-{model}", lambda h=heads: rope(*h), ("ld128",))
        yield GateCase(
            f"qk_norm_rope-{model}", lambda h=heads: norm_rope(*h), ("ld128",), need_of=SECOND_PASS
        )
    yield GateCase(
        "qk_norm_rope-no_positions", lambda: engine_norm_rope(16, 8, 128), ("ld128",),
        need_of=SECOND_PASS,
    )  # fmt: skip
    for width in (3072, 9728, 14336):
        yield GateCase(f"swiglu-{width}", lambda w=width: gated(w), ("ld128",))
