"""top-k, top-p and min-p in C++ keep what an fp64 reference keeps, ties included."""

import pytest
import torch
from native_cases import DTYPES, threads

from kernels.cpp import logits_ops
from kernels.cpp import ops as cpp_ops
from kernels.logits.sampling import kept_tokens

pytestmark = pytest.mark.usefixtures("native")

ALMOST_ONE = 1.0 - 2.0**-53


def weights64(logits, temperature):
    z = (logits.float() / temperature).double()
    return (z - z.max()).exp()


def kept64(logits, temperature, top_k, top_p, min_p):
    """By the definition: compare every token with every other."""
    x, w = logits.float(), weights64(logits, temperature)
    is_larger = x[None, :] > x[:, None]
    kept = (is_larger.sum(1) < (top_k or len(x))) & (w >= min_p)
    return kept & ((is_larger * w).sum(1) < (top_p if top_p < 1 else torch.inf) * w.sum())


def pick(logits, temperature, u, top_k=0, top_p=1.0, min_p=0.0):
    """One row of logits, a token for each u."""
    num = len(u)
    return logits_ops.pick_kept(
        logits.expand(num, -1),
        temperature,
        u.double(),
        torch.full((num,), top_k),
        torch.full((num,), top_p, dtype=torch.float64),
        torch.full((num,), min_p, dtype=torch.float64),
    )


def assert_kept(logits, temperature, **options):
    """The middle of each kept token's share of [0, 1) draws it, and its log-prob says the sum."""
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    kept, w = kept64(logits, temperature, **full), weights64(logits, temperature)
    p = torch.where(kept, w, 0.0) / w[kept].sum()
    drawable = (p > 1e-5).nonzero().flatten()  # wider than the rounding of fp32 sums
    drawable = drawable[:: max(1, len(drawable) // 50)]
    tokens, logp, kept_logp = pick(logits, temperature, (p.cumsum(0) - p / 2)[drawable], **options)
    assert torch.equal(tokens, drawable), options
    assert torch.allclose(kept_logp.double(), p[tokens].log(), rtol=0, atol=4e-6), options
    expected = cpp_ops.score(logits.expand(len(tokens), -1), tokens, temperature, False)[0]
    assert torch.equal(logp, expected)
    return kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 15, 17, 300, 1000])
