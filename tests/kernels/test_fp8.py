"""fp8 on a CPU: scales and codes by hand, error bounds of the format, bad input."""

import pytest
import torch

from kernels import dequantize_fp8, fp8_linear, quantize_fp8


def test_a_row_by_hand():
    q, scale = quantize_fp8(torch.tensor([[0.0, 448.0, -1.96, 17.0], [0.0] * 4]))
    assert scale.tolist() == [1.0, pytest.approx(1e-12 / 448)]
    assert q.float().tolist() == [[0.0, 448.0, -2.0, 16.0], [0.0] * 4]  # 17 lies between 16 and 18


@pytest.mark.parametrize("group_size", [None, 128, (128, 128)])
@pytest.mark.parametrize("shape", [(5, 200), (130, 257)])
def test_error_is_half_a_step_and_the_largest_of_a_group_is_kept(group_size, shape):
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.logspace(-3, 3, shape[1])
    q, scale = quantize_fp8(x, group_size)
    back = dequantize_fp8(q, scale)
    unit = dequantize_fp8(torch.ones_like(x).to(torch.float8_e4m3fn), scale)
    half_step = torch.maximum(x.abs() / 16, unit / 1024)  # 3 bits of mantissa; subnormals 2^-9
    assert ((back - x).abs() <= half_step * 1.001).all()
    largest = x.abs() == x.abs().max()
    assert torch.allclose(back[largest], x[largest])
    rows, groups = shape[0], -(-shape[1] // 128)
    expected = {None: (rows,), 128: (rows, groups), (128, 128): (-(-rows // 128), groups)}
    assert tuple(scale.shape) == expected[group_size]


@pytest.mark.parametrize("is_by_block", [False, True])
def test_linear_equals_fp64_of_the_widened_values(is_by_block):
    torch.manual_seed(0)
    x, xs = quantize_fp8(torch.randn(33, 300), 128 if is_by_block else None)
    w, ws = quantize_fp8(torch.randn(129, 300), (128, 128) if is_by_block else None)
    exact = dequantize_fp8(x, xs).double() @ dequantize_fp8(w, ws).double().T
    y = fp8_linear(x, w, xs, ws, torch.float32)
    assert (y - exact).norm() < 1e-6 * exact.norm()
    for rows in (slice(0, 1), slice(3, 20)):  # a row depends on itself alone
        assert torch.equal(fp8_linear(x[rows], w, xs[rows], ws, torch.float32), y[rows])


def test_bad_input_names_the_argument():
    x, xs = quantize_fp8(torch.randn(4, 256))
    w, ws = quantize_fp8(torch.randn(8, 256))
    for call, name in (
        (lambda: quantize_fp8(torch.zeros(4)), "x: "),
        (lambda: quantize_fp8(torch.zeros(4, 4), 64), "group_size=64"),
        (lambda: fp8_linear(x.float(), w, xs, ws), "x: "),
        (lambda: fp8_linear(x, w[:, :128], xs, ws), "x: 256 columns"),
        (lambda: fp8_linear(x, w, xs[:2], ws), "x_scale"),
        (lambda: fp8_linear(x, w, xs, ws, torch.int8), "out_dtype"),
    ):
        with pytest.raises(ValueError, match=name):
            call()
