"""Pass@k training: by hand, against all sets of k, and in a batch."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from gradient_cases import checked_gradient

from nanorl.algorithms.pass_at_k import pass_at_k
from nanorl.algorithms.recipes import named_spec
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import build_batch
from nanorl.grpo import Field
from nanorl.options.phase_config import RLConfig
from nanorl.types import Rollout


def test_by_hand() -> None:
    """One success of six, k = 2: 10 of 15 pairs have none, so P = 1/3 and σ = √2/3. Of the five
    pairs of a failure four have none: (2/3 - 4/5)/σ."""
    got = pass_at_k(torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]), ["g"] * 6, 2)
    sigma = 2**0.5 / 3
    low, high = (2 / 3 - 4 / 5) / sigma, (2 / 3) / sigma
    assert got.tolist() == pytest.approx([low, high, low, low, low, low], rel=1e-5)


def test_a_task_that_is_solved_or_hopeless_teaches_nothing() -> None:
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    ids = ["solved"] * 4 + ["hopeless"] * 4 + ["certain"] * 4
    assert pass_at_k(rewards, ids, 2).tolist() == [0.0] * 12
    # With k = 1 the first of them does: P = 3/4, σ = √3/4, 1/√3 and -√3.
    got = pass_at_k(rewards, ids, 1).tolist()
    assert got[:4] == pytest.approx([3**-0.5] * 3 + [-(3**0.5)], rel=1e-5)
    assert got[4:] == [0.0] * 8


def test_a_group_of_k_or_fewer_has_nothing_to_compare() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    got = pass_at_k(rewards, ["a", "a", "b", "b", "b", "c"], 2)
    assert got[:2].tolist() == [0.0, 0.0] and got[5] == 0.0
    assert got[2] > 0 > got[3]


def by_sets(rewards: np.ndarray, k: int) -> np.ndarray:
    """Each member's mean over the sets that it is in, less that of all sets, over the deviation of
    the sets' rewards: what the paper derives its formula from."""
    size = len(rewards)
    sets = list(combinations(range(size), k))
    of_sets = np.array([rewards[list(one)].max() for one in sets])
    own = np.array([of_sets[[i in one for one in sets]].mean() for i in range(size)])
    return (own - of_sets.mean()) / (of_sets.std() + 1e-6)


def test_against_numpy_over_all_sets() -> None:
    rng = np.random.default_rng(2)
    for _ in range(200):
        k, num_groups = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        groups = [
            (rng.random(rng.integers(k + 1, 9)) < rng.random()).astype(float)
            for _ in range(num_groups)
        ]
        ids = [g for g, rewards in enumerate(groups) for _ in rewards]
        expected = np.concatenate([by_sets(rewards, k) for rewards in groups])
        order = rng.permutation(len(ids))
        rewards = torch.tensor(np.concatenate(groups)[order])
        got = pass_at_k(rewards, [ids[i] for i in order], k)
        np.testing.assert_allclose(got.numpy(), expected[order], rtol=0, atol=1e-6)
        assert abs(float(got.sum())) < 1e-6


def test_rewards_that_are_neither_0_nor_1_are_refused() -> None:
    for value in (0.5, 2.0, -1.0):
        with pytest.raises(ValueError, match=rf"reward {value:g}: .* rewards must be 0 or 1"):
            pass_at_k(torch.tensor([1.0, value, 0.0]), ["g"] * 3, 2)


def rollout(member: int, reward: float, turn_rewards: list[float], group: str = "g") -> Rollout:
    return Rollout(
        task_id=group,
        group_id=group,
        rollout_id=f"{group}-m{member}",
        tokens=[1, 2, 3],
        loss_mask=[0, 1, 1],
        logps=[0.0, -1.0, -1.0],
        versions=[-1, 0, 0],
        reward=reward,
        turn_rewards=turn_rewards,
    )


def group_of(*rewards: float, group: str = "g") -> list[Rollout]:
    return [rollout(m, reward, [], group) for m, reward in enumerate(rewards)]


def test_a_batch_compares_successes_alone() -> None:
    """0.9 and what turns earned beside the answer are no success; 1.5 is one like any other."""
    rollouts = [
        rollout(0, 0.9, []),
        rollout(1, 1.5, []),
        rollout(2, 0.5, [0.7]),
        rollout(3, 1.0, [-0.5]),
    ]
    spec = AlgorithmSpec(advantage="pass_at_k", pass_k=1)
    batch = build_batch([rollouts], spec, max_tokens=64, version=0)
    got = [one.fields[Field.ADVANTAGE][1] for one in batch.samples]
    assert got == pytest.approx([-1, 1, -1, 1], rel=1e-5)


def test_only_unlike_successes_are_a_signal() -> None:
    near = group_of(0.2, 0.9, 0.4, group="a")
    mixed = group_of(0.2, 1.0, 0.4, group="b")
    spec = AlgorithmSpec(advantage="pass_at_k", pass_k=2, dynamic_sampling=True)
    batch = build_batch([near, mixed], spec, max_tokens=64, version=0)
    assert {one.group for one in batch.samples} == {"b"}
    assert batch.metrics["groups_with_signal"] == 1


def test_k_is_the_option_s() -> None:
    """Two successes of five: with k = 4 every set has one, with 3 one of ten has none."""
    for k, sign in ((4, 0.0), (3, 1.0), (1, 1.0)):
        spec = AlgorithmSpec(advantage="pass_at_k", pass_k=k, entropy_coef=0.1)
        rollouts = group_of(1, 1, 0, 0, 0)
        batch = build_batch([rollouts], spec, max_tokens=64, version=0)
        got = [one.fields[Field.ADVANTAGE][1] for one in batch.samples]
        expected = by_sets(np.array([1.0, 1, 0, 0, 0]), k)
        assert got == pytest.approx(expected.tolist(), abs=1e-5)
        assert np.sign(got[0]) == sign


def test_gradients_by_finite_differences() -> None:
    spec = AlgorithmSpec(advantage="pass_at_k", pass_k=2)
    rollouts = group_of(1, 0, 0, 0, 0, 0)
    gradients = checked_gradient(build_batch([rollouts], spec, max_tokens=64, version=0))
    assert all((g[1:] < 0).all() for g in gradients[:1])
    assert all((g[1:] > 0).all() for g in gradients[1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pass_k": 0}, "pass_k=0: must be 1 or more"),
        ({"overlong_buffer": 8}, "overlong_buffer=8: advantage='pass_at_k' counts successes"),
        ({"reward_level": "turn"}, "reward_level='turn': advantage='pass_at_k' counts"),
    ],
)
def test_what_it_would_not_read_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmSpec(**{"advantage": "pass_at_k", **options})


def test_a_group_has_more_members_than_k() -> None:
    spec = named_spec("pass_at_k")
    with pytest.raises(ValueError, match=r"pass-k 2: must be less than --rl.group-size 2"):
        RLConfig(algorithm=spec, group_size=2)
    assert RLConfig(algorithm=spec, group_size=3).group_size == 3
    assert RLConfig(algorithm=AlgorithmSpec(), group_size=2).algorithm.pass_k == 2
