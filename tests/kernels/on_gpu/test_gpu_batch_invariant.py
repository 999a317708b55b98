"""Batch-invariant ops on a GPU: a row's bits are its own wherever it lies among how many rows."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "interpreter"))
from guard import check

from kernels import (
    linear,
    log_softmax_batch_invariant,
    rms_norm,
)
from kernels.logits.batch_invariant import log_softmax_batch_invariant_ref

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [torch.float32, torch.bfloat16]


def normal(*shape):
    return torch.randn(shape, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4096, 2560, 4096), (1003, 2567, 130), (1, 4096, 4096)])
def test_matmul_is_as_good_as_plain_torch(dtype, shape):
    torch.manual_seed(0)
    m, k, n = shape
    inputs = [normal(m, k), normal(n, k)]
    check(lambda x, w: linear(x, w, batch_invariant=True), F.linear, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(512, 151936), (3, 5, 1001), (1, 7)])
def test_log_softmax_is_as_good_as_plain_torch(dtype, shape):
    torch.manual_seed(0)
    inputs = [normal(*shape) * 3]
    check(log_softmax_batch_invariant, log_softmax_batch_invariant_ref, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype):
    torch.manual_seed(0)
    x, b, w = (normal(*s).to(dtype) for s in ((2000, 4096), (4096, 4096), (4096,)))
    slope = normal(2000, 4096)

    def run(op, lo, hi):
        leaf = x[lo:hi].clone().requires_grad_()
        y = op(leaf)
        return y.detach(), torch.autograd.grad(y, leaf, slope[lo:hi].to(y.dtype))[0]

    for op in (
        lambda r: linear(r, b, batch_invariant=True),
        log_softmax_batch_invariant,
        lambda r: rms_norm(r, w, 1e-6),
    ):
        whole = run(op, 0, 2000)
        for lo, hi in ((0, 1), (1999, 2000), (3, 67), (131, 1500), (777, 785)):
            part = run(op, lo, hi)
            assert all(torch.equal(p, t[lo:hi]) for p, t in zip(part, whole, strict=True)), (lo, hi)
