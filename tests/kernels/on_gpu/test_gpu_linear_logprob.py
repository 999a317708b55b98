"""linear_logprob on a GPU: real vocabularies, and the same bits twice."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "interpreter"))
from guard import assert_as_good_as_plain_torch, outputs_and_gradients

from kernels import linear_logprob
from kernels.torch.linear_logprob import linear_logprob_ref

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [torch.float32, torch.bfloat16]


def inputs(tokens, vocab, width):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device="cuda")
    weight = torch.randn(vocab, width, device="cuda") * 2 * width**-0.5
    return [hidden, weight], torch.randint(0, vocab, (tokens,), device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tokens, vocab, width", [(1031, 151936, 1024), (515, 49153, 576)])
def test_linear_logprob(dtype, temperature, tokens, vocab, width):
    leaves, ids = inputs(tokens, vocab, width)

    def ours(h, w):
        options = {"temperature": temperature, "return_entropy": True, "chunk_size": 256}
        return linear_logprob(h, w, ids, **options)

    assert_as_good_as_plain_torch(
        ours, lambda h, w: linear_logprob_ref(h, w, ids, temperature), leaves, dtype
    )
    typed = [x.to(dtype) for x in leaves]
    first, second = outputs_and_gradients(ours, typed), outputs_and_gradients(ours, typed)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_memory_stays_below_tokens_by_vocabulary():
    (hidden, weight), ids = inputs(16384, 65536, 512)
    leaves = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_logprob(*leaves, ids, chunk_size=1024).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 16384 * 65536 * 2 / 2, "half of the bf16 logits of all tokens"
