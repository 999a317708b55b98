"""Triton's sample, apply_penalties_ and apply_token_bitmask_, interpreted, against sorts."""

import pytest
import torch
from guard import guarded, poisoned_memory

from kernels import apply_penalties_, apply_token_bitmask_, sample
from kernels.logits.sampling import apply_penalties_ref, apply_token_bitmask_ref, sample_ref

DTYPES = [torch.float32, torch.bfloat16]

# temperature, top_k, top_p, min_p
REQUESTS = torch.tensor([
    [0.0, 0, 1.0, 0.0], [1.0, 0, 1.0, 0.0], [0.7, 5, 1.0, 0.0], [1.3, 0, 0.8, 0.0],
    [0.9, 40, 0.9, 0.0], [1.0, 0, 1.0, 0.1], [1.0, 1, 1.0, 0.0], [2.0, 100000, 0.3, 0.01],
])  # fmt: skip


def draw(logits, seed, backend, requests=REQUESTS):
    temperature, top_k, top_p, min_p = requests.unbind(1)
    seeds = torch.arange(len(logits)) * 2**40 + seed
    positions = torch.arange(len(logits)) + 2**33
    return sample(logits, temperature, top_k.int(), top_p, min_p, seeds, positions, backend=backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5001, 97, 1])
def test_sample_equals_the_definition(dtype, vocab):
    """bf16 logits tie often: every tie with the last token kept is kept, by sort and by pivot."""
    torch.manual_seed(vocab)
    logits = guarded((3 * torch.randn(len(REQUESTS), vocab)).to(dtype))
    for seed in range(2):
        with poisoned_memory():
            ours = draw(logits, seed, "triton")
        expected = draw(logits, seed, "torch")
        assert torch.equal(ours.tokens, expected.tokens)
        for a, e in zip(ours[1:], expected[1:], strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=2e-5)


def test_the_first_of_equal_logits_is_the_greedy_token():
    """Also where it lies in a later lane of an earlier block: 7 and 4100 are lanes 7 and 4."""
    logits = torch.zeros(2, 5001)
    logits[:, [7, 4100, 4999]] = 3.0
    logits[1, 4096] = 3.0  # lane 0
    greedy = torch.tensor([[0.0, 0, 1.0, 0.0]] * 2)
    assert draw(logits, 0, "triton", greedy).tokens.tolist() == [7, 7]


def test_parameters_that_are_off_for_all_rows_may_be_left_out():
    torch.manual_seed(0)
    logits = torch.randn(4, 300)
    args = torch.ones(4), torch.arange(4), torch.arange(4)
    off = torch.zeros(4, dtype=torch.int32), torch.ones(4), torch.zeros(4)
    ours = sample(logits, args[0], None, None, None, *args[1:], backend="triton")
    expected = sample(logits, args[0], *off, *args[1:], backend="triton")
    assert all(torch.equal(a, e) for a, e in zip(ours, expected, strict=True))


def test_a_row_does_not_depend_on_its_batch_nor_on_padding_of_rows():
    torch.manual_seed(0)
    logits = torch.randn(8, 5000)
    whole = draw(logits, 0, "triton")
    padded = torch.full((8, 5024), torch.nan)
    padded[:, :5000] = logits
    part = draw(padded[:, :5000], 0, "triton")
    assert all(torch.equal(a, b) for a, b in zip(whole, part, strict=True))
    temperature, top_k, top_p, min_p = REQUESTS[3:4].unbind(1)
    alone = sample(
        logits[3:4], temperature, top_k, top_p, min_p, torch.tensor([3 * 2**40]),
        torch.tensor([3 + 2**33]), backend="triton",
    )  # fmt: skip
    assert all(torch.equal(a[0], b[3]) for a, b in zip(alone, whole, strict=True))


def test_banned_tokens_are_never_drawn():
    logits = torch.full((8, 300), -torch.inf)
    logits[:, [7, 131, 299]] = torch.tensor([1.0, 2.0, -40.0])
    for seed in range(4):
        ours = draw(logits, seed, "triton")
        assert torch.isin(ours.tokens, torch.tensor([7, 131, 299])).all()
        assert ours.logprobs.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_prompt", [False, True])
def test_penalties(dtype, has_prompt):
    torch.manual_seed(0)
    logits = guarded(torch.randn(5, 4099).to(dtype))
    counts = torch.randint(0, 3, (5, 4099), dtype=torch.int32)
    prompt = torch.rand(5, 4099) < 0.3 if has_prompt else None
    options = {
        "repetition": torch.tensor([1.0, 1.2, 0.8, 1.0, 1.0]),
        "frequency": torch.tensor([0.0, 0.1, 0.0, 0.5, 0.0]),
        "presence": torch.tensor([0.0, 0.0, -0.2, 0.3, 0.4]),
    }
    expected = apply_penalties_ref(logits, counts, prompt, **options)
    untouched = logits[0].clone()
    apply_penalties_(logits, counts, prompt, backend="triton", **options)
    torch.testing.assert_close(logits, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(logits[0], untouched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [4099, 31, 64])
def test_bitmask(dtype, vocab):
    torch.manual_seed(0)
    logits = guarded(torch.randn(3, vocab).to(dtype))
    words = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), dtype=torch.int32)
    words[1] = -1
    expected = apply_token_bitmask_ref(logits, words)
    assert torch.equal(expected[1], logits[1])
    apply_token_bitmask_(logits, words, backend="triton")
    assert torch.equal(logits, expected)
    buffer = logits._base
    assert buffer[:256].isnan().all() and buffer[-256:].isnan().all()


def test_no_rows_are_no_error():
    logits, none = torch.zeros(0, 40), torch.zeros(0)
    drawn = draw(logits, 0, "triton", REQUESTS[:0])
    assert [x.shape for x in drawn] == [(0,)] * 3
    counts = torch.zeros(0, 40, dtype=torch.int32)
    penalties = {"repetition": none, "frequency": none, "presence": none}
    apply_penalties_(logits, counts, None, backend="triton", **penalties)
    apply_token_bitmask_(logits, counts[:, :2], backend="triton")


def test_the_reference_draws_tokens_as_often_as_their_probability():
    torch.manual_seed(0)
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -3.0]]).expand(4000, 5)
    ones = torch.ones(4000)
    drawn = sample_ref(logits, ones, None, None, None, torch.full((4000,), 9), torch.arange(4000))
    share = torch.bincount(drawn.tokens, minlength=5) / 4000
    p = logits[0].softmax(0)
    assert (share - p).abs().max() < 4 * (p * (1 - p) / 4000).sqrt().max()
