"""Log-probs, entropies and drawn tokens in C++ against fp64; a row's bits depend on it alone."""

import pytest
import torch
from native_cases import DTYPES, threads

from kernels.cpp import ops as cpp_ops

pytestmark = pytest.mark.usefixtures("native")

VOCABS = [1, 2, 15, 16, 17, 255, 256, 257, 300, 1000, 4099]
ALMOST_ONE = 1.0 - 2.0**-53


def tempered64(logits, temperature):
    """z as fp32 has it, widened."""
    return (logits.float() / temperature).double()


def score64(logits, ids, temperature):
    logp = torch.log_softmax(tempered64(logits, temperature), -1)
    entropy = -torch.where(logp.exp() > 0, logp * logp.exp(), 0.0).sum(-1)
    return logp.gather(1, ids[:, None]).squeeze(1), entropy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_score_is_fp64s(dtype, temperature, vocab):
    torch.manual_seed(vocab)
    for num_rows in (0, 1, 5):
        wide = (torch.randn(num_rows, vocab + 3) * 6).to(dtype)
        ids = torch.randint(0, vocab, (num_rows,))
        for logits in (wide[:, :vocab], wide[:, :vocab].contiguous()):
            logp, lse, entropy = cpp_ops.score(logits, ids, temperature, True)
            exact_logp, exact_entropy = score64(logits, ids, temperature)
            exact_lse = tempered64(logits, temperature).logsumexp(-1)
            for ours, exact in ((logp, exact_logp), (lse, exact_lse), (entropy, exact_entropy)):
                assert torch.allclose(ours.double(), exact, rtol=4e-7, atol=4e-6)
            assert torch.equal(cpp_ops.score(logits, ids, temperature, False)[0], logp)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 16, 300])
def test_extreme_logits_have_their_limits(dtype, vocab):
    ids = torch.tensor([vocab - 1])
    even = torch.full((1, vocab), 3e38, dtype=dtype)
    logp, _, entropy = cpp_ops.score(even, ids, 1.0, True)
    log_vocab = torch.tensor(vocab, dtype=torch.float64).log()
    assert torch.allclose(entropy.double(), log_vocab, rtol=1e-6)
    logp = cpp_ops.score(torch.zeros(1, vocab, dtype=dtype), ids, 0.7, True)[0]
    assert torch.allclose(logp.double(), -log_vocab, rtol=1e-6)
    for low in (-200.0, -3e38, -torch.inf):
        peak = torch.full((1, vocab), low, dtype=dtype)
        peak[0, vocab - 1] = 2.0
        logp, lse, entropy = cpp_ops.score(peak, ids, 0.7, True)
        assert logp == 0 and entropy == 0 and lse == torch.tensor(2.0) / 0.7
        other = cpp_ops.score(peak, torch.tensor([0]), 0.7, True)[0]
        assert other == peak[0, 0].float() / 0.7 - lse
        for u in (None, torch.tensor([0.0]), torch.tensor([ALMOST_ONE])):
            token, logp = cpp_ops.pick(peak, 0.7, None if u is None else u.double())
            assert token == vocab - 1 and logp == 0
    two = torch.full((1, vocab), -torch.inf, dtype=dtype)
    two[0, 0] = two[0, vocab - 1] = -1000.0
    logp, _, entropy = cpp_ops.score(two, ids, 1.0, True)
    assert torch.allclose(torch.cat([-logp, entropy]), torch.tensor(2.0).log(), rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab", [7, 48, 300, 2000])
def test_a_draw_inverts_the_cumulative_distribution(dtype, temperature, vocab):
    """On a grid u = (i + 1/2) / n every token comes as often as its probability says, to one."""
    torch.manual_seed(vocab)
    logits = (torch.randn(vocab) * 3).to(dtype)
    num = 4000
    u = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    tokens, logp = cpp_ops.pick(logits.expand(num, -1), temperature, u)
    p = torch.softmax(tempered64(logits, temperature), -1)
    cdf = p.cumsum(-1)
    is_clear = (u[:, None] - cdf).abs().amin(-1) > 1e-6  # beyond fp32's rounding of the sums
    expected = torch.searchsorted(cdf, u, right=True)
    assert is_clear.float().mean() > 0.97
    assert torch.equal(tokens[is_clear], expected[is_clear])
    counts = torch.bincount(tokens, minlength=vocab)
    assert ((counts - num * p).abs() <= 1.01).all()
    enough = num * p >= 5
    statistic = ((counts - num * p).square() / (num * p))[enough].sum()
    assert statistic < enough.sum()  # chi-square's mean; a grid is more even than chance
    assert torch.allclose(logp.double(), p[tokens].log(), rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 4, 64, 1024])
