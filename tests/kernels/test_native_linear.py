"""The packed linear layer in C++: within the bound of an fp32 sum of fp64's result, and a row's
bits depend on the row alone."""

import pytest
import torch
from native_cases import DTYPES, HALF_ULP, threads

from kernels.cpp import ops as cpp_ops

pytestmark = pytest.mark.usefixtures("native")

SIZES = [(1, 1), (2, 48), (3, 49), (16, 47), (33, 97), (64, 96), (145, 255), (576, 130)]
ROWS = [0, 1, 2, 3, 7, 8, 9, 31, 64, 65, 130]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_fp64s_within_the_bound_of_an_fp32_sum(dtype, size, has_bias):
    num_in, num_out = size
    torch.manual_seed(num_in)
    weight, bias = torch.randn(num_out, num_in).to(dtype), torch.randn(num_out).to(dtype)
    packed = cpp_ops.pack(weight)
    for num_rows in ROWS:
        x = torch.randn(num_rows, num_in).to(dtype)
        ours = cpp_ops.linear(x, packed, bias if has_bias else None, num_out)
        exact, size_of = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        if has_bias:
            exact, size_of = exact + bias.double(), size_of + bias.double().abs()
        bound = (num_in + 1) * HALF_ULP[torch.float32] * size_of
        bound += HALF_ULP[dtype] * exact.abs() * 1.01 + 1e-30
        assert ours.dtype == dtype and ours.shape == exact.shape
        assert ((ours.double() - exact).abs() <= bound).all(), num_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_every_batch(dtype, num_threads):
    torch.manual_seed(0)
    num_in, num_out = 300, 331  # enough to be shared among threads
    x, bias = torch.randn(150, num_in).to(dtype), torch.randn(num_out).to(dtype)
    weight = torch.randn(num_out, num_in).to(dtype)
    alone = cpp_ops.pack(weight)
    whole = torch.cat([cpp_ops.linear(row[None], alone, bias, num_out) for row in x])
    with threads(num_threads):
        packed = cpp_ops.pack(weight)
        assert torch.equal(packed, alone)
        for lo, hi in ((0, 1), (3, 5), (0, 7), (5, 13), (2, 11), (20, 85), (0, 129), (0, 150)):
            ours = cpp_ops.linear(x[lo:hi], packed, bias, num_out)
            assert torch.equal(ours, whole[lo:hi]), (lo, hi)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(dtype):
    torch.manual_seed(0)
    for num_in in (31, 32):
        wide, weight = torch.randn(9, 70).to(dtype), torch.randn(50, num_in).to(dtype)
        packed = cpp_ops.pack(weight)
        for view in (wide[:, 7 : 7 + num_in], wide[::2, :num_in], wide.T[:9, :9].repeat(1, 8)):
            x = view[:, :num_in]
            expected = cpp_ops.linear(x.contiguous(), packed, None, 50)
            assert torch.equal(cpp_ops.linear(x, packed, None, 50), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_in_its_row_and_its_output(dtype):
    x, weight = torch.randn(9, 35).to(dtype), torch.randn(100, 35).to(dtype)
    x[4, 34], weight[99, 0], weight[47, 34] = torch.nan, torch.nan, torch.nan
    found = cpp_ops.linear(x, cpp_ops.pack(weight), None, 100).isnan()
    expected = torch.zeros(9, 100, dtype=torch.bool)
    expected[4], expected[:, 99], expected[:, 47] = True, True, True
    assert torch.equal(found, expected)
