"""The sampler draws from the right distribution, and only a row, a seed and a position matter."""

import numpy as np
import torch

from kernels import logits_logprob
from nanoinfer.gpu.device_sampler import device_sampling, sample_on_device
from nanoinfer.options.full_sampling import FullSamplingBatch, sample
from nanoinfer.sampler import uniforms

ARRAYS = ("temperatures", "top_ks", "top_ps", "seeds", "positions", "min_ps")


def batch(
    num_rows: int,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    seeds=None,
    positions=None,
    min_p=0.0,
    **more,
):
    return FullSamplingBatch(
        temperatures=np.full(num_rows, temperature, dtype=np.float64),
        top_ks=np.full(num_rows, top_k, dtype=np.int64),
        top_ps=np.full(num_rows, top_p, dtype=np.float64),
        seeds=np.arange(num_rows, dtype=np.uint64) if seeds is None else seeds,
        positions=np.zeros(num_rows, dtype=np.int64) if positions is None else positions,
        min_ps=np.full(num_rows, min_p, dtype=np.float64),
        **more,
    )


def chi_square(tokens: torch.Tensor, p: torch.Tensor) -> float:
    """Pearson's statistic over its degrees of freedom; 1 is expected."""
    counts = torch.bincount(tokens, minlength=len(p)).double()
    expected = p.double() * len(tokens)
    is_likely = expected >= 5
    assert counts[p == 0].sum() == 0
    parts = (counts - expected)[is_likely].square() / expected[is_likely]
    return float(parts.sum() / max(1, int(is_likely.sum()) - 1))


def test_uniforms_are_uniform_and_independent_of_seed_and_position() -> None:
    seeds = np.repeat(np.arange(300, dtype=np.uint64), 300)
    positions = np.tile(np.arange(300), 300)
    u = uniforms(seeds, positions)
    assert u.min() >= 0 and u.max() < 1
    assert chi_square(torch.from_numpy((u * 100).astype(np.int64)), torch.full((100,), 0.01)) < 1.5
    grid = u.reshape(300, 300)
    rows = np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]
    columns = np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]
    assert abs(rows) < 0.02 and abs(columns) < 0.02
    assert len(np.unique(u)) == len(u)


def test_sampling_follows_the_tempered_softmax() -> None:
    for temperature, vocab in ((1.0, 700), (0.5, 700), (1.7, 40)):
        logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
        tokens, _, _ = sample(logits.expand(20000, -1).contiguous(), batch(20000, temperature))
        assert chi_square(tokens, torch.softmax(logits[0] / temperature, -1)) < 1.5


def test_top_k_and_top_p_keep_the_most_likely_tokens() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)) * 2
    rows = logits.expand(20000, -1).contiguous()
    p = torch.softmax(logits[0].double(), -1)
    ranked = p.sort(descending=True)
    for top_k, top_p in ((5, 1.0), (0, 0.8), (10, 0.6), (1, 1.0)):
        keep = torch.ones(50, dtype=torch.bool)
        if top_k:
            keep[top_k:] = False
        keep &= ranked.values.cumsum(0) - ranked.values < top_p
        kept = torch.zeros(50, dtype=torch.float64)
        kept[ranked.indices[keep]] = ranked.values[keep]
        tokens, logps, _ = sample(rows, batch(20000, 1.0, top_k, top_p))
        assert chi_square(tokens, kept / kept.sum()) < 1.8
        torch.testing.assert_close(logps.double(), p.log()[tokens], rtol=0, atol=1e-5)


def test_temperature_zero_takes_the_first_maximum_and_scores_at_one() -> None:
    logits = torch.randn(6, 300)
    logits[0, [7, 9]] = 50.0
    tokens, logps, _ = sample(logits, batch(6, 0.0))
    assert tokens[0] == 7
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(logps, logits_logprob(logits, tokens, 1.0))


def test_a_token_depends_on_its_row_its_seed_and_its_position_only() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn(40, 3001, generator=generator) * 3).to(dtype)
        seeds = np.arange(40, dtype=np.uint64) * 7
        positions = np.arange(40) * 3
        mixed = FullSamplingBatch(
            temperatures=np.resize([1.0, 0.0, 0.7, 1.0], 40),
            top_ks=np.resize([0, 0, 0, 20, 0], 40),
            top_ps=np.resize([1.0, 1.0, 0.9], 40),
            min_ps=np.resize([0.0, 0.0, 0.0, 0.05], 40),
            seeds=seeds,
            positions=positions,
        )
        tokens, logps, _ = sample(logits, mixed)
        for i in range(40):
            one = FullSamplingBatch(**{name: getattr(mixed, name)[i : i + 1] for name in ARRAYS})
            token, logp, _ = sample(logits[i : i + 1].clone(), one)
            assert token[0] == tokens[i] and logp[0] == logps[i], i


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((4000, 600), -torch.inf)
    logits[:, [0, 255, 256, 511, 599]] = 0.0
    tokens, _, _ = sample(logits, batch(4000))
    assert set(tokens.tolist()) == {0, 255, 256, 511, 599}


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.randn(3, 100)
    before = logits.clone()
    sample(logits, batch(3, 0.5))
    assert torch.equal(logits, before)


def test_logps_are_those_of_the_tempered_log_softmax() -> None:
    generator = torch.Generator().manual_seed(5)
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn(30, 5003, generator=generator) * 4).to(dtype)
        for temperature, options in ((1.0, {}), (0.6, {}), (1.0, {"top_k": 7}), (0.0, {})):
            tokens, logps, _ = sample(logits, batch(30, temperature, **options))
            z = logits.double() / (temperature or 1.0)
            expected = torch.log_softmax(z, -1).gather(1, tokens.unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(logps.double(), expected, rtol=0, atol=1e-5)
            assert torch.equal(logps, logits_logprob(logits, tokens, temperature))


def test_the_path_of_a_gpu_asks_for_the_same_distribution() -> None:
    """Called directly here, where its kernel's PyTorch definition runs."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)) * 2
    rows = logits.expand(20000, -1).contiguous()
    greedy, logps, _ = sample_on_device(rows[:2], device_sampling(batch(2, temperature=0.0), 50))
    assert (greedy == logits.argmax()).all()
    assert torch.allclose(logps, logits_logprob(rows[:2], greedy, 0.0), atol=1e-6)
    high = np.full(20000, 2**63 + 5, dtype=np.uint64)  # a seed uses all 64 bits
    asked = batch(20000, 0.7, top_k=5, seeds=high, positions=np.arange(20000))
    tokens, logps, _ = sample_on_device(rows, device_sampling(asked, 50))
    p = torch.softmax(logits[0] / 0.7, -1)
    kept = torch.zeros(50).index_fill(0, p.topk(5).indices, 1.0) * p
    assert chi_square(tokens, kept / kept.sum()) < 2
    assert torch.allclose(logps, p.log()[tokens], atol=1e-5)
