"""int8 weights with an fp32 scale for each output, and the product on them, for a CPU.

    scale_o = max |w_o| / 127        q = round(w / scale)        y = (x · qᵀ) · scale + bias

The inputs stay as they are (weight-only): q is widened to their dtype, which is exact, the product
is summed in fp32 as `linear` sums it, and the scale is applied once, to the sum. So a row has the
same bits whatever it is batched with, and a weight takes a quarter of fp32's bytes, half of bf16's.

In C++ (`cpp/int8.h`) the values lie in panels and nowhere else; without a compiler they lie as
[out, in], and PyTorch widens a matrix for each product: slow, the same values up to the rounding of
the sum. Either way a weight is frozen: the backward pass gives the input's gradient alone, by the
same product over the transposed panels, which are made for one call.

Left out: GPUs, int8 inputs, a scale for each group of inputs (with one for each output SmolLM2's
next-token distributions move by 0.005 nats, where bf16 alone moves them by 0.001).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import check_tensors, compute_dtype
from kernels.cpp import int8_ops
from kernels.cpp.ops import has_native
from kernels.linear import linear_rows, matmul_rows

INT8_MAX = 127.0
_SMALLEST_MAX = 1e-30  # an output of zeros gets a scale that does not divide by zero


@dataclass(frozen=True)
class Int8Weight:
    """A quantised weight [out, in] for inputs of `dtype`."""

    values: Tensor
    """int8: panels [panels, words, ...] as C++ reads them, or [out, in]."""
    scale_O: Tensor
    """fp32."""
    num_in: int
    dtype: torch.dtype

    @property
    def num_out(self) -> int:
        return len(self.scale_O)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale_O.nbytes

    def unpacked(self) -> Tensor:
        """The int8 values, [out, in]; a copy where they lie in panels."""
        if self.values.dim() == 2:
            return self.values
        return int8_ops.unpack_int8(self.values, self.num_out, self.num_in, self.dtype)

    def dequantized(self, rows: slice = slice(None)) -> Tensor:
        """Those outputs of q · scale, in fp32 (fp64 where inputs are)."""
        wide = compute_dtype(self.dtype)
        return self.unpacked()[rows].to(wide) * self.scale_O[rows, None].to(wide)


def quantize_int8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """(q [out, in] int8, scale [out] fp32): the definition."""
    wide = weight_OI.float()
    scale_O = wide.abs().amax(1).clamp_min(_SMALLEST_MAX) / INT8_MAX
    return (wide / scale_O[:, None]).round().to(torch.int8), scale_O


def pack_int8(weight_OI: Tensor, dtype: torch.dtype, out: Int8Weight | None = None) -> Int8Weight:
    """`weight` quantised, for inputs of `dtype`; into `out`, an earlier one of that shape, where it
    is given. `ValueError` for a weight that is no matrix of floats on a CPU."""
    if weight_OI.dim() != 2 or not weight_OI.is_floating_point() or not weight_OI.is_cpu:
        raise ValueError(
            f"weight: {weight_OI.dtype} {tuple(weight_OI.shape)} on {weight_OI.device} must be "
            "floating point [out, in] on a CPU, the only device with products of int8 weights"
        )
    values, scale_O = quantize_int8(weight_OI)
    if has_native(torch.empty(0, dtype=dtype)):
        values = int8_ops.pack_int8(values, dtype, None if out is None else out.values)
    if out is None:
        return Int8Weight(values, scale_O, weight_OI.shape[1], dtype)
    if values is not out.values:
        out.values.copy_(values)
    out.scale_O.copy_(scale_O)
    return out


class _Int8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI, weight, bias):
        ctx.weight = weight
        return _multiply(x_TI, weight, bias)

    @staticmethod
    def backward(ctx, dy_TO):
        return _multiply_transposed(dy_TO, ctx.weight), None, None


def _multiply(x_TI: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    if weight.values.dim() == 3:
        return int8_ops.linear_int8(x_TI, weight.values, weight.scale_O, bias, weight.num_out)
    wide = compute_dtype(x_TI.dtype)
    y_TO = linear_rows(x_TI.to(wide), weight.values.to(wide), None, None) * weight.scale_O.to(wide)
    return (y_TO if bias is None else y_TO + bias).to(x_TI.dtype)


def _multiply_transposed(dy_TO: Tensor, weight: Int8Weight) -> Tensor:
    """(dy · scale) · q, the gradient of the input."""
    wide = compute_dtype(dy_TO.dtype)
    scaled_TO = dy_TO.to(wide) * weight.scale_O.to(wide)
    if weight.values.dim() == 2:
        return matmul_rows(scaled_TO, weight.values.to(wide)).to(dy_TO.dtype)
    shape = (weight.num_out, weight.num_in)
    columns = int8_ops.transpose_int8(weight.values, *shape, weight.dtype)
    return int8_ops.linear_int8(scaled_TO.to(dy_TO.dtype), columns, None, None, weight.num_in)


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """x [..., in] · weightᵀ + bias [out], differentiable by x alone. A row's bits do not depend on
    the other rows. `ValueError` for an x of another width or dtype than the weight was packed for.
    """
    if x.shape[-1] != weight.num_in or x.dtype != weight.dtype:
        raise ValueError(
            f"x: {x.dtype} {tuple(x.shape)} must be {weight.dtype} [..., {weight.num_in}], which "
            "the weight was packed for"
        )
    if bias is not None and (bias.shape != weight.scale_O.shape or bias.dtype != x.dtype):
        raise ValueError(
            f"bias: {bias.dtype} {tuple(bias.shape)} must be x's {x.dtype} ({weight.num_out},)"
        )
    check_tensors(x, "x", False, bias=bias, weight=weight.values)
    x_TI = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and x.requires_grad:
        y_TO: Tensor = _Int8Linear.apply(x_TI, weight, bias)
    else:
        y_TO = _multiply(x_TI, weight, bias)
    return y_TO.view(*x.shape[:-1], weight.num_out)
