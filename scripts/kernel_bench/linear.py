"""Benchmark rows of `linear` on a CPU: the matrices of ten layers, too many for the processor's
cache, met by the rows of a decoding step and of a prefill chunk.

Peers are oneDNN's product over its own packed weights and `F.linear`. Left out: GPUs, where the op
is `F.linear`.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from kernel_bench.case import BenchCase
from torch import Tensor

from kernels import linear, pack_weight

NAME, SHAPES = "smollm2-135m", ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS = 10


def cases(device: str) -> Iterator[BenchCase]:
    if device != "cpu":
        return
    for dtype in (torch.bfloat16, torch.float32):
        weights = [torch.randn(shape, dtype=dtype) * 0.02 for shape in SHAPES * LAYERS]
        packed = [pack_weight(w) for w in weights]
        onednn = [torch.ops.mkldnn._reorder_linear_weight(w, 64) for w in weights]
        size = sum(w.numel() for w in weights)
        for rows in (1, 16, 64, 512):
            inputs = {width: torch.randn(rows, width, dtype=dtype) for _, width in SHAPES}
            step = partial(_for_each, inputs)
            peers = {
                "onednn-packed": step(_onednn, onednn, weights),
                "F.linear": step(F.linear, weights, weights),
            }
            yield BenchCase(
                "linear", "linear", f"{NAME} {LAYERS} layers x {rows} rows", str(dtype)[6:],
                step(linear, weights, weights, packed), peers,
                bytes=size * dtype.itemsize if rows == 1 else None,
                flops=None if rows == 1 else 2 * rows * size,
            )  # fmt: skip


def _onednn(x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _for_each(
    inputs: dict[int, Tensor],
    product: Callable[..., Tensor],
    first: list[Tensor],
    weights: list[Tensor],
    packed: list[Tensor | None] | None = None,
) -> Callable[[], object]:
    """A step that multiplies by every matrix once."""

    def step() -> None:
        with torch.inference_mode():
            for i, (argument, w) in enumerate(zip(first, weights, strict=True)):
                extra = {} if packed is None else {"packed": packed[i]}
                product(inputs[w.shape[1]], argument, **extra)

    return step
