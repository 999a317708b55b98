"""Triton's linear_logprob, interpreted, against fp64, from NaN buffers."""

from importlib import import_module

import pytest
import torch
from guard import assert_as_good_as_plain_torch, outputs_and_gradients

from kernels import linear_logprob, linear_topk
from kernels.torch.linear_logprob import linear_logprob_ref

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab", [97, 4096 + 31])
@pytest.mark.parametrize("has_entropy", [False, True])
def test_linear_logprob(dtype, temperature, vocab, has_entropy):
    torch.manual_seed(0)
    ids = torch.randint(0, vocab, (11,))
    ids[0], ids[1] = 0, vocab - 1

    def ours(h, w):
        options = {"temperature": temperature, "chunk_size": 4, "backend": "triton"}
        return linear_logprob(h, w, ids, return_entropy=has_entropy, **options)

    def plain(h, w):
        both = linear_logprob_ref(h, w, ids, temperature)
        return both if has_entropy else both[0]

    inputs = [torch.randn(11, 16), torch.randn(vocab, 16)]
    # the product of the backward pass is the CPU's here: torch's sum may be in more parts than ours
    assert_as_good_as_plain_torch(ours, plain, inputs, dtype, times=5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_entropy", [False, True])
def test_several_tokens_at_each_place(dtype, has_entropy):
    torch.manual_seed(0)
    vocab = 4096 + 31
    ids = torch.randint(0, vocab, (11, 4))
    ids[0, 1], ids[1, 3], ids[2, 2] = 0, vocab - 1, ids[2, 0]

    def ours(h, w):
        options = {"temperature": 0.7, "chunk_size": 4, "backend": "triton"}
        found = linear_logprob(h, w, ids, return_entropy=has_entropy, **options)
        return (found[0].flatten(), found[1]) if has_entropy else found.flatten()

    def plain(h, w):
        z = (h @ w.t()).to(torch.promote_types(h.dtype, torch.float32)) / 0.7
        whole = torch.log_softmax(z, -1)
        logp = whole.gather(1, ids).flatten()
        return (logp, -(whole.exp() * whole).sum(-1)) if has_entropy else logp

    inputs = [torch.randn(11, 16), torch.randn(vocab, 16)]
    assert_as_good_as_plain_torch(ours, plain, inputs, dtype, times=5)


def test_the_likeliest_tokens():
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 16), torch.randn(97, 16)
    ids, logp = linear_topk(hidden, weight, 4, temperature=0.7, backend="triton")
    expected = torch.log_softmax(hidden.double() @ weight.double().t() / 0.7, -1).topk(4)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(logp.double(), expected.values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_token_and_one_token(num_tokens):
    torch.manual_seed(0)
    ids = torch.full((num_tokens,), 3)
    inputs = [torch.randn(num_tokens, 12), torch.randn(50, 12)]
    ours = outputs_and_gradients(
        lambda h, w: linear_logprob(h, w, ids, return_entropy=True, backend="triton"), inputs
    )
    exact = outputs_and_gradients(
        lambda h, w: linear_logprob_ref(h, w, ids), [x.double() for x in inputs]
    )
    for a, e in zip(ours, exact, strict=True):  # one number: plain torch may be exact by luck
        torch.testing.assert_close(a.double(), e, rtol=1e-6, atol=1e-6)


def test_the_entropy_alone_can_be_the_loss():
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (7,))
    assert_as_good_as_plain_torch(
        lambda h, w: linear_logprob(h, w, ids, return_entropy=True, backend="triton")[1],
        lambda h, w: linear_logprob_ref(h, w, ids)[1],
        [torch.randn(7, 12), torch.randn(50, 12)],
        torch.float32,
    )


def test_a_token_outside_the_vocabulary_is_nan_and_spoils_no_other():
    hidden, weight = torch.randn(3, 8), torch.randn(20, 8)
    good = linear_logprob(hidden, weight, torch.tensor([4, 5, 6]), backend="triton")
    ids = torch.tensor([4, 20, 6], device="cpu")
    with pytest.raises(ValueError, match="token_ids: 20"):
        linear_logprob(hidden, weight, ids, backend="triton")
    stats = import_module("kernels.triton.linear_logprob").stats
    logp = stats((hidden @ weight.t()).contiguous(), ids, 1.0)[0]
    assert logp.isnan().tolist() == [False, True, False]
    assert torch.allclose(logp[[0, 2]], good[[0, 2]])


def test_fp64_is_refused():
    x = torch.zeros(2, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        linear_logprob(x, x, torch.zeros(2, dtype=torch.long), backend="triton")
