"""C++ products with int8 weights on tensors (`cpp/linear.h`): lay values out, multiply by them.

The conventions are those of ops.py: the callers have checked shapes, and `dtype` is the one of the
activations, fp32 or bf16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpp.ops import function


def pack_int8(weight_OI: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """int8 values in the order in which `linear_int8` reads them for inputs of `dtype`; in the
    memory of `out`, an earlier copy, where that has the shape."""
    weight = weight_OI.contiguous()
    num_out, num_in = weight.shape
    shape = _int8_shape(num_out, num_in, dtype)
    is_fitting = out is not None and out.shape == shape
    packed = out if out is not None and is_fitting else torch.empty(shape, dtype=torch.int8)
    function("pack_int8", dtype)(
        packed.data_ptr(), weight.data_ptr(), num_in, num_out, torch.get_num_threads()
    )
    return packed


def unpack_int8(packed: Tensor, num_out: int, num_in: int, dtype: torch.dtype) -> Tensor:
    """The values [out, in] that `pack_int8` was given."""
    weight = torch.empty((num_out, num_in), dtype=torch.int8)
    function("unpack_int8", dtype)(
        weight.data_ptr(), packed.data_ptr(), num_in, num_out, torch.get_num_threads()
    )
    return weight


def transpose_int8(packed: Tensor, num_out: int, num_in: int, dtype: torch.dtype) -> Tensor:
    """`pack_int8` of the transposed weight."""
    columns = torch.empty(_int8_shape(num_in, num_out, dtype), dtype=torch.int8)
    function("transpose_int8", dtype)(
        columns.data_ptr(), packed.data_ptr(), num_in, num_out, torch.get_num_threads()
    )
    return columns


def _int8_shape(num_out: int, num_in: int, dtype: torch.dtype) -> tuple[int, int, int]:
    panel, per_word = function("panel", dtype)(), function("int8_word", dtype)()
    return -(-num_out // panel), -(-num_in // per_word), panel * per_word


def linear_int8(
    x_TI: Tensor, packed: Tensor, scale_O: Tensor | None, bias_O: Tensor | None, num_out: int
) -> Tensor:
    """(x · valuesᵀ) · scale + bias from `pack_int8(values)`; the scale of each output is fp32."""
    expected = _int8_shape(num_out, x_TI.shape[1], x_TI.dtype)
    if packed.shape != expected or packed.dtype != torch.int8:
        raise ValueError(
            f"packed: {packed.dtype} {tuple(packed.shape)} is not int8 values [{num_out}, "
            f"{x_TI.shape[1]}] packed for {x_TI.dtype}"
        )
    if x_TI.shape[1] % function("int8_word", x_TI.dtype)():  # the kernel reads whole words
        x_TI = F.pad(x_TI, (0, 1))
    x = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    num_rows, num_in = x.shape
    y = torch.empty((num_rows, num_out), dtype=x.dtype)
    scale, bias = (None if one is None else one.contiguous() for one in (scale_O, bias_O))
    function("linear_int8", x.dtype)(
        y.data_ptr(), x.data_ptr(), packed.data_ptr(), None if scale is None else scale.data_ptr(),
        None if bias is None else bias.data_ptr(), num_rows, num_in, num_out, x.stride(0),
        torch.get_num_threads(),
    )  # fmt: skip
    return y
