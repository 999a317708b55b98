"""sample, apply_penalties_ and apply_token_bitmask_ on a GPU, at the vocabulary of Qwen3."""

import pytest
import torch

from kernels import apply_penalties_, apply_token_bitmask_, sample
from kernels.logits.sampling import apply_penalties_ref, apply_token_bitmask_ref, sample_ref

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
VOCAB = 151936
KINDS = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.0),
         (0.8, 40, 0.95, 0.0), (1.2, 0, 1.0, 0.05), (1.0, 1, 1.0, 0.0)]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sample_equals_the_definition_and_itself(dtype):
    torch.manual_seed(0)
    rows = 8 * len(KINDS)
    logits = (3 * torch.randn(rows, VOCAB, device="cuda")).to(dtype)
    temperature, top_k, top_p, min_p = torch.tensor(KINDS, device="cuda").repeat(8, 1).unbind(1)
    seeds = torch.arange(rows, device="cuda") * 2**40
    args = (logits, temperature, top_k.int(), top_p, min_p, seeds, seeds + 3)
    ours, again = sample(*args, backend="triton"), sample(*args, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    expected = sample_ref(*args)
    same = ours.tokens == expected.tokens  # a rounding may swap two scores that nearly tie
    assert same.float().mean() > 0.95
    for a, e in zip(ours[1:], expected[1:], strict=True):
        torch.testing.assert_close(a[same], e[same], rtol=1e-4, atol=1e-3)
    raw = logits.float().div(torch.where(temperature == 0, 1.0, temperature)[:, None])
    raw = raw.log_softmax(-1).gather(1, ours.tokens[:, None])[:, 0]
    torch.testing.assert_close(ours.raw_logprobs, raw, rtol=1e-5, atol=1e-4)


def test_tokens_come_as_often_as_their_probability():
    rows = 100000
    z = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0], device="cuda")
    ones = torch.ones(rows, device="cuda")
    at = torch.arange(rows, device="cuda")
    drawn = sample(z.expand(rows, 5), ones, None, None, None, at * 0 + 3, at, backend="triton")
    share, p = torch.bincount(drawn.tokens, minlength=5) / rows, z.softmax(0)
    assert ((share - p).abs() < 4 * (p * (1 - p) / rows).sqrt()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_of_logits(dtype):
    torch.manual_seed(0)
    logits = torch.randn(16, VOCAB, device="cuda").to(dtype)
    counts = torch.randint(0, 3, (16, VOCAB), dtype=torch.int32, device="cuda")
    prompt = torch.rand(16, VOCAB, device="cuda") < 0.1
    names = ("repetition", "frequency", "presence")
    options = {n: torch.rand(16, device="cuda") + (n == "repetition") for n in names}
    expected = apply_penalties_ref(logits, counts, prompt, **options)
    apply_penalties_(logits, counts, prompt, backend="triton", **options)
    torch.testing.assert_close(logits, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    words = torch.randint(-(2**31), 2**31, (16, VOCAB // 32), dtype=torch.int32, device="cuda")
    expected = apply_token_bitmask_ref(logits, words)
    apply_token_bitmask_(logits, words, backend="triton")
    assert torch.equal(logits, expected)
