"""The repaired interpreter against PyTorch's own bf16 and fp8 arithmetic, bit for bit."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _cast_kernel(x_ptr, y_ptr, back_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    y = tl.load(x_ptr + at).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y)
    tl.store(back_ptr + at, y.to(tl.float32))


@triton.jit
def _arithmetic_kernel(a_ptr, b_ptr, sum_ptr, product_ptr, top_ptr, total_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(sum_ptr + at, a + b)
    tl.store(product_ptr + at, a * b)
    tl.store(top_ptr, tl.max(a, 0))
    tl.store(total_ptr, tl.sum(a.to(tl.float32), 0))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def _assert_kernel(x_ptr):
    tl.device_assert(tl.load(x_ptr) >= 0, "negative")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_round_and_saturate_as_the_gpu_does(dtype):
    torch.manual_seed(0)
    x = torch.cat(
        [torch.randn(120) * 10, torch.tensor([1.96, 0.0, -0.0, 1e30, -1e30, 449.0, 3, 7])]
    )
    largest = torch.finfo(dtype).max
    expected = x.clamp(-largest, largest).to(dtype) if dtype.itemsize == 1 else x.to(dtype)
    y, back = torch.zeros(128).to(dtype), torch.zeros(128)
    _cast_kernel[(1,)](x, y, back, N=128)
    assert torch.equal(y.float(), expected.float())
    assert torch.equal(back, expected.float())


def test_bf16_arithmetic_and_reductions_have_torchs_bits():
    torch.manual_seed(0)
    a, b = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    added, product, top = torch.empty_like(a), torch.empty_like(a), a.new_empty(1)
    total = torch.empty(1)
    _arithmetic_kernel[(1,)](a, b, added, product, top, total, N=64)
    assert torch.equal(added, a + b)
    assert torch.equal(product, a * b)
    assert top.item() == a.max().item()
    assert total.item() == pytest.approx(a.double().sum().item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_dot_accumulates_in_fp32(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(32, 32).to(dtype), torch.randn(32, 32).to(dtype)
    c = torch.empty(32, 32)
    _dot_kernel[(1,)](a, b, c, N=32)
    assert torch.allclose(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_device_assert_fires():
    _assert_kernel[(1,)](torch.tensor([1]))
    with pytest.raises(triton.runtime.errors.InterpreterError, match="negative"):
        _assert_kernel[(1,)](torch.tensor([-1]))