def test_where_a_token_ends_the_next_begins(dtype, vocab):
    """Equal logits, u = i / V: sums and targets are exact, and token i begins at i / V."""
    u = torch.arange(vocab, dtype=torch.float64) / vocab
    for below in (u - 2.0**-53, u):
        tokens, _ = cpp_ops.pick(torch.zeros(vocab, vocab, dtype=dtype), 1.0, below.clamp(min=0))
        shift = 0 if below is u else 1
        assert torch.equal(tokens, (torch.arange(vocab) - shift).clamp(min=0))


def test_a_small_weight_is_as_exact_as_a_large_one():
    """Of the logits (z, 0) the first is drawn where u < e^z / (1 + e^z); below fp32: never."""
    for z in [-0.5, -10.0, -40.25, -70.0, -86.0, -87.25]:
        weight = torch.tensor(z, dtype=torch.float64).exp()
        border = weight / (1 + weight)
        u = torch.stack([border * (1 - 1e-6), border * (1 + 1e-6)])
        tokens, _ = cpp_ops.pick(torch.tensor([z, 0.0]).expand(2, -1), 1.0, u)
        assert tokens.tolist() == [0, 1], z
    u = torch.zeros(1, dtype=torch.float64)
    assert cpp_ops.pick(torch.tensor([[-88.0, 0.0]]), 1.0, u)[0] == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_without_weight_is_never_drawn(dtype):
    torch.manual_seed(0)
    u = torch.cat([torch.tensor([0.0, 2.0**-53, ALMOST_ONE]), torch.rand(61)]).double()
    for vocab in (3, 255, 256, 257, 1000):
        logits = torch.full((vocab,), -torch.inf, dtype=dtype)
        alive = torch.randperm(vocab)[: max(1, vocab // 9)]
        logits[alive] = torch.randn(len(alive)).to(dtype)
        far = torch.tensor([i for i in range(vocab) if i not in set(alive.tolist())])
        logits[far[::2]] = -300.0  # a weight of e^-300 is 0 in fp32
        tokens, logp = cpp_ops.pick(logits.expand(len(u), -1), 1.0, u)
        assert torch.isin(tokens, alive).all() and logp.isfinite().all()
        assert tokens[0] == alive.min() and tokens[2] == alive.max()
    middle = torch.full((1000,), -torch.inf, dtype=dtype)  # runs of no weight before and after
    middle[300:310] = torch.randn(10).to(dtype)
    tokens, _ = cpp_ops.pick(middle.expand(len(u), -1), 1.0, u)
    assert ((tokens >= 300) & (tokens < 310)).all() and tokens[0] == 300 and tokens[2] == 309


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 16, 40, 256, 600])
def test_greedy_is_the_first_of_equals(dtype, vocab):
    torch.manual_seed(vocab)
    logits = torch.randn(20, vocab).to(dtype).clamp(max=0.5)
    for row in range(20):
        logits[row, torch.randint(0, vocab, (3,))] = 1.5
    expected = torch.tensor([row.tolist().index(1.5) for row in logits])
    for temperature in (1.0, 0.7):
        tokens, logp = cpp_ops.pick(logits, temperature, None)
        assert torch.equal(tokens, expected)
        assert torch.equal(logp, cpp_ops.score(logits, tokens, temperature, False)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_shows_in_the_log_prob_and_the_token_exists(dtype):
    for vocab in (5, 300):
        for at in (0, vocab // 2, vocab - 1):
            logits = torch.randn(2, vocab).to(dtype)
            logits[0, at] = torch.nan
            for u in (None, torch.tensor([0.3, 0.6], dtype=torch.float64)):
                tokens, logp = cpp_ops.pick(logits, 1.0, u)
                assert logp.isnan().tolist() == [True, False]
                assert ((tokens >= 0) & (tokens < vocab)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_every_batch(dtype, num_threads):
    torch.manual_seed(0)
    logits = (torch.randn(40, 3001) * 4).to(dtype)  # enough to be shared among threads
    ids, u = torch.randint(0, 3001, (40,)), torch.rand(40, dtype=torch.float64)

    def run(rows):
        drawn = cpp_ops.pick(logits[rows], 0.8, u[rows])
        greedy = cpp_ops.pick(logits[rows], 0.8, None)
        return (*cpp_ops.score(logits[rows], ids[rows], 0.8, True), *drawn, *greedy)

    alone = [torch.cat(x) for x in zip(*(run(slice(i, i + 1)) for i in range(40)), strict=True)]
    with threads(num_threads):
        for rows in (slice(0, 40), slice(3, 5), slice(1, 39, 2)):
            for ours, expected in zip(run(rows), alone, strict=True):
                assert torch.equal(ours, expected[rows])
    again = cpp_ops.score(logits, alone[3], 0.8, False)[0]
    assert torch.equal(again, alone[4])  # the drawn token's log-prob is the trainer's
