"""GMPO: by hand, against numpy in fp64, and gradients by finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from nanorl.algorithms.aggregation import token_weights
from nanorl.algorithms.geometric_mean import gmpo
from nanorl.algorithms.recipes import named_spec
from nanorl.batch_metrics import per_action_token
from nanorl.grpo import LossBatch
from nanorl.policy_loss import make_loss

GMPO = named_spec("gmpo")


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_the_loss_by_hand() -> None:
    """Two sequences of two tokens, log r of 0.2 and 0.9: with A = 2 it is e^((0.2 + 0.4)/2), with
    A = -1 the mean is 0.55, for only falling ratios are bounded then."""
    logp = values(0.2, 0.9, 0.2, 0.9).requires_grad_()
    zero, ids = torch.zeros(4, dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    got = gmpo(logp, zero, values(2, 2, -1, -1), (torch.ones(4), ids, 2))
    first, second = math.exp(0.3), math.exp(0.55)
    assert got.tolist() == pytest.approx([-2 * first, -2 * first, second, second])
    got.sum().backward()
    assert logp.grad is not None
    # Both tokens carry the loss of the sequence, and each is half of its mean.
    assert logp.grad.tolist() == pytest.approx([-2 * first, 0, second, second])


def test_the_other_bounds_by_hand() -> None:
    """log r of -0.9 and 0: with A = -1 the mean is -0.2; with A = 1 it is -0.45. Others are
    0.5 below and 0.1 above."""
    logp, zero = values(-0.9, 0.0, -0.9, 0.0), torch.zeros(4, dtype=torch.float64)
    segments = (torch.ones(4), torch.tensor([0, 0, 1, 1]), 2)
    got = gmpo(logp, zero, values(-1, -1, 1, 1), segments)
    assert got.tolist() == pytest.approx([math.exp(-0.2)] * 2 + [-math.exp(-0.45)] * 2)
    got = gmpo(-logp, zero, values(-1, -1, 1, 1), segments, clip_low=0.5, clip_high=0.1)
    assert got.tolist() == pytest.approx([math.exp(0.45)] * 2 + [-math.exp(0.05)] * 2)
    got = gmpo(logp, zero, values(-1, -1, 1, 1), segments, clip_low=0.5, clip_high=0.1)
    assert got.tolist() == pytest.approx([math.exp(-0.25)] * 2 + [-math.exp(-0.45)] * 2)


def test_a_token_without_an_advantage_is_bounded_below_alone() -> None:
    """log r of 1.0 with A = 0 and 0.1 with A = 1: the mean is (1.0 + 0.1) / 2."""
    segments = (torch.ones(2), torch.tensor([0, 0]), 1)
    got = gmpo(values(1.0, 0.1), torch.zeros(2), values(0, 1), segments)
    assert got.tolist() == pytest.approx([0.0, -math.exp(0.55)])


def test_tokens_that_nobody_sampled_are_no_part_of_the_mean() -> None:
    segments = (values(1, 0, 1), torch.tensor([0, 0, 0]), 1)
    got = gmpo(values(0.1, 0.4, 0.3), torch.zeros(3), values(1, 1, 1), segments)
    assert got.tolist() == pytest.approx([-math.exp(0.2)] * 3)


def drawn(rng: np.random.Generator) -> tuple[LossBatch, np.ndarray]:
    """A batch of some sequences, one advantage each, and log π_θ."""
    lengths = rng.integers(1, 9, rng.integers(1, 6))
    ids = np.repeat(np.arange(len(lengths)), lengths)
    num = len(ids)
    mask = (rng.random(num) < 0.8).astype(float)
    old = -rng.exponential(1.0, num)
    theta = old + rng.normal(0, rng.choice([0.05, 0.6]), num)
    advantage = (rng.normal(size=len(lengths)) * rng.integers(0, 2, len(lengths)))[ids] * mask
    mask_T, ids_T = torch.tensor(mask), torch.tensor(ids)
    batch = LossBatch(
        old_logp_T=torch.tensor(old),
        rollout_logp_T=torch.tensor(old + rng.normal(0, 0.3, num)),
        advantage_T=torch.tensor(advantage),
        mask_T=mask_T,
        weight_T=token_weights("seq_mean_token_mean", mask_T, ids_T, len(lengths)).double(),
        sequence_ids_T=ids_T,
        num_sequences=len(lengths),
    )
    return batch, theta


def numpy_gmpo(batch: LossBatch, theta: np.ndarray) -> tuple[float, np.ndarray, float]:
    """The paper's objective, a mean over sequences, with its gradient by log π_θ, and the share of
    tokens that are clipped."""
    mask, ids = batch.mask_T.numpy(), batch.sequence_ids_T.numpy()
    assert batch.old_logp_T is not None
    advantage, old = batch.advantage_T.numpy(), batch.old_logp_T.numpy()
    total, slope, num_clipped = 0.0, np.zeros(len(mask)), 0
    for sequence in range(batch.num_sequences):
        own = np.flatnonzero((ids == sequence) & (mask == 1))
        if not len(own):
            continue
        A = advantage[own[0]]
        sign = np.sign(A)
        ratio = np.exp(theta[own] - old[own])
        bounded = np.clip(ratio, math.exp(-0.4), math.exp(0.4))
        # min(r^sgn, clip(r)^sgn)^sgn: pessimistic whatever the sign.
        least = np.minimum(ratio**sign, bounded**sign) ** sign
        mean = least.prod() ** (1 / len(own))
        total -= mean * A / batch.num_sequences
        is_clipped = ~np.isclose(least, ratio, rtol=1e-9) & (A != 0)
        num_clipped += int(is_clipped.sum())
        slope[own] = np.where(is_clipped, 0, -mean * A / len(own) / batch.num_sequences)
    return total, slope, num_clipped / max(mask.sum(), 1)


def test_against_numpy() -> None:
    rng = np.random.default_rng(5)
    share_clipped = []
    for _ in range(200):
        batch, theta = drawn(rng)
        logp = torch.tensor(theta, requires_grad=True)
        loss, stats = make_loss(replace(GMPO, correction="none"))(logp, batch)
        loss.backward()
        total, slope, clipped = numpy_gmpo(batch, theta)
        assert float(loss.detach()) == pytest.approx(total, abs=1e-6)
        assert logp.grad is not None
        np.testing.assert_allclose(logp.grad.numpy(), slope, rtol=0, atol=1e-6)
        told = per_action_token({name: float(value) for name, value in stats.items()})
        assert told["clip_fraction"] == pytest.approx(clipped, abs=1e-6)
        share_clipped.append(clipped)
    assert np.mean(share_clipped) > 0.05, "the clip was never put to the test"


def test_a_correction_weighs_a_sequence_by_the_mean_of_its_tokens_weights() -> None:
    """w = 0.5 and 1.5 of one sequence, whose loss is -1."""
    zero = torch.zeros(2, dtype=torch.float64)
    batch = LossBatch(
        old_logp_T=zero, rollout_logp_T=-values(0.5, 1.5).log(), advantage_T=values(1, 1),
        mask_T=values(1, 1), weight_T=values(0.5, 0.5), sequence_ids_T=torch.tensor([0, 0]),
        num_sequences=1,
    )  # fmt: skip
    logp = zero.clone().requires_grad_()
    loss, _ = make_loss(GMPO)(logp, batch)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-1.0)
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx([-0.5, -0.5])


def test_gradients_by_finite_differences() -> None:
    rng = np.random.default_rng(8)
    for _ in range(5):
        batch, theta = drawn(rng)
        logp = torch.tensor(theta, requires_grad=True)
        assert torch.autograd.gradcheck(lambda one, b=batch: make_loss(GMPO)(one, b)[0], logp)


def test_the_recipe_is_the_paper_s() -> None:
    assert GMPO.clip == (0.4, 0.4) and GMPO.aggregation == "seq_mean_token_mean"
    with pytest.raises(ValueError, match=r"entropy_share=0.2: loss='gmpo' is of whole sequences"):
        replace(GMPO, entropy_share=0.2)
