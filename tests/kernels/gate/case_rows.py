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


def leaf(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def norm(width: int, dtype: torch.dtype = BF16, tokens: int = TOKENS) -> None:
    x, weight = leaf(tokens, width, dtype=dtype), leaf(width, dtype=dtype)
    backward(rms_norm(x, weight, backend="triton"))


def add_norm(width: int, dtype: torch.dtype = BF16) -> None:
    x, residual = (leaf(TOKENS, width, dtype=dtype) for _ in "xr")
    backward(*add_rms_norm(x, residual, leaf(width, dtype=dtype), backend="triton"))


def angles(dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    table = torch.empty(40960, dim // 2)
    return table, torch.empty_like(table), torch.empty(TOKENS, dtype=torch.int64)


def fused_qkv(
    q_heads: int, k_heads: int, dim: int, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, torch.Tensor]:
    qkv = leaf(TOKENS, (q_heads + 2 * k_heads) * dim, dtype=dtype)
    widths = (q_heads * dim, k_heads * dim, k_heads * dim)
    q, k, _ = (x.view(TOKENS, -1, dim) for x in qkv.split(widths, -1))
    return q, k


def rope(q_heads: int, k_heads: int, dim: int, dtype: torch.dtype = BF16) -> None:
    q, k = fused_qkv(q_heads, k_heads, dim, dtype)
    backward(*apply_rope(q, k, *angles(dim), backend="triton"))


def norm_rope(q_heads: int, k_heads: int, dim: int, dtype: torch.dtype = BF16) -> None:
    q, k = fused_qkv(q_heads, k_heads, dim, dtype)
    weights = leaf(dim, dtype=dtype), leaf(dim, dtype=dtype)
    backward(*qk_norm_rope(q, k, *weights, *angles(dim), 1e-6, backend="triton"))


def engine_norm_rope(q_heads: int, k_heads: int, dim: int) -> None:
    """As the model calls it: one row of the tables a token, no positions."""
    q, k = fused_qkv(q_heads, k_heads, dim)
    table = torch.empty(TOKENS, dim // 2)
    backward(*qk_norm_rope(q, k, leaf(dim), leaf(dim), table, table, None, backend="triton"))


def engine_rope(q_heads: int, k_heads: int, dim: int) -> None:
    q, k = fused_qkv(q_heads, k_heads, dim)
    table = torch.empty(TOKENS, dim // 2)
    backward(*apply_rope(q, k, table, table, None, backend="triton"))


def gated(width: int, dtype: torch.dtype = BF16) -> None:
    backward(swiglu(leaf(TOKENS, 2 * width, dtype=dtype), backend="triton"))


def cases() -> Iterator[GateCase]:
    for width in (1024, 2560, 4096):
        need = ("ld128",)
        for name, tokens in ((f"rms_norm-{width}", TOKENS), (f"rms_norm-{width}-one_token", 1)):
            yield GateCase(
                name, lambda w=width, t=tokens: norm(w, tokens=t), need, need_of=SECOND_PASS,
                alike=f"norms of {width}",
            )  # fmt: skip
        yield GateCase(
            f"add_rms_norm-{width}", lambda w=width: add_norm(w), need, need_of=SECOND_PASS
        )
    for model, heads in HEADS.items():
        yield GateCase(f"rope-{model}", lambda h=heads: rope(*h), ("ld128",))
        yield GateCase(
            f"qk_norm_rope-{model}", lambda h=heads: norm_rope(*h), ("ld128",), need_of=SECOND_PASS,
            alike=f"norms of heads {heads}",
        )  # fmt: skip
    yield GateCase(
        "qk_norm_rope-no_positions", lambda: engine_norm_rope(16, 8, 128), ("ld128",),
        need_of=SECOND_PASS, alike="norms of heads (16, 8, 128)",
    )  # fmt: skip
    yield GateCase("rope-no_positions", lambda: engine_rope(16, 8, 128), ("ld128",))
    for width in (3072, 9728, 14336):
        yield GateCase(f"swiglu-{width}", lambda w=width: gated(w), ("ld128",))
    yield from fp32_cases()
    yield from wide_cases()


def wide_cases() -> Iterator[GateCase]:
    """Rows that no longer fit the registers of a program: Llama-3-405B (16,384 wide, 128 query
    heads), Nemotron-4 (96 heads)."""
    for kind, dtype in (("", BF16), ("-fp32", torch.float32)):
        for name, call in (("rms_norm", norm), ("add_rms_norm", add_norm)):
            yield GateCase(
                f"{name}-16384{kind}", lambda c=call, d=dtype: c(16_384, d), ("ld128",),
                need_of=SECOND_PASS,
            )  # fmt: skip
        for heads in ((96, 8, 128), (128, 8, 128)):
            yield GateCase(
                f"qk_norm_rope-{heads[0]}_heads{kind}",
                lambda h=heads, d=dtype: norm_rope(*h, d), ("ld128",), need_of=SECOND_PASS,
            )  # fmt: skip
    yield GateCase("rope-128_heads", lambda: rope(128, 8, 128), ("ld128",))


def fp32_cases() -> Iterator[GateCase]:
    wide = torch.float32
    heads = HEADS["qwen3-4b"]
    for name, call in {
        "rms_norm": lambda: norm(4096, wide),
        "add_rms_norm": lambda: add_norm(4096, wide),
        "rope": lambda: rope(*heads, wide),
        "qk_norm_rope": lambda: norm_rope(*heads, wide),
        "swiglu": lambda: gated(14336, wide),
    }.items():
        yield GateCase(f"{name}-fp32", call, ("ld128",), need_of=SECOND_PASS)
