"""Gate cases of fp8 quantisation and matmul, at layers of Llama-3-8B and Qwen3."""

from collections.abc import Callable, Iterator

import torch
from gate_case import GateCase

from kernels import fp8_linear, quantize_fp8
from kernels.quantized.fp8 import GroupSize

GROUPS: dict[str, GroupSize] = {"row": None, "1x128": 128, "128x128": (128, 128)}


def quantize(group_size: GroupSize, dtype: torch.dtype) -> Callable[[], object]:
    return lambda: quantize_fp8(
        torch.empty(8192, 4096, dtype=dtype), group_size, backend="triton"
    )  # fmt: skip


def linear(rows: int, is_by_block: bool) -> Callable[[], object]:
    out, width = 4096, 4096

    def call() -> object:
        x, w = (torch.empty(n, width, dtype=torch.float8_e4m3fn) for n in (rows, out))
        groups = (rows, width // 128), (out // 128, width // 128)
        scales = [torch.empty(s) for s in (groups if is_by_block else ((rows,), (out,)))]
        return fp8_linear(x, w, *scales, backend="triton")

    return call


def cases() -> Iterator[GateCase]:
    for name, group_size in GROUPS.items():
        for dtype in (torch.bfloat16, torch.float32):
            case = f"fp8-quantize-{name}-{str(dtype)[6:]}"
            yield GateCase(case, quantize(group_size, dtype), need=("ld128",))
    for kind in ("row", "block"):
        for rows, need in ((4096, ("wgmma", "ld128")), (64, ("wgmma", "ld128")), (8, ("ld128",))):
            yield GateCase(f"fp8-linear-{kind}-{rows}", linear(rows, kind == "block"), need=need)
