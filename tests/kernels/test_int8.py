"""int8 weights on a CPU: values and scales by hand, products within the bound of an fp32 sum of
fp64's over what the weight stands for, a row's bits its own, the gradient of the input."""

import pytest
import torch
from native_cases import DTYPES, HALF_ULP, threads

from kernels import int8_linear, pack_int8
from kernels.quantized.int8 import quantize_int8

SIZES = [(1, 1), (2, 48), (3, 49), (16, 47), (33, 97), (64, 96), (145, 255), (576, 130)]
ROWS = [0, 1, 2, 3, 7, 8, 9, 31, 64, 65, 130]


def test_values_and_scales_by_hand():
    q, scale = quantize_int8(torch.tensor([[0.0, 254.0, -127.0, 3.1], [0.0] * 4, [-0.5, 0, 0, 0]]))
    assert q.tolist() == [[0, 127, -64, 2], [0] * 4, [-127, 0, 0, 0]]  # 63.5 to the even
    assert scale.tolist() == pytest.approx([2.0, 0.0, 0.5 / 127])


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_fp64s_within_the_bound_of_an_fp32_sum(dtype, size, has_bias):
    num_in, num_out = size
    torch.manual_seed(num_in)
    plain = torch.randn(num_out, num_in) * torch.randn(num_out, 1).exp()
    weight, bias = pack_int8(plain.to(dtype), dtype), torch.randn(num_out).to(dtype)
    q, scale = quantize_int8(plain.to(dtype))
    wide = q.double() * scale[:, None].double()
    assert int(weight.values.count_nonzero()) == int(q.count_nonzero())  # zeros beside them
    assert torch.equal(weight.unpacked(), q) and torch.equal(weight.scale_O, scale)
    assert torch.equal(weight.dequantized().double(), wide.to(weight.dequantized().dtype).double())
    for num_rows in ROWS:
        x = torch.randn(num_rows, num_in).to(dtype)
        ours = int8_linear(x, weight, bias if has_bias else None)
        exact, size_of = x.double() @ wide.T, x.double().abs() @ wide.abs().T
        if has_bias:
            exact, size_of = exact + bias.double(), size_of + bias.double().abs()
        half = HALF_ULP[torch.float32]  # one more for the scale
        bound = (num_in + 2) * half * size_of + HALF_ULP.get(dtype, half) * exact.abs() * 1.01
        assert ours.dtype == dtype and ours.shape == exact.shape
        assert ((ours.double() - exact).abs() <= bound + 1e-30).all(), num_rows


@pytest.mark.usefixtures("cpu_path")
def test_a_product_is_as_near_to_fp64s_as_its_dtype_allows():
    """bf16: nearer than PyTorch's over the dequantised weight, which is rounded once more."""
    torch.manual_seed(0)
    plain, inputs = torch.randn(576, 1536), torch.randn(40, 1536)
    for dtype in DTYPES:
        x, weight = inputs.to(dtype), pack_int8(plain.to(dtype), dtype)
        wide = weight.dequantized()
        exact = x.double() @ wide.double().T
        theirs = torch.nn.functional.linear(x, wide.to(dtype)).double()
        ours = int8_linear(x, weight).double()
        error = float((ours - exact).norm() / exact.norm())
        if dtype == torch.float32:
            assert error < 1e-5
        else:
            assert error < 0.9 * float((theirs - exact).norm() / exact.norm())


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_every_batch(dtype, num_threads):
    torch.manual_seed(0)
    x, bias = torch.randn(150, 301).to(dtype), torch.randn(331).to(dtype)
    plain = torch.randn(331, 301).to(dtype)
    alone = pack_int8(plain, dtype)
    whole = torch.cat([int8_linear(row[None], alone, bias) for row in x])
    with threads(num_threads):
        packed = pack_int8(plain, dtype)
        assert torch.equal(packed.values, alone.values)
        for lo, hi in ((0, 1), (3, 5), (0, 7), (5, 13), (2, 11), (20, 85), (0, 129), (0, 150)):
            assert torch.equal(int8_linear(x[lo:hi], packed, bias), whole[lo:hi]), (lo, hi)


def test_a_row_has_the_same_bits_in_every_batch_without_a_compiler(no_native):
    torch.manual_seed(0)
    x, weight = torch.randn(33, 301), pack_int8(torch.randn(331, 301), torch.float32)
    whole = int8_linear(x, weight)
    for lo, hi in ((0, 1), (3, 5), (5, 13), (0, 32)):
        assert torch.equal(int8_linear(x[lo:hi], weight), whole[lo:hi])


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(33, 97), (145, 255), (64, 96)])
@pytest.mark.parametrize("num_rows", [1, 40, 130])
def test_the_gradient_of_the_input_is_fp64s_and_the_weight_has_none(dtype, size, num_rows):
    num_in, num_out = size
    torch.manual_seed(num_in)
    weight = pack_int8(torch.randn(num_out, num_in).to(dtype), dtype)
    x = torch.randn(num_rows, num_in).to(dtype).requires_grad_()
    dy = torch.randn(num_rows, num_out).to(dtype)
    int8_linear(x, weight).backward(dy)
    wide = weight.dequantized().double()
    exact, size_of = dy.double() @ wide, dy.double().abs() @ wide.abs()
    bound = ((num_out + 2) * HALF_ULP[torch.float32] + HALF_ULP[dtype]) * size_of
    bound += HALF_ULP[dtype] * exact.abs() * 1.01
    assert x.grad.dtype == dtype and ((x.grad.double() - exact).abs() <= bound).all()


@pytest.mark.usefixtures("cpu_path")
def test_another_weight_is_packed_into_the_same_memory():
    first, second = torch.randn(70, 33), torch.randn(70, 33)
    weight = pack_int8(first, torch.bfloat16)
    places = weight.values.data_ptr(), weight.scale_O.data_ptr()
    assert pack_int8(second, torch.bfloat16, weight) is weight
    fresh = pack_int8(second, torch.bfloat16)
    assert (weight.values.data_ptr(), weight.scale_O.data_ptr()) == places
    assert torch.equal(weight.values, fresh.values) and torch.equal(weight.scale_O, fresh.scale_O)


def test_panels_take_half_of_bf16s_bytes(native):
    assert pack_int8(torch.randn(576, 1536), torch.bfloat16).nbytes == 576 * (1536 + 4)


def test_what_cannot_be_is_refused():
    weight = pack_int8(torch.randn(8, 6), torch.float32)
    with pytest.raises(ValueError, match=r"x: .* must be torch.float32 \[..., 6\]"):
        int8_linear(torch.randn(3, 5), weight)
    with pytest.raises(ValueError, match=r"x: torch.bfloat16 .* packed for"):
        int8_linear(torch.randn(3, 6).bfloat16(), weight)
    with pytest.raises(ValueError, match="bias: "):
        int8_linear(torch.randn(3, 6), weight, torch.randn(7))
    for bad in (torch.randn(3), torch.ones(3, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match="weight: "):
            pack_int8(bad, torch.float32)
