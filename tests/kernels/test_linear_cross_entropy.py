"""linear_cross_entropy: PyTorch's loss and gradients, ignored labels, never tokens x vocabulary."""

import pytest
import torch
from largest_tensor import LargestTensor

from kernels import linear_logprob as linear_cross_entropy
from kernels.linear_logprob import linear_cross_entropy_ref


def inputs(dtype, num_tokens=70, width=48, vocab=97):
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, width, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, width, dtype=torch.float64).to(dtype) * 0.3
    labels = torch.randint(0, vocab, (num_tokens,))
    labels[::3] = -100
    return hidden, weight, labels


def run(op, hidden, weight, labels, dtype):
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
    loss = op(*leaves, labels)
    return [loss, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_as_good_as_plain_torch(dtype):
    hidden, weight, labels = inputs(dtype)
    exact = run(linear_cross_entropy_ref, hidden, weight, labels, torch.float64)
    naive = run(linear_cross_entropy_ref, hidden, weight, labels, dtype)

    def op(h, w, t):
        return linear_cross_entropy(h, w, t, chunk_size=32)

    floor = 1e-11 if dtype == torch.float64 else 1e-7
    for a, n, e in zip(run(op, hidden, weight, labels, dtype), naive, exact, strict=True):
        assert (a.double() - e).abs().max() <= 2 * (n.double() - e).abs().max() + floor


def test_ignored_rows_get_no_gradient_and_any_index_can_be_the_ignored_one():
    hidden, weight, labels = inputs(torch.float32)
    loss, dhidden, _ = run(linear_cross_entropy, hidden, weight, labels, torch.float32)
    assert not dhidden[::3].any() and dhidden[1].any()
    other = labels.masked_fill(labels == -100, 5)
    expected = linear_cross_entropy_ref(hidden, weight, other, ignore_index=5)
    assert torch.allclose(linear_cross_entropy(hidden, weight, other, ignore_index=5), expected)
    assert loss.dtype == torch.float32 and loss.shape == ()


@pytest.mark.parametrize("num_tokens", [0, 6])
def test_no_label_that_counts_gives_zero_and_zero_gradients(num_tokens):
    hidden, weight, labels = inputs(torch.float32, num_tokens=num_tokens)
    labels.fill_(-100)
    loss, *grads = run(linear_cross_entropy, hidden, weight, labels, torch.float32)
    assert loss == 0 and not any(g.any() for g in grads)


def test_tokens_by_vocabulary_never_exists():
    hidden, weight, labels = inputs(torch.float32, num_tokens=512, width=16, vocab=1000)
    hidden.requires_grad_()
    weight.requires_grad_()
    with LargestTensor() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk_size=64).backward()
    assert seen.numel == 64 * 1000


@pytest.mark.parametrize(
    "change, name",
    [
        ({"labels_T": torch.zeros(3, dtype=torch.long)}, "labels: shape"),
        ({"labels_T": torch.full((70,), 97)}, "97 is outside"),
        ({"hidden_TD": torch.zeros(70, 5)}, "hidden"),
    ],
)
def test_bad_input_names_the_argument(change, name):
    hidden, weight, labels = inputs(torch.float32)
    with pytest.raises(ValueError, match=name):
        linear_cross_entropy(
            **{"hidden_TD": hidden, "weight_VD": weight, "labels_T": labels, **change}
        )
