"""Turns compared with turns of the same situation (HGPO), and with those of a whole batch: by hand,
and against numpy in fp64 written from the papers' formulas over 200 random batches."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_recipe_references import NUM_BATCHES, same, values

from nanorl.algorithms.advantages import dr_grpo
from nanorl.algorithms.hierarchical import hgpo
from nanorl.algorithms.recipes import named_spec
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import build_batch
from nanorl.group_advantage import grpo
from nanorl.types import Branch, Rollout, TurnSpan


def played(
    member: int, group: str, turns: Sequence[tuple[int, float]], reward: float, prompt: int = 9
) -> Rollout:
    """A rollout whose turns are one token each, after the observation of one token that each tuple
    begins with (the first: after the prompt), and that earned what it ends with."""
    tokens, mask, spans = [1], [0], []
    for place, (seen, _) in enumerate(turns):
        tokens += [prompt if place == 0 else seen, 7]
        mask += [0, 1]
        spans.append((len(tokens) - 1, len(tokens)))
    ends = [start for start, _ in spans[1:]] + [len(tokens)]
    return Rollout(
        task_id="t",
        group_id=group,
        rollout_id=f"{group}-{member}",
        tokens=tokens,
        loss_mask=mask,
        logps=[-1.0 * m for m in mask],
        versions=[m - 1 for m in mask],
        turn_spans=[
            TurnSpan(action_start=start, action_end=end, observation_end=last)
            for (start, end), last in zip(spans, ends, strict=True)
        ],
        reward=reward,
        turn_rewards=[earned for _, earned in turns],
    )


def of_actions(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> list[list[float]]:
    """The advantages of the action tokens of each rollout."""
    spec = replace(spec, kl_coef=0.1)  # those that are all 0 stay in the batch
    batch = build_batch([rollouts], spec, max_tokens=64, version=0)
    return [
        [a for a, m in zip(s.fields["advantage"], s.loss_mask, strict=True) if m]
        for s in batch.samples
    ]


HGPO = named_spec("hgpo")


def test_hgpo_by_hand() -> None:
    """Three rollouts of a task; all saw 3 at their second turn, two of them 4 at the third."""
    rollouts = [
        played(0, "g", [(0, 0.0), (3, 0.0), (4, 0.0)], 1.0),
        played(1, "g", [(0, 0.0), (3, 0.0), (4, 0.0)], 0.0),
        played(2, "g", [(0, 0.0), (3, 0.0), (5, 0.0)], 0.5),
    ]
    spec = replace(HGPO, gamma=1.0, hierarchy_depth=2)
    # Outcomes 1, 0, ½: mean ½, sample deviation ½, so 1, −1, 0 at depth 0, and at every depth at
    # which all three agree. Third turn: 1 and 0 alone have mean ½ and deviation √½: ±√½.
    root = 0.5**0.5
    third = (1 * 1.0 + 2 * root + 3 * root) / 6
    expected = [[1, 1, third], [-1, -1, -third], [0, 0, 0]]
    for got, true in zip(of_actions(rollouts, spec), expected, strict=True):
        assert got == pytest.approx(true, abs=1e-5)
    deeper = replace(spec, hierarchy_power=0.0)  # all depths weigh the same
    assert of_actions(rollouts, deeper)[0][2] == pytest.approx((1 + 2 * root) / 3, abs=1e-5)


def test_a_situation_holds_all_observations_back_to_its_depth() -> None:
    """The same last observation after different ones: shared at depth 1, not at depth 2."""
    rollouts = [
        played(0, "g", [(0, 0.0), (3, 0.0), (4, 0.0)], 1.0),
        played(1, "g", [(0, 0.0), (5, 0.0), (4, 0.0)], 0.0),
        played(2, "g", [(0, 0.0), (6, 0.0), (7, 0.0)], 0.5),
    ]
    # Outcomes: 1, −1, 0. The third turns of the first two agree at depth 1, of weight 2.
    third = (1 + 2 * 0.5**0.5) / 3
    found = of_actions(rollouts, replace(HGPO, gamma=1.0))
    assert [one[2] for one in found] == pytest.approx([third, -third, 0], abs=1e-5)
    returns, states = [[1.0] * 3, [0.0] * 3], [["a", 3, 4], ["a", 5, 4]]
    got, _ = hgpo(dr_grpo, values(1, 0), returns, states, ["g", "g"], depth=3, power=1.0)
    same(got, [0.5, 0.5, 0.5, -0.5, -0.5, -0.5])
    # Turns 1 have no partner beyond the outcome, turns 2 one at depth 1 alone.
    states = [["a", 3, 4], ["a", 5, 6]]
    outcome = values(0.2, 0)
    got, _ = hgpo(dr_grpo, outcome, returns, states, ["g", "g"], depth=3, power=1.0)
    first = (1 * 0.1 + 2 * 0.5) / 3
    same(got, [first, 0.1, 0.1, -first, -0.1, -0.1])


def test_a_visit_is_compared_with_another_of_the_same_rollout() -> None:
    returns, states = [[0.5, 1.0], [0.5]], [["x", "x"], ["y"]]
    got, _ = hgpo(dr_grpo, values(1, 1), returns, states, ["g", "g"], depth=1, power=1.0)
    same(got, [2 / 3 * -0.25, 2 / 3 * 0.25, 0.0])


def test_hgpo_against_numpy() -> None:
    rng = np.random.default_rng(21)
    for _ in range(NUM_BATCHES):
        num, depth, power = int(rng.integers(1, 9)), int(rng.integers(1, 4)), rng.choice([0, 1, 2])
        groups = rng.integers(0, 3, num).tolist()
        lengths = rng.integers(1, 6, num)
        states = [rng.integers(0, 3, n).tolist() for n in lengths]
        returns = [rng.integers(0, 3, n).astype(float).tolist() for n in lengths]
        outcome = rng.integers(0, 2, num).astype(float)

        def normalised(value: float, those: list[float]) -> float:
            std = np.std(those, ddof=1) if len(those) > 1 else 0.0
            return (value - np.mean(those)) / (std + 1e-6)

        expected = []
        for r in range(num):
            peers = [q for q in range(num) if groups[q] == groups[r]]
            whole = normalised(outcome[r], [outcome[q] for q in peers])
            for t in range(lengths[r]):
                parts, weights = [whole], [1.0]
                for k in range(1, depth + 1):
                    if t + 1 < k:
                        continue
                    history = states[r][t + 1 - k : t + 1]
                    those = [
                        returns[q][u]
                        for q in peers
                        for u in range(k - 1, lengths[q])
                        if states[q][u + 1 - k : u + 1] == history
                    ]
                    if len(those) > 1:
                        parts.append(normalised(returns[r][t], those))
                        weights.append(float(k + 1) ** power)
                expected.append(np.dot(parts, weights) / np.sum(weights))
        got, _ = hgpo(
            grpo, torch.tensor(outcome), returns, states, groups, depth=depth, power=float(power)
        )
        same(got, expected)


def test_a_conversation_beside_has_the_advantage_of_the_whole_rollout() -> None:
    rollouts = [
        played(0, "g", [(0, 0.5), (3, 0.0)], 1.0),
        played(1, "g", [(0, 0.0), (3, 0.0)], 0.0),
        played(2, "g", [(0, 0.75), (3, 0.0)], 0.0),
    ]
    beside = Branch(tokens=[1, 2, 8], loss_mask=[0, 0, 1], logps=[0, 0, -1.0], versions=[-1, -1, 0])
    rollouts[0].branches = [beside]
    batch = build_batch([rollouts], replace(HGPO, gamma=0.25), max_tokens=64, version=0)
    # Outcomes 1½, 0, ¾: mean ¾, deviation ¾. By its first turn it were ¾, 0, ¾.
    assert batch.samples[1].fields["advantage"] == pytest.approx([0, 0, 1.0], abs=1e-4)


# -- the batch as the peers of a turn --------------------------------------------------------------


def test_turns_of_a_batch_by_hand() -> None:
    """Returns to go: [3, 2] and [1] of one task, [2, 0] of another; γ = 1."""
    rollouts = [
        played(0, "a", [(0, 1.0), (3, 0.0)], 2.0),
        played(1, "a", [(0, 0.0)], 1.0),
        played(0, "b", [(0, 2.0), (3, 0.0)], 0.0),
    ]
    spec = AlgorithmSpec(advantage="dr_grpo", reward_level="turn", turn_peers="batch")
    assert of_actions(rollouts, spec) == [[1.0, 1.0], [-1.0], [0.0, -1.0]]
    # GRPO divides by the sample deviation of that turn: 1 of 3, 1, 2; √2 of 2 and 0.
    got = of_actions(rollouts, replace(spec, advantage="grpo"))
    assert [x for one in got for x in one] == pytest.approx([1, 0.5**0.5, -1, 0, -(0.5**0.5)], 1e-5)
    # Discounted by a half: [2, 2], [1], [2, 0].
    got = of_actions(rollouts, replace(spec, gamma=0.5))
    third = 5 / 3
    assert [x for one in got for x in one] == pytest.approx(
        [2 - third, 1, 1 - third, 2 - third, -1], 1e-5
    )


def test_turns_of_a_batch_against_numpy() -> None:
    rng = np.random.default_rng(22)
    for _ in range(NUM_BATCHES):
        num, gamma = int(rng.integers(1, 9)), float(rng.choice([1.0, 0.9]))
        rewards = [rng.integers(0, 3, rng.integers(1, 5)).astype(float) for _ in range(num)]
        rollouts = [
            played(r, f"g{r % 2}", [(0, float(x)) for x in one], 0.0)
            for r, one in enumerate(rewards)
        ]
        spec = AlgorithmSpec(advantage="grpo", reward_level="turn", turn_peers="batch", gamma=gamma)
        later = [
            [sum(gamma ** (j - t) * one[j] for j in range(t, len(one))) for t in range(len(one))]
            for one in rewards
        ]
        for got, own in zip(of_actions(rollouts, spec), later, strict=True):
            for t, value in enumerate(own):
                those = [one[t] for one in later if len(one) > t]
                std = np.std(those, ddof=1) if len(those) > 1 else 0.0
                expected = (value - np.mean(those)) / (std + 1e-6)
                assert got[t] == pytest.approx(expected, abs=1e-5)


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "hgpo"}, "advantage='hgpo' compares turns: set reward_level='turn'"),
        ({"turn_peers": "batch"}, "turn_peers='batch' with reward_level='outcome'"),
        (
            {"turn_peers": "batch", "reward_level": "turn", "advantage": "gae"},
            "set reward_level='turn' and one of grpo",
        ),
        ({"turn_peers": "task"}, "turn_peers='task': choose one of group, batch"),
        ({"hierarchy_depth": 0}, "hierarchy_depth=0"),
        ({"hierarchy_power": -1.0}, "hierarchy_power=-1"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmSpec(**options)


def test_only_turns_of_a_group_need_a_group_of_several() -> None:
    spec = AlgorithmSpec(reward_level="turn")
    assert spec.compares_members and HGPO.compares_members
    assert not replace(spec, turn_peers="batch").compares_members
