"""Triton's fp8 quantisation and matmul, interpreted: the bits of the reference, the error of fp64.

Inputs lie between NaN guard bands; every output is allocated full of NaN first.
"""

import pytest
import torch
from guard import guarded, poisoned_memory

from kernels import dequantize_fp8, fp8_linear, quantize_fp8
from kernels.quantized.fp8 import quantize_fp8_ref

SIZES = [None, 128, (128, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", SIZES)
@pytest.mark.parametrize("shape", [(5, 200), (130, 128), (1, 4500), (0, 64)])
def test_quantisation_gives_the_bits_of_the_reference(dtype, group_size, shape):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    if x.numel():
        x[0, :3] = torch.tensor([1.96, -480.0, 0.0])
        x[-1] = 0
    with poisoned_memory():
        q, scale = quantize_fp8(guarded(x), group_size, backend="triton")
    q_ref, scale_ref = quantize_fp8_ref(x, group_size)
    assert torch.equal(scale, scale_ref)
    assert torch.equal(q.view(torch.uint8), q_ref.view(torch.uint8))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_by_block", [False, True])
@pytest.mark.parametrize("shape", [(3, 129, 300), (70, 40, 128), (0, 8, 128)])
def test_linear_is_as_good_as_widening_and_multiplying(out_dtype, is_by_block, shape):
    torch.manual_seed(0)
    rows, out, width = shape
    sizes = (128, (128, 128)) if is_by_block else (None, None)
    x, xs = quantize_fp8(torch.randn(rows, width) * 3, sizes[0])
    w, ws = quantize_fp8(torch.randn(out, width), sizes[1])
    with poisoned_memory():
        ours = fp8_linear(guarded(x), guarded(w), xs, ws, out_dtype, backend="triton")
    wide = [dequantize_fp8(*pair) for pair in ((x, xs), (w, ws))]
    exact = wide[0].double() @ wide[1].double().T
    plain = (wide[0] @ wide[1].T).to(out_dtype)
    assert ours.dtype == out_dtype and ours.shape == (rows, out)
    floor = torch.finfo(out_dtype).eps / 4 * exact.norm()
    assert (ours - exact).norm() <= 2 * (plain - exact).norm() + floor
