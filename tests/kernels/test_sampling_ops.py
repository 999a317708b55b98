"""sample, apply_penalties_ and apply_token_bitmask_ on a CPU."""

import pytest
import torch

from kernels import apply_penalties_, apply_token_bitmask_, sample
from kernels.logits.sampling import exponentials, philox


def draw(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, rows=1, seed=3):
    logits = torch.as_tensor(logits, dtype=torch.float32).expand(rows, -1)
    values = (temperature, top_k, top_p, min_p)
    options = [torch.full((rows,), v, dtype=torch.float32) for v in values]
    return sample(logits, *options, torch.full((rows,), seed), torch.arange(rows))


def test_philox_gives_the_published_vectors():
    """kat_vectors of Random123 for philox4x32-10."""
    ones = 0xFFFFFFFF
    for counter, key, expected in (
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, [ones] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
         [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ):  # fmt: skip
        words = philox([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
        assert [int(w) for w in words] == expected


def test_the_noise_has_mean_and_variance_one_and_differs_by_seed_and_position():
    seeds, positions = torch.tensor([1, 1, 2, 1 << 32]), torch.tensor([5, 6, 5, 5])
    noise = exponentials(seeds, positions, 20001)
    assert (noise > 0).all() and noise.isfinite().all()
    assert (noise.mean(1) - 1).abs().max() < 0.03 and (noise.var(1) - 1).abs().max() < 0.1
    together = torch.corrcoef(noise) - torch.eye(4)
    assert together.abs().max() < 0.03
    assert torch.equal(exponentials(seeds[:1], positions[:1], 77)[0], noise[0, :77])


Z = [1.0, 3.0, 2.0, 3.0, -1.0]
P = torch.tensor(Z).softmax(0)


def support(**options):
    drawn = draw(Z, rows=600, **options)
    kept = sorted(set(drawn.tokens.tolist()))
    total = sum(P[t] for t in kept)
    torch.testing.assert_close(drawn.logprobs, (P / total).log()[drawn.tokens], rtol=0, atol=1e-5)
    torch.testing.assert_close(drawn.raw_logprobs, P.log()[drawn.tokens], rtol=0, atol=1e-5)
    return kept


def test_truncation_by_hand():
    """p is .055 .402 .148 .402 .007 (before rounding): tokens 1 and 3 tie at the top."""
    assert support() == [0, 1, 2, 3, 4]
    assert support(top_k=2) == [1, 3]
    assert support(top_k=1) == [1, 3]  # a tie with the last one kept is kept
    assert support(top_k=3) == [1, 2, 3]
    assert support(top_p=0.79) == [1, 3]
    assert support(top_p=0.82) == [1, 2, 3]
    assert support(top_p=0.97) == [0, 1, 2, 3]
    assert support(min_p=0.2) == [1, 2, 3]
    assert support(top_k=3, min_p=0.5) == [1, 3]


def test_tokens_come_as_often_as_their_probability():
    rows, temperature = 20000, 1.7
    drawn = draw(Z, rows=rows, temperature=temperature)
    p = (torch.tensor(Z) / temperature).softmax(0)
    share = torch.bincount(drawn.tokens, minlength=5) / rows
    assert ((share - p).abs() < 4 * (p * (1 - p) / rows).sqrt()).all()
    torch.testing.assert_close(drawn.raw_logprobs, p.log()[drawn.tokens], rtol=0, atol=1e-5)


def test_temperature_0_is_the_argmax_with_the_raw_logprob_of_temperature_1():
    drawn = draw(Z, temperature=0.0)
    assert int(drawn.tokens) == 1 and float(drawn.logprobs) == 0
    assert float(drawn.raw_logprobs) == pytest.approx(float(P[1].log()))


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -2.0, 1.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    counts = torch.tensor([[2, 1, 0, 0], [5, 0, 0, 0]], dtype=torch.int32)
    prompt = torch.tensor([[False, False, False, True], [True] * 4])
    options = {
        "repetition": torch.tensor([2.0, 1.0]),
        "frequency": torch.tensor([0.5, 0.0]),
        "presence": torch.tensor([0.25, 0.0]),
    }
    apply_penalties_(logits, counts, prompt, **options)
    # 2/2 - 2·.5 - .25;  -2·2 - .5 - .25;  untouched;  in the prompt only: 4/2
    assert logits.tolist() == [[-0.25, -4.75, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]]


def test_rows_with_neutral_penalties_keep_their_bits_beside_others():
    torch.manual_seed(0)
    logits, counts = torch.randn(5, 9), torch.randint(0, 3, (5, 9), dtype=torch.int32)
    presence = torch.tensor([0.0, 0.5, 0.0, 0.0, 1.0])
    off = {"repetition": torch.ones(5), "frequency": torch.zeros(5)}
    given = logits.clone()
    apply_penalties_(given, counts, None, presence=presence, **off)
    assert torch.equal(given, logits - presence[:, None] * (counts > 0))


def test_bitmask_by_hand():
    logits = torch.zeros(2, 34)
    words = torch.tensor([[0b101, 0b10], [-1, -1]], dtype=torch.int32)
    apply_token_bitmask_(logits, words)
    assert (logits[0] == 0).nonzero().flatten().tolist() == [0, 2, 33]
    assert (logits[1] == 0).all()


TWO = torch.ones(2)
LOGITS = torch.zeros(2, 40)
COUNTS = torch.zeros(2, 40, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: sample(torch.zeros(4), *[TWO] * 6), "logits"),
        (lambda: sample(LOGITS, TWO, torch.ones(3), None, None, TWO, TWO), "top_k"),
        (lambda: sample(LOGITS, TWO, None, None, None, TWO, torch.ones(2, 1)), "positions"),
        (lambda: apply_token_bitmask_(LOGITS, torch.zeros(2, 1, dtype=torch.int32)), "bitmask"),
        (lambda: apply_token_bitmask_(LOGITS, torch.zeros(2, 2)), "bitmask"),
        (lambda: apply_penalties_(LOGITS, COUNTS[:, 1:], None, repetition=TWO, frequency=TWO,
                                  presence=TWO), "output_counts"),
        (lambda: apply_penalties_(LOGITS, COUNTS, None, repetition=torch.ones(3), frequency=TWO,
                                  presence=TWO), "repetition"),
    ],
)  # fmt: skip
def test_bad_input_names_the_argument(call, name):
    with pytest.raises(ValueError, match=name):
        call()
