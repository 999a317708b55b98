"""Benchmark rows of fp8 quantisation and the fp8 matmul; the peer is `torch._scaled_mm`."""

from collections.abc import Iterator

import torch
from kernel_bench.case import BenchCase, Step, compiled

from kernels import fp8_linear, quantize_fp8
from kernels.quantized.fp8 import quantize_fp8_ref

SHAPES = {"llama-3-8b": (4096, 28672), "qwen3-4b": (2560, 19456)}  # the gate-and-up matmul


def cases(device: str) -> Iterator[BenchCase]:
    is_gpu = device == "cuda"
    rows = 8192 if is_gpu else 128
    dtype = torch.bfloat16 if is_gpu else torch.float32
    x = torch.randn(rows, 4096, device=device, dtype=dtype)
    for kind, group in (("row", None), ("1x128", 128), ("128x128", (128, 128))):
        slow: dict[str, Step] = {}
        if is_gpu and kind == "row":  # once: compiling takes its time
            made = compiled(quantize_fp8_ref)
            slow = {"compile": lambda f=made: f(x)}
        yield BenchCase(
            name=f"quantize_fp8-{kind}", op="quantize_fp8", shape=f"{rows}x4096",
            dtype=str(dtype)[6:], run=lambda g=group: quantize_fp8(x, g),
            peers={"eager": lambda g=group: quantize_fp8_ref(x, g)}, slow_peers=slow,
            bytes=x.numel() * (dtype.itemsize + 1),
        )  # fmt: skip
    for model, (width, out) in SHAPES.items() if is_gpu else [("reduced", (1024, 1024))]:
        yield from linear_rows(model, 8192 if is_gpu else 64, width, out, device)
        if is_gpu:
            yield from linear_rows(model, 64, width, out, device)


def linear_rows(model: str, rows: int, width: int, out: int, device: str) -> Iterator[BenchCase]:
    for kind, groups in (("row", (None, None)), ("block", (128, (128, 128)))):
        x, xs = quantize_fp8(torch.randn(rows, width, device=device), groups[0])
        w, ws = quantize_fp8(torch.randn(out, width, device=device), groups[1])
        peers: dict[str, Step] = {}
        if device == "cuda" and kind == "row":
            peers["scaled_mm"] = lambda x=x, w=w, xs=xs, ws=ws: torch._scaled_mm(
                x, w.t(), xs[:, None], ws[None, :], out_dtype=torch.bfloat16
            )
        is_few = rows <= 64
        yield BenchCase(
            name=f"fp8_linear-{kind}", op="fp8_linear", shape=f"{model} {rows}x{width}x{out}",
            dtype="float8_e4m3fn", run=lambda x=x, w=w, xs=xs, ws=ws: fp8_linear(x, w, xs, ws),
            peers=peers, bytes=w.numel() if is_few else None,
            flops=None if is_few else 2 * rows * width * out,
        )  # fmt: skip
