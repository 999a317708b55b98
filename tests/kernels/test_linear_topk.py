"""Log-probs of several tokens at each place, and the likeliest ones: equal log_softmax with its
gradients, and never hold tokens x vocabulary."""

import pytest
import torch
from largest_tensor import LargestTensor

from kernels import linear_logprob, linear_topk

pytestmark = pytest.mark.usefixtures("cpu_path")


def inputs(dtype: torch.dtype, num_tokens: int = 70, vocab: int = 97):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 48, generator=generator, dtype=torch.float64).to(dtype)
    weight = 0.3 * torch.randn(vocab, 48, generator=generator, dtype=torch.float64).to(dtype)
    ids = torch.randint(0, vocab, (num_tokens, 5), generator=generator)
    ids[:, 4] = ids[:, 1]  # a token may be named twice
    return hidden, weight, ids


def slopes(logp: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, logp.numel(), dtype=logp.dtype).view(logp.shape)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_equal_those_of_plain_torch(dtype, limit, temperature, with_entropy):
    hidden, weight, ids = inputs(dtype)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    logp, entropy = linear_logprob(
        *leaves, ids, temperature=temperature, return_entropy=True, chunk_size=32
    )
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    whole = torch.log_softmax(exact[0] @ exact[1].t() / temperature, -1)
    expected = whole.gather(1, ids)
    loss, true = (logp * slopes(logp)).sum(), (expected * slopes(expected)).sum()
    if with_entropy:
        loss, true = loss + entropy.sum(), true - (whole.exp() * whole).sum()
    torch.testing.assert_close(logp.double(), expected, rtol=0, atol=limit)
    found = torch.autograd.grad(loss, leaves)
    for mine, slope in zip(found, torch.autograd.grad(true, exact), strict=True):
        torch.testing.assert_close(mine.double(), slope, rtol=0, atol=20 * limit)


def test_gradients_by_finite_differences():
    hidden, weight, ids = inputs(torch.float64, num_tokens=3, vocab=11)
    weight, ids = weight[:11], ids % 11
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprob(h, w, ids, temperature=0.7), leaves, check_undefined_grad=False
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_several_has_the_bits_that_it_has_alone(dtype):
    hidden, weight, ids = inputs(dtype)
    several = linear_logprob(hidden, weight, ids, temperature=0.6)
    alone = linear_logprob(hidden, weight, ids[:, 0], temperature=0.6)
    assert torch.equal(several[:, 0], alone)
    assert torch.equal(several[:, 1], several[:, 4])
    for column in range(1, 5):
        own = linear_logprob(hidden, weight, ids[:, column], temperature=0.6)
        torch.testing.assert_close(several[:, column], own, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("k", [1, 5, 97])
def test_the_likeliest_are_those_of_log_softmax_in_their_order(dtype, k):
    hidden, weight, _ = inputs(dtype)
    ids, logp = linear_topk(hidden, weight, k, temperature=0.7)
    whole = torch.log_softmax(hidden.double() @ weight.double().t() / 0.7, -1)
    expected = whole.topk(k)
    torch.testing.assert_close(logp.double(), expected.values, rtol=0, atol=2e-5)
    torch.testing.assert_close(whole.gather(1, ids), expected.values, rtol=0, atol=2e-5)
    assert ids.shape == (70, k) and not logp.requires_grad
    assert all(len(set(row)) == k for row in ids.tolist())


def test_none_of_them_holds_tokens_times_vocabulary():
    num_tokens, vocab = 700, 49152
    hidden = torch.randn(num_tokens, 8).requires_grad_()
    weight = torch.randn(vocab, 8).requires_grad_()
    with LargestTensor() as largest:
        ids, _ = linear_topk(hidden, weight, 3)
        linear_logprob(hidden, weight, ids).sum().backward()
    assert largest.numel < num_tokens * vocab / 2


@pytest.mark.parametrize("k", [0, 98])
def test_more_than_the_vocabulary_or_none_are_refused(k):
    hidden, weight, _ = inputs(torch.float32)
    with pytest.raises(ValueError, match=f"k={k}: must be from 1 to the vocabulary's 97"):
        linear_topk(hidden, weight, k)


@pytest.mark.parametrize("shape", [(70, 0), (69, 2), (70, 2, 1)])
def test_ids_of_another_shape_are_refused(shape):
    hidden, weight, _ = inputs(torch.float32)
    with pytest.raises(ValueError, match="must be one id for each of the 70 rows of hidden"):
        linear_logprob(hidden, weight, torch.zeros(shape, dtype=torch.int64))
