"""Batch-invariant ops on a CPU: right, and a row's bits are its own on any number of threads."""

import pytest
import torch

from kernels import (
    linear,
    log_softmax_batch_invariant,
    logits_logprob,
    rms_norm,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_in_every_batch(dtype, num_threads):
    before = torch.get_num_threads()
    torch.manual_seed(0)
    x, b, w = (torch.randn(s).to(dtype) for s in ((80, 576), (4099, 576), (576,)))
    ops = [
        lambda r: linear(r, b, batch_invariant=True),
        log_softmax_batch_invariant,
        lambda r: rms_norm(r, w, 1e-5),
    ]
    torch.set_num_threads(1)
    wholes = [op(x) for op in ops]
    torch.set_num_threads(num_threads)
    try:
        for lo, hi in ((0, 1), (79, 80), (3, 5), (10, 43)):
            for op, whole in zip(ops, wholes, strict=True):
                assert torch.equal(op(x[lo:hi]), whole[lo:hi]), (lo, hi)
    finally:
        torch.set_num_threads(before)


def test_log_softmax_has_the_bits_of_the_engines_log_probs():
    torch.manual_seed(0)
    logits, ids = torch.randn(9, 5000), torch.randint(0, 5000, (9,))
    chosen = log_softmax_batch_invariant(logits).gather(1, ids[:, None])[:, 0]
    assert torch.equal(chosen, logits_logprob(logits, ids))


def test_gradients_pass_gradcheck():
    a, b = torch.randn(3, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    leaves = (a.requires_grad_(), b.requires_grad_())
    assert torch.autograd.gradcheck(linear, leaves)
    assert torch.autograd.gradcheck(log_softmax_batch_invariant, (a,))
    row = torch.randn(1, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_softmax_batch_invariant, (row,))


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: linear(torch.zeros(2, 3), torch.zeros(4, 5)), "x: last dimension"),
        (lambda: linear(torch.zeros(2, 3), torch.zeros(5, 3).double()), "x: dtype"),
        (lambda: log_softmax_batch_invariant(torch.zeros(2, 0)), "x: shape"),
    ],
)
def test_bad_input_names_the_argument(call, name):
    with pytest.raises(ValueError, match=name):
        call()
