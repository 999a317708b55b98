"""fp8 on a GPU: the bits of the reference, and the error of the format alone."""

import pytest
import torch

from kernels import dequantize_fp8, fp8_linear, quantize_fp8
from kernels.quantized.fp8 import quantize_fp8_ref

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [None, 128, (128, 128)])
@pytest.mark.parametrize("shape", [(8192, 4096), (1001, 12289), (1, 130), (0, 64)])
def test_quantisation_gives_the_bits_of_the_reference(dtype, group_size, shape):
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda").to(dtype) * 3
    q, scale = quantize_fp8(x, group_size)
    q_ref, scale_ref = quantize_fp8_ref(x, group_size)
    assert torch.equal(scale, scale_ref)
    assert torch.equal(q.view(torch.uint8), q_ref.view(torch.uint8))


@pytest.mark.parametrize("is_by_block", [False, True])
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (64, 1000, 12288), (7, 1280, 528)])
def test_linear_is_as_good_as_widening_and_multiplying(is_by_block, shape):
    """In bf16, whose rounding hides what the tensor core's own accumulator loses in 128 products;
    without the promotion to fp32 the long reduction (12288) would show."""
    torch.manual_seed(0)
    rows, out, width = shape
    sizes = (128, (128, 128)) if is_by_block else (None, None)
    x, xs = quantize_fp8(torch.randn(rows, width, device="cuda") + 0.5, sizes[0])
    w, ws = quantize_fp8(torch.randn(out, width, device="cuda") + 0.5, sizes[1])
    ours = [fp8_linear(x, w, xs, ws) for _ in range(2)]
    assert torch.equal(*ours)
    wide = [dequantize_fp8(*pair) for pair in ((x, xs), (w, ws))]
    exact = wide[0].double() @ wide[1].double().T
    plain = (wide[0] @ wide[1].T).bfloat16()
    assert (ours[0].double() - exact).norm() <= 2 * (plain.double() - exact).norm()