def test_the_kept_are_an_fp64_references(dtype, vocab):
    torch.manual_seed(vocab)
    sizes = set()
    for scale in (0.01, 1.0, 8.0):
        logits = (torch.randn(vocab) * scale).to(dtype)
        for temperature in (0.7, 1.0, 1.9):
            for options in (
                {"top_k": 1},
                {"top_k": 40},
                {"top_k": vocab},
                {"top_k": 2**62},
                {"top_p": 1e-9},
                {"top_p": 0.5},
                {"top_p": 0.95},
                {"top_p": 1 - 1e-7},
                {"min_p": 1.0},
                {"min_p": 0.05},
                {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
            ):
                sizes.add(int(assert_kept(logits, temperature, **options).sum()))
    assert len(sizes) > min(vocab, 15) / 2


@pytest.mark.parametrize("rank", [3, 40, 1000, 3900])
def test_a_border_that_fp32_sums_cannot_see_is_fp64s(rank):
    """p is the mass before a token, one part in 10^11 more or less; the token has the last id, so
    that u near 1 draws it if and only if it is kept."""
    torch.manual_seed(rank)
    logits = torch.randn(4000) * 2
    order = logits.argsort(descending=True)
    logits = logits[order.roll(-rank - 1)]
    w = weights64(logits, 0.8)
    before = float(w[logits > logits[-1]].sum() / w.sum())
    for sign in (-1, 1):
        token = pick(logits, 0.8, torch.tensor([ALMOST_ONE]), top_p=before * (1 + sign * 1e-11))[0]
        assert (token == 3999) == (sign > 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_ties_with_the_last_one_kept_is_kept(dtype):
    u = (torch.arange(64) + 0.5) / 64
    tied = torch.zeros(64, dtype=dtype)
    for options in ({"top_k": 5}, {"top_p": 0.01}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.9}):
        assert torch.equal(pick(tied, 0.7, u, **options)[0], torch.arange(64))
    steps = torch.tensor([2.0, 1.0, 1.0, 0.0, -torch.inf, 1.0, 2.0], dtype=dtype)
    for top_k, expected in ((1, {0, 6}), (2, {0, 6}), (3, {0, 1, 2, 5, 6}), (5, {0, 1, 2, 5, 6})):
        assert set(pick(steps, 1.0, u, top_k=top_k)[0].tolist()) == expected
    assert set(pick(steps, 1.0, u, top_k=6)[0].tolist()) == {0, 1, 2, 3, 5, 6}
    negative = torch.tensor([-0.0, 0.0, -1.0], dtype=dtype)  # equal zeros
    assert set(pick(negative, 1.0, u, top_k=1)[0].tolist()) == {0, 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_rows_end(dtype):
    u = torch.tensor([0.0, 0.5, ALMOST_ONE])
    for options in ({"top_k": 2}, {"top_p": 0.9}, {"top_p": 1e-300}, {"min_p": 0.5}):
        peak = torch.full((300,), -3e38, dtype=dtype)
        peak[7] = 3e38
        assert pick(peak, 1.0, u, **options)[0].tolist() == [7, 7, 7]
        dead = torch.full((300,), -torch.inf, dtype=dtype)
        dead[9] = -1000.0
        assert pick(dead, 1e-6, u, **options)[0].tolist() == [9, 9, 9]
        broken = torch.randn(300).to(dtype)
        broken[5] = torch.nan
        tokens, logp, _ = pick(broken, 0.7, u, **options)
        assert logp.isnan().all() and ((tokens >= 0) & (tokens < 300)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_has_the_same_bits_in_every_batch(dtype, num_threads):
    torch.manual_seed(0)
    logits, u = (torch.randn(40, 3001) * 3).to(dtype), torch.rand(40, dtype=torch.float64)
    ks = torch.randint(0, 90, (40,))
    ps, lows = torch.rand(40, dtype=torch.float64), torch.rand(40, dtype=torch.float64) / 50

    def run(rows):
        given = (u[rows], ks[rows], ps[rows], lows[rows])
        return (
            *logits_ops.pick_kept(logits[rows], 0.8, *given),
            *logits_ops.likeliest(logits[rows], 0.8, [6] * len(u[rows])),
        )

    alone = [torch.cat(x) for x in zip(*(run(slice(i, i + 1)) for i in range(40)), strict=True)]
    with threads(num_threads):
        for rows in (slice(0, 40), slice(3, 5), slice(1, 39, 2)):
            for ours, expected in zip(run(rows), alone, strict=True):
                assert torch.equal(ours, expected[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 16, 300, 2000])
def test_the_likeliest_are_a_stable_sorts(dtype, vocab):
    torch.manual_seed(vocab)
    logits = (torch.randn(5, vocab) * 3).to(dtype)
    logits[1] = logits[1].round()  # many ties
    logits[2] = 1.0
    logits[3, 1::2] = -torch.inf
    counts = [1, 20, 7, vocab, 10**9]
    ids, logps = logits_ops.likeliest(logits, 0.7, counts)
    for row, count in enumerate(min(k, vocab) for k in counts):
        expected = logits[row].float().sort(stable=True, descending=True).indices[:count]
        assert torch.equal(ids[row, :count], expected)
        scored = cpp_ops.score(logits[row].expand(count, -1), expected, 0.7, False)[0]
        assert torch.equal(logps[row, :count], scored)


@pytest.mark.parametrize("few", [4, 1024])
def test_pytorchs_path_keeps_the_same(monkeypatch, few):
    monkeypatch.setattr("kernels.logits.sampling._FEW", few)
    torch.manual_seed(0)
    for scale in (0.01, 3.0):
        rows = (torch.randn(40, 300) * scale).round(decimals=1 if scale > 1 else 4)
        ks = torch.randint(0, 300, (40,)) * (torch.arange(40) % 3 > 0)
        ps = torch.rand(40, dtype=torch.float64).where(torch.arange(40) % 2 > 0, 1.0)
        lows = torch.rand(40, dtype=torch.float64).square() * (torch.arange(40) % 5 > 3)
        gap = (rows / 0.7).double()
        gap -= gap.amax(-1, keepdim=True)
        kept = kept_tokens(rows, gap, ks, ps, lows)
        for i in range(40):
            expected = kept64(rows[i], 0.7, int(ks[i]), float(ps[i]), float(lows[i]))
            assert torch.equal(kept[i], expected), i
