"""Training attention, forward and backward."""

from collections.abc import Iterator

import torch
from gate_case import GateCase

from kernels import flash_attn_varlen, gather_rows
from kernels.gather_rows import RowGather

SHAPES = {"llama3-8b": (32, 8, 128), "smollm2": (9, 3, 64), "d80": (14, 2, 80), "mqa": (7, 1, 128)}
NEED_OF = {"_delta_kernel": ("ld128",)}


def attend(shape: tuple[int, int, int], window: int | None, return_lse: bool) -> None:
    heads, num_kv, head_dim = shape
    kind = {"dtype": torch.bfloat16, "requires_grad": True}
    q = torch.empty(4096, heads, head_dim, **kind)
    k, v = (torch.empty(4096, num_kv, head_dim, **kind) for _ in "kv")
    cu = torch.empty(5, dtype=torch.int32)
    out = flash_attn_varlen(
        q, k, v, cu, cu, 2048, 2048, window=window, return_lse=return_lse, backend="triton"
    )
    outs = out if return_lse else (out,)
    torch.autograd.grad(outs, (q, k, v), [torch.empty_like(o) for o in outs])


def gather() -> None:
    x = torch.empty(4096, 8, 128, dtype=torch.bfloat16, requires_grad=True)
    index, starts = torch.empty(8192, dtype=torch.int64), torch.empty(4097, dtype=torch.int32)
    plan = RowGather(index, starts, torch.empty(8192, dtype=torch.int32))
    y = gather_rows(x, plan, backend="triton")
    torch.autograd.grad(y, x, torch.empty_like(y))


def cases() -> Iterator[GateCase]:
    for name, shape in SHAPES.items():
        yield GateCase(
            f"flash_attn_varlen-{name}",
            lambda shape=shape: attend(shape, None, False),
            need=("wgmma", "ld128"),
            need_of=NEED_OF,
        )
    yield GateCase(
        "flash_attn_varlen-window-lse",
        lambda: attend(SHAPES["llama3-8b"], 512, True),
        need=("wgmma", "ld128"),
        need_of=NEED_OF,
    )
    yield GateCase("gather_rows", gather, need=("ld128",))
