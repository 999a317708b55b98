"""The critic: its numbers, and that it learns what a policy's rewards are worth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nanoengine.config import EngineConfig
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.packing import Sample
from nanorl.scorers.value_critic import Critic, explained_variance


def sample(tokens: list[int], target: float, value: float = 0.0) -> Sample:
    """The last two tokens are actions; both should be worth `target`."""
    num_tokens = len(tokens)
    return Sample(
        tokens=tokens,
        loss_mask=[0] * (num_tokens - 2) + [1, 1],
        fields={
            "return": [target] * num_tokens,
            "value": [value] * num_tokens,
            "weight": [0.0] * (num_tokens - 2) + [0.25, 0.25],
        },
    )


def make_critic(value_clip: float, lr: float = 3e-3) -> Critic:
    config = ModelConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    policy = Transformer(config)
    policy.init_weights(seed=0, std=0.1)
    return Critic(policy, EngineConfig(dtype="fp32", lr=lr), value_clip=value_clip)


def test_explained_variance_by_hand() -> None:
    """Returns 1, 1, 0, 0 (variance .25); errors .5, .5, -.5, -.5 of mean 0 (variance .25): 0.
    With values 1, 1, 0, 0 nothing is left over: 1."""
    blind = [sample([1, 2, 3], 1.0, 0.5), sample([1, 2, 3], 0.0, 0.5)]
    seeing = [sample([1, 2, 3], 1.0, 1.0), sample([1, 2, 3], 0.0, 0.0)]
    assert explained_variance(blind) == pytest.approx(0.0)
    assert explained_variance(seeing) == pytest.approx(1.0)
    assert explained_variance([sample([1, 2, 3], 1.0)]) == 0.0
    assert explained_variance([sample([1, 2, 3, 4], 0.1, 0.7)] * 3) == 0.0  # returns do not vary


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_critic_that_diverged_has_no_explained_variance(value) -> None:
    samples = [sample([1, 2, 3], 1.0, value), sample([1, 2, 3], 0.0, -value)]
    assert math.isnan(explained_variance(samples))


def test_explained_variance_is_numpy_s_and_has_the_same_bits_in_any_order() -> None:
    rng = np.random.default_rng(0)
    samples = [
        sample([1] * int(rng.integers(3, 60)), float(rng.normal()), float(rng.normal(scale=3)))
        for _ in range(300)
    ]
    found = explained_variance(samples)
    targets, values = (
        np.array([one.fields[name][-2:] for one in samples]).ravel() for name in ("return", "value")
    )
    assert found == pytest.approx(1 - (targets - values).var() / targets.var(), rel=1e-12)
    assert explained_variance(samples[::-1]) == found
    assert explained_variance([samples[i] for i in rng.permutation(300)]) == found


def test_the_first_values_are_zero_and_training_finds_the_returns() -> None:
    critic = make_critic(value_clip=10.0)
    samples = [sample([7, 3, 9, 4], 1.0), sample([8, 3, 9, 4], 0.0)]
    assert all(not value.any() for value in critic.values(samples))
    metrics = critic.train_step(samples)
    assert metrics["value_loss"] == pytest.approx(0.25 * 0.5 * 2)  # weight · ½(0 - 1)², two tokens
    for _ in range(120):
        critic.train_step(samples)
    good, bad = critic.values(samples)
    assert good[-2:].tolist() == pytest.approx([1, 1], abs=0.1)
    assert bad[-2:].tolist() == pytest.approx([0, 0], abs=0.1)


def test_a_value_stops_being_pulled_once_it_has_moved_by_the_clip() -> None:
    """The field "value" stays 0, so the bound does not move along."""
    found = []
    for value_clip in (0.05, 10.0):
        critic = make_critic(value_clip, lr=5e-4)
        samples = [sample([7, 3, 9, 4], 1.0)]
        for _ in range(200):
            critic.train_step(samples)
        found.append(critic.values(samples)[0][-2:])
    assert float(found[0].min()) >= 0.05 and float(found[0].max()) < 0.4
    assert float(found[1].min()) > 0.8
