"""Training attention, forward and backward."""

from collections.abc import Iterator

import torch
from gate_case import ATTENTION_SHAPES, GateCase

from kernels import add_rows_, flash_attn_varlen, gather_rows, make_varlen_plan, tree_attention
from kernels.gpu.attention import segments_of
from kernels.gpu.gather_rows import RowGather

NEED_OF = {"_delta_kernel": ("ld128",)}
# Two accumulators 256 wide leave room for 32 keys, which is half a row tile of wgmma.
NEED_OF_256 = {**NEED_OF, "_dkdv_kernel": ("mma_sync", "ld128")}

SPILLS = {"half-64": 116, "half-128": 136}
"""Bytes of dk, dv with Triton 3.6 (3.9: none and 32). With that version, on an H100, these tiles
take .85 of the time of the best ones without a spill (benchmarks/tiles_h100_2026-11-26.json)."""


def attend(
    name: str,
    window: int | None,
    return_lse: bool,
    batch_invariant: bool = False,
    has_sinks: bool = False,
) -> None:
    heads, num_kv, head_dim = ATTENTION_SHAPES[name]
    sinks = torch.empty(heads, requires_grad=True) if has_sinks else None
    dtype = torch.float32 if name.startswith("fp32") else torch.bfloat16
    q = torch.empty(4096, heads, head_dim, dtype=dtype, requires_grad=True)
    k, v = (
        torch.empty(4096, num_kv, head_dim, dtype=dtype, requires_grad=True) for _ in "kv"
    )  # fmt: skip
    cu = torch.empty(5, dtype=torch.int32)
    out = flash_attn_varlen(
        q, k, v, cu, cu, 2048, 2048, window=window, return_lse=return_lse, sinks=sinks,
        batch_invariant=batch_invariant, backend="triton",
    )  # fmt: skip
    outs = out if return_lse else (out,)
    torch.autograd.grad(outs, (q, k, v), [torch.empty_like(o) for o in outs])


def tree() -> None:
    """A prompt of 1024 tokens and three completions."""
    with torch.device("cpu"):  # the plan is made on the host
        plan = make_varlen_plan([0, 1024, 2048, 3072, 4096], [-1, 0, 0, 0])
    q = torch.empty(4096, 32, 128, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.empty(4096, 8, 128, dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    with torch.device("cpu"):
        segments_of(plan, q.device)
    out = tree_attention(q, k, v, plan, backend="triton")
    torch.autograd.grad(out, (q, k, v), torch.empty_like(out))


def gather() -> None:
    x = torch.empty(4096, 8, 128, dtype=torch.bfloat16, requires_grad=True)
    index, starts = torch.empty(8192, dtype=torch.int64), torch.empty(4097, dtype=torch.int32)
    plan = RowGather(index, starts, torch.empty(8192, dtype=torch.int32))
    y = gather_rows(x, plan, backend="triton")
    torch.autograd.grad(y, x, torch.empty_like(y))


def embedding_gradient() -> None:
    ids, rows = torch.empty(8192, dtype=torch.int64), torch.empty(8192, 1024, dtype=torch.bfloat16)
    add_rows_(torch.empty(151_936, 1024), ids, rows, backend="triton")


def cases() -> Iterator[GateCase]:
    for name in ATTENTION_SHAPES:
        need = ("ld128",) if name.startswith("fp32") else ("wgmma", "ld128")
        need_of = NEED_OF_256 if name == "half-256" else NEED_OF
        spill = SPILLS.get(name.removesuffix("-padded").removesuffix("-mqa"), 0)
        yield GateCase(
            f"flash-{name}",
            lambda n=name: attend(n, None, False),
            need=need,
            need_of=need_of,
            allow_spill=spill,
        )
        if name == "fp32-256":  # spills 48 bytes with paged attention's tile; no model has this
            continue
        yield GateCase(
            f"flash-invariant-{name}",
            lambda n=name: attend(n, None, False, True),
            need=need,
            need_of=need_of,
            allow_spill=spill,
        )
    yield GateCase(
        "flash-half-128-window-lse",
        lambda: attend("half-128", 512, True),
        need=("wgmma", "ld128"),
        need_of=NEED_OF,
        allow_spill=SPILLS["half-128"],
    )
    for window in (None, 128):  # gpt-oss: heads of 64
        yield GateCase(
            f"flash-half-64-sinks{'' if window is None else '-window'}",
            lambda w=window: attend("half-64", w, False, has_sinks=True),
            need=("wgmma", "ld128"),
            need_of=NEED_OF,
            allow_spill=SPILLS["half-64"],
        )
    yield GateCase(
        "tree",
        tree,
        need_of={"_forward_kernel": ("wgmma", "ld128")},
        allow_spill=SPILLS["half-128"],
    )
    yield GateCase("gather_rows", gather, need=("ld128",))
    yield GateCase("add_rows", embedding_gradient, need=("ld128",))
