"""Advantages against numbers worked by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanorl import group_advantage
from nanorl.algorithms import advantages as adv
from nanorl.algorithms import distillation, overlong
from nanorl.algorithms import returns as of_tokens
from nanorl.algorithms import turn_rewards as of_turns
from nanorl.algorithms.option_groups import Advantage
from nanorl.algorithms.recipes import named_spec
from nanorl.algorithms.registry import ADVANTAGES
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batch_metrics import has_signal
from nanorl.group_advantage import compute_advantages
from nanorl.grpo import AdvantageBatch, part

# Group a: rewards 1, 0, 0, 1 interleaved with group b: 2, 4 and group c: one member.
REWARDS = torch.tensor([1.0, 2.0, 0.0, 4.0, 0.0, 7.0, 1.0], dtype=torch.float64)
GROUPS = ["a", "b", "a", "b", "a", "c", "a"]


def close(actual: torch.Tensor, expected: list[float], tol: float = 1e-5) -> None:
    torch.testing.assert_close(
        actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tol
    )


def test_grpo_by_hand() -> None:
    # a: mean .5, sample variance (4·.25)/3, std .57735; b: mean 3, std sqrt(2).
    a, b = 0.5 / 0.5773502, 1 / 1.4142136
    close(group_advantage.grpo(REWARDS, GROUPS), [a, -b, -a, b, -a, 0, a])


def test_dr_grpo_rloo_and_maxrl_by_hand() -> None:
    close(adv.dr_grpo(REWARDS, GROUPS), [0.5, -1, -0.5, 1, -0.5, 0, 0.5])
    # RLOO is the reward minus the mean of the others: 1 − 1/3, 2 − 4, 0 − 2/3, ...
    close(adv.rloo(REWARDS, GROUPS), [2 / 3, -2, -2 / 3, 2, -2 / 3, 0, 2 / 3])
    close(adv.maxrl(REWARDS, GROUPS), [1, -1 / 3, -1, 1 / 3, -1, 0, 1])


@pytest.mark.parametrize("function", [group_advantage.grpo, adv.dr_grpo, adv.rloo, adv.maxrl])
def test_advantages_follow_the_group_id_and_not_the_position(function) -> None:
    order = torch.tensor([3, 0, 6, 5, 2, 1, 4])
    shuffled = function(REWARDS[order], [GROUPS[i] for i in order])
    torch.testing.assert_close(shuffled, function(REWARDS, GROUPS)[order])


def test_a_uniform_group_and_an_all_zero_group_give_zero_and_no_nan() -> None:
    for function in (group_advantage.grpo, adv.dr_grpo, adv.rloo, adv.maxrl):
        close(function(torch.tensor([1.0, 1.0, 0.0, 0.0]), ["x", "x", "y", "y"]), [0, 0, 0, 0])


def test_a_missing_group_id_is_refused() -> None:
    with pytest.raises(ValueError, match="6 group ids for 7 rewards"):
        group_advantage.grpo(REWARDS, GROUPS[:-1])


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
@pytest.mark.parametrize("count", [3, 7, 1000])
def test_equal_rewards_give_exactly_zero_whatever_the_rounding(reward: float, count: int) -> None:
    rewards, ids = torch.full((count,), reward), torch.arange(count)
    for function in (group_advantage.grpo, adv.dr_grpo, adv.rloo, adv.maxrl):
        assert not function(rewards, ["g"] * count).any()
    mask = torch.ones(count)
    assert not of_tokens.whiten(rewards, mask).any()
    assert not of_tokens.reinforce_pp(rewards, mask, ids).any()


def test_whitening_of_rounding_errors_stays_small_and_of_values_is_that_of_fp64() -> None:
    noisy = torch.full((1000,), 0.7)
    noisy[::2] += 6e-8  # one unit in the last place
    assert float(of_tokens.whiten(noisy, torch.ones(1000)).abs().max()) < 1e-3
    values = torch.randn(50, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(50) % 3 > 0
    kept = values[mask].double()
    by_hand = (kept - kept.mean()) / (kept.var(correction=0) + 1e-8).sqrt()
    got = of_tokens.whiten(values, mask)
    torch.testing.assert_close(got[mask].double(), by_hand, rtol=0, atol=1e-7)
    assert not got[~mask].any()


def test_maxrl_refuses_what_would_turn_its_sign() -> None:
    """(0.1 + 0.1) over a mean of -0.05 would make the better rollouts the worse ones."""
    with pytest.raises(ValueError, match=r"reward -0.2: advantage='maxrl'.*must be 0 or more"):
        adv.maxrl(torch.tensor([0.1, -0.2]), ["g", "g"])
    tiny = torch.tensor([1e-9, 0.0])
    assert float(adv.maxrl(tiny, ["g", "g"]).abs().max()) < 1e-2  # bounded by δ, not 1


# Two action tokens, three observation tokens, two action tokens.
GAE_MASK = torch.tensor([1, 1, 0, 0, 0, 1, 1])
GAE_REWARD = torch.tensor([0, 0, 0, 0, 0, 0, 1.0])
GAE_VALUE = torch.tensor([0.5, 0.5, 5, 5, 5, 0.5, 0.5])


def naive_gae(reward: list[float], value: list[float], lam: float) -> float:
    """First advantage of plain GAE over every position, γ = 1."""
    later = 0.0
    for t in reversed(range(len(value))):
        after = value[t + 1] if t + 1 < len(value) else 0.0
        later = reward[t] + after - value[t] + lam * later
    return later


def test_multi_turn_gae_skips_observations() -> None:
    ids = torch.zeros(7, dtype=torch.long)
    got, returns = of_tokens.gae(GAE_REWARD, GAE_VALUE, GAE_MASK, ids, gamma=1.0, lam=0.95)
    # δ = 0, 0, 0, .5 on the four action tokens: A = .5·(.95³, .95², .95, 1).
    expected = [0.4286875, 0.45125, 0, 0, 0, 0.475, 0.5]
    close(got, expected)
    close(returns, [a + 0.5 if a else 0 for a in expected])
    assert round(float(got[0]), 3) == 0.429


def test_the_three_known_gae_bugs_give_other_numbers() -> None:
    reward, value = GAE_REWARD.tolist(), GAE_VALUE.tolist()
    unmasked = naive_gae(reward, value, 0.95)
    zeroed = naive_gae(reward, [v * m for v, m in zip(value, GAE_MASK.tolist(), strict=True)], 0.95)
    reset = (0.5 - 0.5) + 0.95 * (5 - 0.5)  # bootstraps from the observation and stops there
    assert [unmasked, zeroed, reset] == pytest.approx([0.977, 0.300, 4.275], abs=5e-4)
    ids = torch.zeros(7, dtype=torch.long)
    got = float(of_tokens.gae(GAE_REWARD, GAE_VALUE, GAE_MASK, ids, gamma=1.0, lam=0.95)[0][0])
    assert min(abs(got - bug) for bug in (unmasked, zeroed, reset)) > 0.1


def test_gae_does_not_cross_sequences_and_discounts_per_action_token() -> None:
    ids = torch.tensor([0, 0, 1, 1])
    reward = torch.tensor([0.0, 1.0, 0.0, 2.0])
    mask = torch.ones(4)
    got, _ = of_tokens.gae(reward, torch.zeros(4), mask, ids, gamma=0.5, lam=1.0)
    close(got, [0.5, 1, 1, 2])


def test_reinforce_pp_returns_use_action_tokens_only_and_are_whitened() -> None:
    mask = torch.tensor([1.0, 0, 1, 1])
    ids = torch.tensor([0, 0, 0, 1])
    reward = of_tokens.outcome_rewards(torch.tensor([1.0, 0.0]), mask, ids)
    close(reward, [0, 0, 1, 0])
    k1 = torch.tensor([0.2, 9.0, 0.4, 0.0])
    reward = of_tokens.kl_penalised(reward, k1, torch.zeros(4), mask, 0.5)
    got = of_tokens.reinforce_pp(reward, mask, ids, gamma=0.5)
    # Gains −.1, −, .8, 0; returns −.1 + .5·.8 = .3, .8, 0; mean .366667, population std .329983.
    close(got, [-0.202031, 0, 1.313198, -1.111168], 1e-5)


def test_the_penalty_inside_the_rewards_reaches_gae_too() -> None:
    """k1 = .2 and .4, β = .5: gains -.1 and 1 - .2 = .8; values 0, γ = λ = 1."""
    spec = AlgorithmSpec(advantage="gae", lam=1.0, kl_reward_coef=0.5, whiten_gae=False)
    batch = AdvantageBatch(
        reward_R=torch.tensor([1.0]),
        group_ids=["g"],
        mask_T=torch.tensor([1, 0, 1]),
        sequence_ids_T=torch.zeros(3, dtype=torch.long),
        old_logp_T=torch.tensor([-1.0, -1.0, -1.0]),
        ref_logp_T=torch.tensor([-1.2, -9.0, -1.4]),
        value_T=torch.zeros(3),
    )
    advantage, returns = compute_advantages(spec, batch)
    close(advantage, [0.7, 0, 0.8])
    assert returns is not None
    close(returns, [0.7, 0, 0.8])
    white, same_returns = compute_advantages(replace(spec, whiten_gae=True), batch)
    close(white, [-1, 0, 1], 1e-4)
    assert same_returns is not None and torch.equal(same_returns, returns)


def test_reinforce_pp_baseline_whitens_group_centred_rewards_over_tokens() -> None:
    mask = torch.tensor([1.0, 1, 1, 0])
    ids = torch.tensor([0, 0, 1, 1])
    batch = AdvantageBatch(
        reward_R=torch.tensor([1.0, 0.0]), group_ids=["g", "g"], mask_T=mask, sequence_ids_T=ids
    )
    got, _ = compute_advantages(AlgorithmSpec(advantage="reinforce_pp_baseline"), batch)
    # .5, .5, −.5: mean 1/6, population std sqrt(2)/3.
    close(got, [0.7071068, 0.7071068, -1.4142136, 0])


def test_distillation_subtracts_the_log_ratio_on_action_tokens() -> None:
    got = distillation.distill(
        torch.tensor([1.0, 0.0]),
        torch.tensor([-1.0, -9.0]),
        torch.tensor([-3.0, -1.0]),
        torch.tensor([1, 0]),
        0.25,
    )
    close(got, [0.5, 0])


def test_last_action_token_ignores_a_trailing_observation_and_an_empty_rollout() -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 1])
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    close(of_tokens.last_action_tokens(mask, ids), [0, 0, 1, 0, 0, 0, 1])
    close(of_tokens.last_action_tokens(torch.zeros(3), torch.zeros(3, dtype=torch.long)), [0, 0, 0])


def turn_batch(rewards: Sequence[Sequence[float]]) -> AdvantageBatch:
    """Two rollouts of one group, of three turns and of two, one token each and the first of two.

    rollout  0  0  0  0  0  1  1  1
    turn     0  0  -  1  2  0  -  1
    """
    index = torch.tensor([0, 0, -1, 1, 2, 0, -1, 1])
    return AdvantageBatch(
        reward_R=torch.tensor([sum(rewards[0]), sum(rewards[1])]),
        group_ids=["g", "g"],
        mask_T=(index >= 0).float(),
        sequence_ids_T=torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]),
        turns=of_turns.Turns(rewards=rewards, index_T=index),
        value_T=torch.zeros(8),
        old_logp_T=torch.full((8,), -1.0),
        sharp_logp_T=torch.full((8,), -0.5),
    )


def by_turn(advantage: Advantage, **options: Any) -> AlgorithmSpec:
    return AlgorithmSpec(advantage=advantage, reward_level="turn", **options)


def test_turn_rewards_use_a_turn_baseline_only_where_every_member_has_the_turn() -> None:
    batch = turn_batch([[1.0, 0.0, 1.0], [0.0, 1.0]])
    # Returns to go: [2, 1, 1] and [1, 1]. Turns 0 and 1 are shared; turn 2 gets 2 − mean(2, 1).
    got, _ = compute_advantages(by_turn("dr_grpo"), batch)
    close(got, [0.5, 0.5, 0, 0.0, 0.5, -0.5, 0, 0.0])
    # Discounted by a half for each turn: [1.25, .5, 1] and [.5, 1].
    got, _ = compute_advantages(by_turn("dr_grpo", gamma=0.5), batch)
    close(got, [0.375, 0.375, 0, -0.25, 0.375, -0.375, 0, 0.25])
    # GRPO divides each turn's by the deviation of that turn's returns: sqrt(1/2), 0 and sqrt(1/2).
    got, _ = compute_advantages(by_turn("grpo"), batch)
    root = 0.5**0.5
    close(got, [root, root, 0, 0.0, root, -root, 0, 0.0], 1e-5)
    # RLOO: twice the difference from the mean, in a group of two.
    got, _ = compute_advantages(by_turn("rloo"), batch)
    close(got, [1, 1, 0, 0, 1, -1, 0, 0])


def test_turn_rewards_stand_on_the_last_token_of_their_turn() -> None:
    batch = turn_batch([[1.0, 0.5, 2.0], [0.0, 1.0]])
    assert batch.turns is not None
    placed = of_turns.turn_token_rewards(batch.turns, batch.sequence_ids_T)
    close(placed, [0, 1.0, 0, 0.5, 2.0, 0, 0, 1.0])
    # Returns of tokens with γ = ½, by which GAE of a critic of zeros and λ = 1 is meant.
    spec = by_turn("gae", gamma=0.5, lam=1.0, whiten_gae=False)
    got, returns = compute_advantages(spec, batch)
    third = 0.5 + 0.5 * 2.0
    second = 1.0 + 0.5 * third
    close(got, [0.5 * second, second, 0, third, 2.0, 0.5, 0, 1.0])
    assert returns is not None
    close(returns, got.tolist())
    # REINFORCE++ whitens the same returns.
    white, _ = compute_advantages(by_turn("reinforce_pp", gamma=0.5), batch)
    close(white, of_tokens.whiten(got, batch.mask_T).tolist())


def test_the_reward_of_a_turn_without_tokens_goes_to_the_turn_before() -> None:
    turns = of_turns.Turns(rewards=[[5.0, 1.0, 2.0]], index_T=torch.tensor([-1, 1, 1, -1]))
    close(of_turns.turn_token_rewards(turns, torch.zeros(4, dtype=torch.long)), [0, 0, 3.0, 0])


@pytest.mark.parametrize(
    "advantage", sorted(set(ADVANTAGES) - {"none", "gdpo", "hgpo", "pass_at_k"})
)
def test_a_reward_on_the_last_turn_alone_is_the_outcome_bit_for_bit(advantage: Advantage) -> None:
    batch = turn_batch([[0.0, 0.0, 0.7], [0.0, 0.3]])
    got, _ = compute_advantages(by_turn(advantage), batch)
    expected, _ = compute_advantages(AlgorithmSpec(advantage=advantage), batch)
    assert torch.equal(got, expected) and float(got.abs().sum()) > 0


def test_every_name_of_an_advantage_has_a_function_of_its_own() -> None:
    assert len({part("advantage", name) for name in ADVANTAGES}) == len(ADVANTAGES)
    assert all(callable(part("advantage", name)) for name in ADVANTAGES)


def test_dynamic_sampling_keeps_groups_with_mixed_results() -> None:
    correct = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    kept = has_signal(correct, ["a", "b", "c", "a", "b", "c"])
    assert kept == [True, False, False, True, False, False]


def test_dynamic_sampling_keeps_groups_whose_graded_rewards_differ() -> None:
    """None is solved in full, or all are; what counts is whether there is anything to learn."""
    graded = [0.1, 0.3, 0.1, 0.1, 1.5, 2.0]
    kept = has_signal(graded, ["a", "a", "b", "b", "c", "c"])
    assert kept == [True, True, False, False, True, True]


def test_overlong_penalty_is_linear_in_the_buffer() -> None:
    lengths = torch.tensor([10, 80, 90, 100, 130])
    close(overlong.overlong_penalty(lengths, 100, 20), [0, 0, -0.5, -1, -1])
    with pytest.raises(ValueError, match="buffer=0"):
        overlong.overlong_penalty(lengths, 100, 0)


def test_compute_advantages_serves_every_recipe() -> None:
    mask = torch.tensor([0, 1, 1, 0, 1])
    ids = torch.tensor([0, 0, 0, 1, 1])
    logps = torch.full((5,), -1.0)
    batch = AdvantageBatch(
        reward_R=torch.tensor([1.0, 0.0]),
        group_ids=["g", "g"],
        mask_T=mask,
        sequence_ids_T=ids,
        old_logp_T=logps,
        ref_logp_T=logps,
        value_T=torch.zeros(5),
    )
    for name in ("dr_grpo", "rloo", "maxrl", "reinforce_pp_baseline", "reinforce_pp", "ppo", "opd"):
        advantage, returns = compute_advantages(named_spec(name), batch)
        assert advantage.shape == (5,) and float(advantage[mask == 0].abs().sum()) == 0
        assert (returns is not None) == (name == "ppo")
    close(compute_advantages(named_spec("dr_grpo"), batch)[0], [0, 0.5, 0.5, 0, -0.5])
    distilling = AlgorithmSpec(advantage="none", distill_coef=0.5)
    close(compute_advantages(distilling, batch)[0], [0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="ref_logp_T is missing"):
        incomplete = AdvantageBatch(
            reward_R=batch.reward_R, group_ids=["g", "g"], mask_T=mask, sequence_ids_T=ids,
            old_logp_T=logps,
        )  # fmt: skip
        compute_advantages(distilling, incomplete)


def two_of_a_group(**tensors: torch.Tensor) -> AdvantageBatch:
    """Rewards 1 and 0, two action tokens each."""
    return AdvantageBatch(
        reward_R=torch.tensor([1.0, 0.0]),
        group_ids=["g", "g"],
        mask_T=torch.ones(4),
        sequence_ids_T=torch.tensor([0, 0, 1, 1]),
        **tensors,
    )


def test_otb_discounts_what_is_left_to_come() -> None:
    """Every token was as unsure, so the baseline is the mean of the returns 1/2, 1 and 0, 0."""
    half = torch.full((4,), 0.5).log()
    spec = AlgorithmSpec(advantage="otb", loss="reinforce", gamma=0.5)
    got, _ = compute_advantages(spec, two_of_a_group(old_logp_T=half, sharp_logp_T=half))
    close(got, [0.25, 0.5, -0.25, -0.5])


def test_distillation_is_added_to_the_advantages_of_a_critic_too() -> None:
    """A -= 0.5·(-1 + 3)."""
    batch = two_of_a_group(
        old_logp_T=torch.full((4,), -1.0),
        ref_logp_T=torch.full((4,), -3.0),
        value_T=torch.zeros(4),
    )
    spec = AlgorithmSpec(advantage="gae", whiten_gae=False, lam=1.0, distill_coef=0.5)
    got, returns = compute_advantages(spec, batch)
    close(got, [0.0, 0.0, -1.0, -1.0])
    assert returns is not None
    close(returns, [1.0, 1.0, 0.0, 0.0])
