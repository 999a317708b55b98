"""`linear`: a row's bits depend on the row alone; gradients equal fp64 autograd's."""

import pytest
import torch

from kernels import linear, pack_weight
from kernels.torch import onednn

pytestmark = pytest.mark.usefixtures("cpu_path")

SHAPES = [(96, 64), (576, 960), (576, 3072), (1536, 576), (576, 4099)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype, num_threads, shape):
    before = torch.get_num_threads()
    torch.manual_seed(0)
    x = torch.randn(80, shape[0]).to(dtype)
    weight = torch.randn(shape[1], shape[0]).to(dtype)
    torch.set_num_threads(1)
    whole = linear(x, weight, None, pack_weight(weight))
    torch.set_num_threads(num_threads)
    try:
        for rows in (1, 2, 3, 4, 5, 8, 16, 31, 33, 64, 80):
            for packed in (pack_weight(weight), None):
                part = linear(x[80 - rows :], weight, None, packed)
                assert torch.equal(part, whole[80 - rows :]), (rows, packed is None)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_as_good_as_plain_torch(dtype):
    torch.manual_seed(0)
    x, w, b, g = (
        torch.randn(s, dtype=torch.float64) for s in ((3, 37, 64), (80, 64), (80,), (80,))
    )

    def run(op, kind):
        leaves = [t.to(dtype).to(kind).requires_grad_() for t in (x, w, b)]
        y = op(*leaves)
        y.backward(torch.ones_like(y) * g.to(dtype).to(kind))
        return [y, *(t.grad for t in leaves)]

    exact = run(torch.nn.functional.linear, torch.float64)
    plain = run(torch.nn.functional.linear, dtype)
    ours = run(linear, dtype)
    for a, p, e in zip(ours, plain, exact, strict=True):
        assert (a.double() - e).abs().max() <= 2 * (p.double() - e).abs().max() + 1e-12


def test_main_grad_takes_the_weight_gradient_in_fp32():
    torch.manual_seed(0)
    x = torch.randn(10, 32, dtype=torch.bfloat16)
    weight = torch.randn(48, 32, dtype=torch.bfloat16, requires_grad=True)
    weight.main_grad = torch.full((48, 32), 2.0)
    linear(x, weight).sum().backward()
    expected = 2.0 + x.float().sum(0).expand(48, 32)
    assert weight.grad is None
    assert weight.main_grad.dtype == torch.float32
    assert torch.allclose(weight.main_grad, expected, rtol=1e-2, atol=1e-2)


@pytest.fixture
def no_bf16_product(monkeypatch):
    """As on a processor whose oneDNN cannot repack bf16: any without AVX-512, say."""
    monkeypatch.setattr(onednn, "can_multiply", lambda dtype: dtype == torch.float32)
    monkeypatch.setattr(onednn, "is_bf16_fast", lambda: False)


def test_bf16_without_a_product_of_it_is_multiplied_in_fp32_and_rounded_once(no_bf16_product):
    torch.manual_seed(0)
    x, weight = torch.randn(40, 300).bfloat16(), torch.randn(70, 300).bfloat16()
    bias, dy = torch.randn(70).bfloat16(), torch.randn(40, 70).bfloat16()
    packed = pack_weight(weight)
    x.requires_grad_(), weight.requires_grad_()
    weight.main_grad = torch.zeros(70, 300)
    y = linear(x, weight, bias, packed)
    y.backward(dy)
    assert y.dtype == x.grad.dtype == torch.bfloat16
    for rows in (1, 2, 5, 40):
        assert torch.equal(linear(x[:rows], weight, bias, packed), y[:rows])
    wide = [t.detach().double() for t in (x, weight, bias, dy)]
    exact = {"y": wide[0] @ wide[1].T + wide[2], "dx": wide[3] @ wide[1], "dw": wide[3].T @ wide[0]}
    for name, ours in {"y": y, "dx": x.grad, "dw": weight.main_grad}.items():
        half_ulp = 2.0**-8 if ours.dtype == torch.bfloat16 else 0
        off = (ours.double() - exact[name]).abs() - half_ulp * exact[name].abs()
        assert off.max() < 1e-4, name


def test_without_onednn_a_linear_still_works(monkeypatch):
    monkeypatch.setattr(onednn, "can_multiply", lambda dtype: False)
    x, weight = torch.randn(3, 8), torch.randn(6, 8, requires_grad=True)
    y = linear(x, weight, None, pack_weight(weight))
    y.sum().backward()
    assert torch.allclose(y, x @ weight.T, atol=1e-5)
    assert torch.allclose(weight.grad, x.sum(0).expand(6, 8), atol=1e-5)


def test_float64_is_differentiable():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(linear, (x, w))


@pytest.mark.parametrize(
    "x, bias, name",
    [
        (torch.zeros(2, 5), None, "x: last dimension 5"),
        (torch.zeros(2, 6, dtype=torch.bfloat16), None, "x: dtype"),
        (torch.zeros(2, 6), torch.zeros(3), "bias: torch.float32"),
        (torch.zeros(2, 6), torch.zeros(4, dtype=torch.bfloat16), "bias: torch.bfloat16"),
    ],
)
def test_bad_input_names_the_argument(x, bias, name):
    with pytest.raises(ValueError, match=name):
        linear(x, torch.zeros(4, 6), bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 7, 70])
@pytest.mark.parametrize("shape", [(96, 64), (50, 33), (1, 1), (49, 130)])
def test_a_weight_that_is_laid_out_at_each_call_gives_the_bits_of_a_packed_one(
    dtype, num_rows, shape
):
    torch.manual_seed(1)
    x, weight = torch.randn(num_rows, shape[1]).to(dtype), torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype)
    expected = linear(x, weight, bias, packed=pack_weight(weight))
    assert torch.equal(linear(x, weight, bias), expected)
    torch.testing.assert_close(
        expected.double(), x.double() @ weight.double().t() + bias.double(), rtol=0.02, atol=0.05
    )
