"""Triton's rms_norm, rope, swiglu and linear_logprob, interpreted, against fp64.

Inputs lie between NaN guard bands, so a read past the end shows in the result.
"""

import pytest
import torch

from kernels import add_rms_norm, apply_rope, linear_logprob, rms_norm, swiglu
from kernels.linear_logprob import linear_logprob_ref
from kernels.rms_norm import rms_norm_ref
from kernels.rope import apply_rope_ref
from kernels.swiglu import swiglu_ref

DTYPES = [torch.float32, torch.bfloat16]


def guarded(x):
    """The same values in the middle of a buffer of NaN."""
    buffer = torch.full((x.numel() + 512,), torch.nan).to(x.dtype)
    view = buffer[256:-256].view(x.shape)
    view.copy_(x)
    return view


def run(op, inputs, dtype):
    leaves = [guarded(x.to(dtype)).requires_grad_() for x in inputs]
    outs = op(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.manual_seed(3)
    weights = [torch.randn(o.shape).bfloat16().to(o.dtype) for o in outs]
    return [*outs, *torch.autograd.grad(outs, leaves, weights)]


def assert_as_good_as_plain_torch(ours, plain, inputs, dtype):
    inputs = [x.to(dtype) for x in inputs]
    exact = run(plain, inputs, torch.float64)
    naive = run(plain, inputs, dtype)
    floor = torch.finfo(dtype).eps / 8  # plain torch can be exact by luck on few elements
    for i, (a, n, e) in enumerate(zip(run(ours, inputs, dtype), naive, exact, strict=True)):
        assert a.dtype == n.dtype
        error, allowed = ((x.double() - e).norm().item() for x in (a, n))
        assert error <= 2 * allowed + floor * e.norm().item(), i


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (1, 33), (300, 8), (2, 3, 64)])
def test_rms_norm(dtype, shape):
    torch.manual_seed(0)
    x, w = torch.randn(shape), torch.randn(shape[-1])
    assert_as_good_as_plain_torch(
        lambda x, w: rms_norm(x, w, 1e-5, backend="triton"),
        lambda x, w: rms_norm_ref(x, w, 1e-5),
        [x, w],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype):
    torch.manual_seed(0)

    def plain(x, r, w):
        return rms_norm_ref(x + r, w, 1e-5), x + r

    assert_as_good_as_plain_torch(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-5, backend="triton"),
        plain,
        [torch.randn(7, 50), torch.randn(7, 50), torch.randn(50)],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 2 * 1500), (2, 3, 34)])
def test_swiglu(dtype, shape):
    torch.manual_seed(0)
    inputs = [torch.randn(shape)]
    assert_as_good_as_plain_torch(lambda x: swiglu(x, backend="triton"), swiglu_ref, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (2, 1, 20)])
def test_rope(dtype, heads):
    torch.manual_seed(0)
    h, k, d = heads
    angle, positions = torch.rand(40, d // 2) * 6, torch.randint(0, 40, (6,))
    cos, sin = guarded(angle.cos()), guarded(angle.sin())

    def plain(q, k):
        wide = torch.promote_types(q.dtype, torch.float32)
        return apply_rope_ref(q, k, cos.to(wide), sin.to(wide), positions)

    assert_as_good_as_plain_torch(
        lambda q, k: apply_rope(q, k, cos, sin, positions, backend="triton"),
        plain,
        [torch.randn(6, h, d), torch.randn(6, k, d)],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab", [97, 4096 + 31])
def test_linear_logprob(dtype, temperature, vocab):
    torch.manual_seed(0)
    ids = torch.randint(0, vocab, (11,))
    ids[0], ids[1] = 0, vocab - 1

    def ours(h, w):
        return linear_logprob(
            h, w, ids, temperature=temperature, return_entropy=True, chunk_size=4, backend="triton"
        )

    inputs = [torch.randn(11, 16), torch.randn(vocab, 16)]
    assert_as_good_as_plain_torch(
        ours, lambda h, w: linear_logprob_ref(h, w, ids, temperature), inputs, dtype
    )


def test_backward_is_the_same_bits_every_time():
    torch.manual_seed(0)
    x, w = torch.randn(600, 24), torch.randn(24)

    def op(x, w):
        return rms_norm(x, w, 1e-5, backend="triton")

    first, second = run(op, [x, w], torch.float32), run(op, [x, w], torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
