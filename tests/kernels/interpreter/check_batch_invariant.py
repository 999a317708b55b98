"""Triton's batch-invariant ops, interpreted: as good as plain torch, and a row's bits are its own.

`rms_norm` is tested too: it has the property without asking for it. The interpreter multiplies
tiles with NumPy, whose bits depend on a row's place in the tile; a tensor core's do not. So here
matmul's rows keep their place and only their number changes (the GPU tests move them as well).
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from guard import assert_as_good_as_plain_torch

from kernels import linear, log_softmax_batch_invariant, rms_norm
from kernels.logits.batch_invariant import log_softmax_batch_invariant_ref

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(37, 70, 150), (1, 3, 5), (0, 4, 6), (4, 0, 6)])
def test_matmul(dtype, shape):
    torch.manual_seed(0)
    m, k, n = shape
    assert_as_good_as_plain_torch(
        lambda x, w: linear(x, w, batch_invariant=True, backend="triton"),
        F.linear,
        [torch.randn(m, k), torch.randn(n, k)],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4500), (2, 2, 17), (1, 1), (0, 5)])
def test_log_softmax(dtype, shape):
    torch.manual_seed(0)
    assert_as_good_as_plain_torch(
        lambda x: log_softmax_batch_invariant(x, backend="triton"),
        log_softmax_batch_invariant_ref,
        [torch.randn(shape) * 3],
        dtype,
    )


def assert_parts_equal_whole(op, x, splits):
    """op on the whole and on runs of rows, outputs and gradients by x."""

    def run(lo, hi):
        leaf = x[lo:hi].clone().requires_grad_()
        y = op(leaf)
        slope = torch.randn(len(x), y.shape[1], generator=torch.Generator().manual_seed(1))
        return y.detach(), torch.autograd.grad(y, leaf, slope[lo:hi].to(y.dtype))[0]

    whole = run(0, len(x))
    for lo, hi in splits:
        part = run(lo, hi)
        assert all(torch.equal(p, w[lo:hi]) for p, w in zip(part, whole, strict=True)), (lo, hi)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype):
    torch.manual_seed(0)
    x, b, w = (torch.randn(s).to(dtype) for s in ((140, 90), (70, 90), (90,)))
    splits = [(0, 1), (0, 22), (128, 129), (128, 140)]
    product = partial(linear, weight=b, batch_invariant=True, backend="triton")
    assert_parts_equal_whole(product, x, splits)
    splits = [(0, 1), (139, 140), (5, 22), (60, 140)]
    assert_parts_equal_whole(lambda r: log_softmax_batch_invariant(r, backend="triton"), x, splits)
    assert_parts_equal_whole(lambda r: rms_norm(r, w, 1e-5, backend="triton"), x, splits)
