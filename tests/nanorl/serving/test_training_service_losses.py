"""The losses of the training service against formulas written by hand in fp64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("starlette", reason="needs the extra `serve`")

from nanoengine.packing import make_micro_batches
from nanorl.serving.training_service.service_losses import find_loss, make_samples
from nanorl.serving.training_service.service_messages import Datum

LOGP = [-0.5, -1.2, -2.0, -0.1]
Q = [-0.7, -1.0, -2.5, -0.1]
A = [1.0, -2.0, 0.5, 0.0]
W = [0.0, 1.0, 0.5, 2.0]
RATIO = [math.exp(p - q) for p, q in zip(LOGP, Q, strict=True)]
RL = {"logprobs": Q, "advantages": A}


def bound(r: float, low: float = 0.8, high: float = 1.2) -> float:
    return min(max(r, low), high)


def clipped(r: float, a: float, low: float, high: float) -> tuple[float, float]:
    """-min(r a, clamp(r) a) and its derivative by log p."""
    if r * a <= bound(r, low, high) * a:
        return -r * a, -r * a
    return -bound(r, low, high) * a, 0.0


def by_hand(name: str, low: float, high: float, beta: float) -> tuple[float, list[float]]:
    """The sum of the loss, and its derivative by each log-prob."""
    terms = {
        "cross_entropy": [(-p * w, -w) for p, w in zip(LOGP, W, strict=True)],
        "importance_sampling": [(-r * a, -r * a) for r, a in zip(RATIO, A, strict=True)],
        "ppo": [clipped(r, a, low, high) for r, a in zip(RATIO, A, strict=True)],
        "cispo": [
            (-bound(r, low, high) * p * a, -bound(r, low, high) * a)
            for r, p, a in zip(RATIO, LOGP, A, strict=True)
        ],
        "dro": [
            (-(p * a - 0.5 * beta * (p - q) ** 2), -(a - beta * (p - q)))
            for p, q, a in zip(LOGP, Q, A, strict=True)
        ],
    }[name]
    return math.fsum(value for value, _ in terms), [slope for _, slope in terms]


def run(name: str, inputs: dict[str, list[float]], config: dict[str, float | str]) -> Any:
    """(sum, derivatives) as the service computes them."""
    loss = find_loss(name, config)
    given = {key: np.array(values, np.float32) for key, values in inputs.items()}
    given["target_tokens"] = np.array([6, 7, 8, 9])
    (sample,) = make_samples([Datum(tokens=[5, 6, 7, 8], inputs=given)], loss, 10, 16)
    (micro,) = make_micro_batches([sample], 16)
    logp_T = torch.tensor(LOGP, requires_grad=True)
    value, stats = loss.engine_loss()(logp_T, None, micro)
    value.backward()
    assert stats == {} and logp_T.grad is not None
    return value.item(), logp_T.grad.tolist()


@pytest.mark.parametrize(
    ("name", "inputs", "config"),
    [
        ("cross_entropy", {"weights": W}, {}),
        ("importance_sampling", RL, {}),
        ("ppo", RL, {}),
        ("ppo", RL, {"clip_low_threshold": 0.95, "clip_high_threshold": 1.01}),
        ("cispo", RL, {}),
        ("cispo", RL, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("dro", RL, {"beta": 0.05}),
    ],
)
def test_a_loss_is_the_documented_formula(
    name: str, inputs: dict[str, list[float]], config: dict[str, float | str]
) -> None:
    low, high = (config.get(f"clip_{one}_threshold", x) for one, x in (("low", 0.8), ("high", 1.2)))
    value, slopes = by_hand(name, float(low), float(high), float(config.get("beta", 0.0)))
    got, gradient = run(name, inputs, config)
    assert got == pytest.approx(value, rel=1e-6)
    assert gradient == pytest.approx(slopes, rel=1e-6)


def test_thresholds_of_the_data_go_before_the_config() -> None:
    narrow = {"clip_low_threshold": [0.99] * 4, "clip_high_threshold": [1.01] * 4}
    got, _ = run("ppo", RL | narrow, {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0})
    assert got == pytest.approx(by_hand("ppo", 0.99, 1.01, 0.0)[0], rel=1e-6)


def test_weights_that_are_not_sent_are_one() -> None:
    assert run("cross_entropy", {}, {})[0] == pytest.approx(-sum(LOGP), rel=1e-6)


def test_our_losses_go_by_name_with_the_options_of_an_algorithm() -> None:
    got, _ = run("nanorl:ppo", RL, {"clip_low": 0.05, "clip_high": 0.01})
    assert got == pytest.approx(by_hand("ppo", 0.95, 1.01, 0.0)[0], rel=1e-6)
    # GSPO: one ratio for the sequence, the mean over the three tokens that were sampled.
    mask = [0.0, 1.0, 1.0, 1.0]
    mean = sum(p - q for p, q in zip(LOGP[1:], Q[1:], strict=True)) / 3
    terms = [clipped(math.exp(mean), a, 0.9, 1.05)[0] for a in A[1:]]
    got, _ = run("nanorl:gspo", RL | {"mask": mask}, {"clip_low": 0.1, "clip_high": 0.05})
    assert got == pytest.approx(sum(terms), rel=1e-5)
    with pytest.raises(ValueError, match="choose from"):
        find_loss("nanorl:opd", {})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lr": 1.0}, "does not know it"),
        ({"kl_coef": 0.1}, "does not know it"),  # nobody sends a reference policy
        ({"aggregation": "seq_mean_token_mean"}, "does not know it"),  # means are the client's
        ({"clip_low": "wide"}, "needs a number"),
        ({"correction": 2.0}, "choose one of"),
        ({"clip_low": math.nan}, "finite"),
    ],
)
def test_an_option_that_our_losses_cannot_use_is_refused(
    config: dict[str, float | str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        find_loss("nanorl:ppo", config)


def test_our_losses_weigh_tokens_by_how_far_the_policy_has_moved() -> None:
    # The ratio is against the policy itself, 1; tis weighs by min(pi / q, C).
    config: dict[str, float | str] = {"old_policy": "recomputed", "correction_cap": 1.5}
    expected = math.fsum(-a * min(r, 1.5) for r, a in zip(RATIO, A, strict=True))
    got, gradient = run("nanorl:ppo", RL, config)
    assert got == pytest.approx(expected, rel=1e-6)
    assert sum(gradient) == pytest.approx(expected, rel=1e-6)
    # kpop drops what is more than so many nats apart: of these four 0.024, 0.010, 0.016 and 0.
    config = {"old_policy": "recomputed", "correction": "kpop", "correction_kl": 0.012}
    got, _ = run("nanorl:ppo", RL, config)
    assert got == pytest.approx(-A[1] * RATIO[1], rel=1e-6)


@pytest.mark.parametrize("target", [math.nan, math.inf, 6.5])
def test_targets_must_be_integers(target: float) -> None:
    given = {"target_tokens": np.array([6, 7, 8, target], np.float32)}
    with pytest.raises(ValueError, match="must be int64"):
        make_samples([Datum(tokens=[5, 6, 7, 8], inputs=given)], find_loss("ppo", {}), 10, 16)
