"""Where observations are learnt from too, the tokens that the policy sampled stay its own."""

from __future__ import annotations

import pytest
from test_batching import rollout

from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batch_metrics import action_mask
from nanorl.batching import build_batch
from nanorl.grpo import Field
from nanorl.types import Rollout, TurnSpan


def two_turns(member: int, reward: float) -> Rollout:
    """Three prompt tokens, two sampled, three observed, one sampled."""
    one = rollout("a", member, reward, actions=6)
    one.loss_mask = [0, 0, 0, 1, 1, 0, 0, 0, 1]
    one.turn_spans = [
        TurnSpan(action_start=3, action_end=5, observation_end=8),
        TurnSpan(action_start=8, action_end=9, observation_end=9),
    ]
    return one


@pytest.mark.parametrize("observation_coef, num_read", [(0.0, 3), (0.3, 6)])
def test_the_policys_own_tokens_are_its_own_whatever_else_is_learnt(
    observation_coef: float, num_read: int
) -> None:
    rollouts = [two_turns(0, 1.0), two_turns(1, 0.0)]
    spec = AlgorithmSpec(observation_coef=observation_coef)
    samples = build_batch([rollouts], spec, max_tokens=64, version=0).samples
    for sample, one in zip(samples, rollouts, strict=True):
        assert action_mask(sample) == one.loss_mask
        assert sum(sample.loss_mask) == num_read
        observed = sample.fields.get(Field.OBSERVATION, [0.0] * 9)
        assert [i for i, share in enumerate(observed) if share] == [5, 6, 7][: num_read - 3]
