"""From rollouts to samples, advantages by group, and the log-prob gap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from nanoengine.packing import Sample, make_micro_batches
from nanorl.algorithms.batch_scoring import Scoring
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batch_metrics import batch_metrics, logp_gap, per_action_token
from nanorl.batching import build_batch, check_fields, minibatch_of_rollouts
from nanorl.distributed.warm_start import sft_samples
from nanorl.grpo import Field
from nanorl.types import Branch, Rollout, Status, TurnSpan


def rollout(group: str, member: int, reward: float, actions: int = 2) -> Rollout:
    prompt = [5, 6, 7]
    own = list(range(10, 10 + actions))
    return Rollout(
        task_id=group,
        group_id=group,
        rollout_id=f"{group}-{member}",
        tokens=prompt + own,
        loss_mask=[0] * 3 + [1] * actions,
        logps=[0.0] * 3 + [-0.5] * actions,
        versions=[-1] * 3 + [0] * actions,
        reward=reward,
        status=Status.FINISHED,
    )


def test_advantages_are_within_the_group_and_only_on_sampled_tokens() -> None:
    groups = [[rollout("a", 0, 1.0), rollout("a", 1, 0.0)], [rollout("b", 0, 1.0)]]
    batch = build_batch(groups, AlgorithmSpec(entropy_coef=0.1), max_tokens=64, version=0)
    by_hand = 0.5 / (0.5**0.5 + 1e-6)  # (1 - 0.5) / sample std of {1, 0}
    first, second, lonely = (sample.fields["advantage"] for sample in batch.samples)
    assert first == pytest.approx([0, 0, 0, by_hand, by_hand])
    assert second == pytest.approx([0, 0, 0, -by_hand, -by_hand])
    assert lonely == [0.0] * 5


def test_groups_are_keyed_by_id_and_not_by_place() -> None:
    mixed = [[rollout("a", 0, 1.0), rollout("b", 0, 0.0)], [rollout("a", 1, 0.0)]]
    spec = AlgorithmSpec(advantage="dr_grpo", entropy_coef=0.1)
    batch = build_batch(mixed, spec, max_tokens=64, version=0)
    assert [s.fields["advantage"][-1] for s in batch.samples] == [0.5, 0.0, -0.5]


def test_token_mean_weights_sum_to_one_over_the_whole_batch() -> None:
    groups = [[rollout("a", 0, 1.0, actions=1), rollout("a", 1, 0.0, actions=5)]]
    batch = build_batch(groups, AlgorithmSpec(aggregation="token_mean"), max_tokens=64, version=0)
    weights = [w for sample in batch.samples for w in sample.fields["weight"]]
    assert sum(weights) == pytest.approx(1.0)
    assert {round(w, 6) for w in weights} == {0.0, round(1 / 6, 6)}


def test_samples_without_advantage_are_left_out_and_the_others_keep_their_weights() -> None:
    groups = [
        [rollout("a", 0, 1.0), rollout("a", 1, 1.0)],
        [rollout("b", 0, 1.0), rollout("b", 1, 0.0)],
    ]
    batch = build_batch(groups, AlgorithmSpec(aggregation="token_mean"), max_tokens=64, version=0)
    assert [sample.group for sample in batch.samples] == ["b", "b"]
    assert [sample.group for sample in batch.probe] == ["a", "a"]
    weights = [w for sample in batch.samples for w in sample.fields["weight"] if w]
    assert weights == pytest.approx([1 / 8] * 4)  # 8 action tokens in the whole batch


AGGREGATIONS_BY_HAND = {
    # Three rollouts of 1, 2 and 3 sampled tokens, of two tasks, in one minibatch; a fourth of 4
    # tokens in the other, where it is all there is.
    "token_mean": [1 / 6, 1 / 6, 1 / 6, 1 / 4],
    "seq_mean_token_mean": [1 / 3, 1 / 6, 1 / 9, 1 / 4],
    "seq_mean_token_sum": [1 / 3, 1 / 3, 1 / 3, 1],
    "constant": [1 / 30, 1 / 30, 1 / 30, 1 / 10],
    "prompt_mean": [1 / 6, 1 / 6, 1 / 6, 1 / 4],
}


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS_BY_HAND))
def test_the_weights_of_a_minibatch_are_of_its_own_tokens_and_rollouts(aggregation: str) -> None:
    """Each is one optimizer step: over the whole batch the steps would be smaller by their number,
    and a step of short rollouts would count less than one of long ones."""
    groups = [
        [rollout("a", m, float(m), actions=m + 1) for m in range(3)],
        [rollout("b", 0, 1.0, actions=4)],
    ]
    length = 10 if aggregation == "constant" else None
    spec = AlgorithmSpec(aggregation=aggregation, constant_length=length, entropy_coef=0.1)
    batch = build_batch(groups, spec, max_tokens=64, version=0, num_minibatches=2)
    assert batch.minibatches() == [[0, 1, 2], [3]]
    by_hand = AGGREGATIONS_BY_HAND[aggregation]
    for sample, weight in zip(batch.samples, by_hand, strict=True):
        expected = [weight * mark for mark in sample.loss_mask]
        assert sample.fields["weight"] == pytest.approx(expected)


def test_the_minibatches_are_runs_of_whole_groups_or_of_rollouts_where_groups_are_few() -> None:
    five = [rollout(name, 0, 1.0) for name in "abcde"]
    pairs = [one for name in "abc" for one in (rollout(name, 0, 1.0), rollout(name, 1, 1.0))]
    assert minibatch_of_rollouts(five, 2) == [0, 0, 0, 1, 1]
    assert minibatch_of_rollouts(pairs, 2) == [0, 0, 0, 0, 1, 1]
    assert minibatch_of_rollouts(pairs, 3) == [0, 0, 1, 1, 2, 2]
    assert minibatch_of_rollouts(pairs, 4) == [0, 0, 1, 2, 2, 3]  # more than there are groups
    assert minibatch_of_rollouts(pairs, 1) == [0] * 6


@pytest.mark.parametrize(("good", "bad"), [(1.0, 0.0), (0.3, 0.1), (2.0, 1.5)])
def test_dynamic_sampling_drops_groups_without_signal(good: float, bad: float) -> None:
    """Also where no reward is 1, or all are more."""
    groups = [
        [rollout("a", 0, good), rollout("a", 1, good)],
        [rollout("b", 0, good), rollout("b", 1, bad)],
    ]
    batch = build_batch(groups, AlgorithmSpec(dynamic_sampling=True), max_tokens=64, version=0)
    assert {sample.group for sample in batch.samples} == {"b"}
    assert batch.metrics["num_rollouts"] == 4
    assert batch.metrics["num_trained_rollouts"] == 2
    assert batch.metrics["groups_with_signal"] == 1


def test_a_batch_without_any_action_token_gives_no_samples() -> None:
    batch = build_batch(
        [[rollout("a", 0, 0.0, actions=0)]], AlgorithmSpec(), max_tokens=64, version=0
    )
    assert batch.samples == []


def test_the_gap_counts_sampled_tokens_alone() -> None:
    spec = AlgorithmSpec(entropy_coef=0.1)
    batch = build_batch([[rollout("a", 0, 1.0)]], spec, max_tokens=64, version=0)
    trainer = [torch.tensor([9.0, 9.0, 9.0, -0.5, -0.25])]
    gap = logp_gap(batch.samples, trainer)
    assert gap["logp_gap_max"] == pytest.approx(0.25)
    assert gap["logp_gap_mean"] == pytest.approx(0.125)
    assert gap["logp_gap_kl"] == pytest.approx((2.718281828**0.25 - 1.25) / 2)


def test_statistics_become_means_per_action_token() -> None:
    sums = {"loss": 2.0, "ratio_sum": 6.0, "action_count": 3.0, "logp_gap_max": 5.0}
    assert per_action_token(sums) == {"loss": 2.0, "ratio": 2.0}


def test_traces_of_different_tasks_share_the_rows_of_their_common_start() -> None:
    traces = [rollout("a", 0, 1.0, actions=4), rollout("b", 0, 1.0, actions=6)]
    traces[1].tokens[3] = 99  # after the prompt of three tokens they differ
    (micro,) = make_micro_batches(sft_samples(traces), 64, share_prefix=True)
    assert micro.num_rows == 3 + (4 - 1) + (6 - 1)
    assert micro.loss_mask_T.sum() == 4 + 6


def constant(value: float, calls: list[int]) -> Callable[[Sequence[Sample]], list[torch.Tensor]]:
    def score(samples: Sequence[Sample]) -> list[torch.Tensor]:
        calls.append(len(samples))
        return [torch.full((len(sample.tokens),), value) for sample in samples]

    return score


def test_values_give_advantages_and_the_returns_that_the_critic_learns() -> None:
    """One rollout of reward 1, two action tokens, every value .5, γ = 1, λ = .95."""
    calls: list[int] = []
    batch = build_batch(
        [[rollout("a", 0, 1.0)]],
        AlgorithmSpec(advantage="gae", whiten_gae=False),
        max_tokens=64,
        version=0,
        scoring=Scoring(values=constant(0.5, calls)),
    )
    (sample,) = batch.critic_samples
    last = 1.0 - 0.5
    first = (0.5 - 0.5) + 0.95 * last
    assert sample.fields["advantage"] == pytest.approx([0, 0, 0, first, last])
    assert sample.fields["return"] == pytest.approx([0, 0, 0, first + 0.5, last + 0.5])
    assert calls == [1]


def test_the_critic_learns_also_where_the_policy_has_no_gradient() -> None:
    groups = [[rollout("a", 0, 0.0), rollout("a", 1, 0.0)]]
    scoring = Scoring(values=constant(0.0, []))
    batch = build_batch(
        groups, AlgorithmSpec(advantage="gae"), max_tokens=64, version=0, scoring=scoring
    )
    assert (batch.samples, len(batch.critic_samples)) == ([], 2)


def test_the_reference_penalises_inside_the_reward() -> None:
    """REINFORCE++: k1 = old - ref = -0.5 + 0.75 on each action token, β = 0.1, then whitened."""
    groups = [[rollout("a", 0, 1.0), rollout("b", 0, 0.0)]]
    spec = AlgorithmSpec(advantage="reinforce_pp", kl_reward_coef=0.1)
    seen: list[int] = []
    scoring = Scoring(reference=constant(-0.75, seen))
    batch = build_batch(groups, spec, max_tokens=64, version=0, scoring=scoring)
    returns = torch.tensor([1 - 2 * 0.025, 1 - 0.025, -2 * 0.025, -0.025])
    by_hand = (returns - returns.mean()) / returns.std(correction=0)
    found = [a for s in batch.samples for a in s.fields["advantage"] if a]
    assert found == pytest.approx(by_hand.tolist(), abs=2e-3)
    assert seen == [2] and batch.samples[0].fields["ref_logp"] == [-0.75] * 5


def test_old_log_probs_are_asked_for_only_where_the_advantages_read_them() -> None:
    """Distillation: A -= λ(log π_o - log π_T) with the trainer's -0.25 and the teacher's -0.75."""
    groups = [[rollout("a", 0, 0.0), rollout("a", 1, 0.0)]]
    calls: list[int] = []
    scoring = Scoring(old=constant(-0.25, calls), reference=constant(-0.75, []))
    spec = AlgorithmSpec(distill_coef=0.5)
    batch = build_batch(groups, spec, max_tokens=64, version=3, scoring=scoring)
    assert calls == [2]
    assert batch.samples[0].fields["advantage"] == [0, 0, 0, -0.25, -0.25]
    plain = build_batch(groups, spec, max_tokens=64, version=3, scoring=replace(scoring, old=None))
    assert plain.samples[0].fields["advantage"] == [0, 0, 0, -0.125, -0.125]  # μ = -0.5 is o
    assert "old_logp" not in plain.samples[0].fields


def test_a_batch_of_nothing_asks_nobody_for_a_score() -> None:
    def refuse(samples: Sequence[Sample]) -> list[torch.Tensor]:
        raise AssertionError(f"asked for {len(samples)} samples")

    scoring = Scoring(old=refuse, reference=refuse, values=refuse)
    solved = [[rollout("a", 0, 1.0), rollout("a", 1, 1.0)]]
    spec = AlgorithmSpec(dynamic_sampling=True, kl_coef=0.1)
    for groups in ([], [[], []], solved):
        batch = build_batch(groups, spec, max_tokens=64, version=0, scoring=scoring)
        assert (batch.samples, batch.critic_samples) == ([], [])
    assert len(batch.probe) == 2  # to measure the gap on


def test_the_overlong_penalty_counts_what_the_limit_counts() -> None:
    """A limit of 20 tokens, the prompt's three among them, and a buffer of 10: a rollout of 17
    tokens is 7 into it. By its 14 action tokens it would be 4 into it, and could never reach 20."""
    groups = [[rollout("a", 0, 1.0, actions=14), rollout("a", 1, 1.0, actions=2)]]
    spec = AlgorithmSpec(advantage="dr_grpo", overlong_buffer=10)
    batch = build_batch(groups, spec, max_tokens=20, version=0)
    long, short = (sample.fields["advantage"][-1] for sample in batch.samples)
    assert (long, short) == (pytest.approx(-0.35), pytest.approx(0.35))


def test_a_rollout_without_an_action_token_counts_in_baseline_and_denominator() -> None:
    """Rewards 1, 0, 0: the mean is 1/3; three rollouts of one token at most share the weight."""
    members = [rollout("a", 0, 1.0, 1), rollout("a", 1, 0.0, 1), rollout("a", 2, 0.0, 0)]
    spec = AlgorithmSpec(advantage="dr_grpo", aggregation="seq_mean_token_mean")
    batch = build_batch([members], spec, max_tokens=64, version=0)
    found = [(s.fields["advantage"][3], s.fields["weight"][3]) for s in batch.samples]
    assert found == [pytest.approx((2 / 3, 1 / 3)), pytest.approx((-1 / 3, 1 / 3))]


def test_the_gap_is_of_the_present_weights_and_drift_of_older_ones() -> None:
    held = replace(rollout("a", 0, 1.0), versions=[-1, -1, -1, 4, 5])
    spec = AlgorithmSpec(entropy_coef=0.1)
    batch = build_batch([[held]], spec, max_tokens=64, version=5)
    assert batch.samples[0].fields["staleness"] == [0, 0, 0, 1, 0]
    gap = logp_gap(batch.samples, [torch.tensor([9.0, 9.0, 9.0, -1.5, -0.25])])
    assert (gap["logp_gap_tokens"], gap["logp_gap_max"]) == (1, pytest.approx(0.25))
    assert gap["drift_max"] == gap["drift_mean"] == pytest.approx(1.0)
    assert gap["drift_kl"] == pytest.approx(math.exp(-1.0))  # e^-1 - 1 + 1
    assert batch.metrics["staleness_mean"] == 0.5
    assert (batch.metrics["staleness_max"], batch.metrics["stale_fraction"]) == (1.0, 0.5)


def test_a_token_of_version_zero_grows_stale_as_any_other() -> None:
    held = replace(rollout("a", 0, 1.0), versions=[-1, -1, -1, 0, 2])
    spec = AlgorithmSpec(entropy_coef=0.1)
    batch = build_batch([[held]], spec, max_tokens=64, version=3)
    assert batch.samples[0].fields["staleness"] == [0, 0, 0, 3, 1]


def test_what_is_known_of_some_rollouts_only_is_asked_of_all() -> None:
    groups = [[rollout("a", 0, 1.0), rollout("a", 1, 0.0)]]
    spec, calls = AlgorithmSpec(kl_coef=0.1), list[int]()
    known = {f"a-{m}": {Field.REF_LOGP: [torch.full((5,), -3.0)]} for m in range(2)}
    scoring = Scoring(reference=constant(-0.75, calls))
    for told, value in (({"a-0": known["a-0"]}, -0.75), (known, -3.0)):
        batch = build_batch(
            groups, spec, max_tokens=64, version=0, scoring=replace(scoring, known=told)
        )
        assert [one.fields["ref_logp"] for one in batch.samples] == [[value] * 5] * 2
    assert calls == [2]


def test_covariance_is_that_of_the_trainer_s_log_probs_where_it_was_asked() -> None:
    """A = ±0.5; the trainer's log-probs are -1 and -3, those of the rollouts all -0.5. Covariances
    with their mean of -2 are 0.5, -0.5 and -0.5, 0.5: the likely token of the good rollout and the
    unlikely one of the bad."""

    def trainer(samples: Sequence[Sample]) -> list[torch.Tensor]:
        return [torch.tensor([0.0, 0.0, 0.0, -1.0, -3.0]) for _ in samples]

    groups = [[rollout("a", 0, 1.0), rollout("a", 1, 0.0)]]
    spec = AlgorithmSpec(advantage="dr_grpo", loss="kl_cov", covariance_share=0.5)
    scoring = Scoring(old=trainer)
    batch = build_batch(groups, spec, max_tokens=64, version=0, scoring=scoring)
    assert [one.fields["chosen"] for one in batch.samples] == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]


def test_only_what_has_no_gradient_at_all_is_left_out() -> None:
    """Equal rewards: A = 0. kl_cov holds chosen tokens back all the same, ECHO and the entropy
    have a term of their own."""
    groups = [[rollout("a", 0, 1.0), rollout("a", 1, 1.0)]]
    for options, count in [
        ({}, 0),
        ({"loss": "clip_cov"}, 0),
        ({"loss": "kl_cov"}, 2),
        ({"observation_coef": 0.1}, 2),
        ({"entropy_coef": 0.1}, 2),
        ({"kl_coef": 0.1}, 2),
    ]:
        scoring = Scoring(reference=constant(-0.75, []) if "kl_coef" in options else None)
        batch = build_batch(
            groups, AlgorithmSpec(**options), max_tokens=64, version=0, scoring=scoring
        )
        assert len(batch.samples) == count, options


def test_what_is_not_a_number_is_refused_with_the_rollout_that_has_it() -> None:
    good, bad = rollout("a", 0, 1.0), rollout("a", 1, math.nan)
    spec = AlgorithmSpec(correction="mis")
    with pytest.raises(ValueError, match=r"rollout a-1: its reward is nan"):
        build_batch([[good, bad]], spec, max_tokens=64, version=0)
    for value in (math.nan, -math.inf):
        bad = replace(good, rollout_id="a-1", logps=[0.0] * 4 + [value])
        with pytest.raises(ValueError, match=rf"a-1: the rollout policy .* token 4 .* {value}"):
            build_batch([[good, bad]], spec, max_tokens=64, version=0)
    spec = AlgorithmSpec(kl_coef=0.1)
    scoring = Scoring(reference=constant(math.nan, []))
    with pytest.raises(ValueError, match=r"rollout a-0: the model behind 'ref_logp'"):
        build_batch([[good, rollout("a", 1, 0.0)]], spec, max_tokens=64, version=0, scoring=scoring)


def test_a_rollout_is_of_the_version_that_began_it() -> None:
    assert replace(rollout("a", 0, 1.0), versions=[-1, -1, -1, 4, 5]).version == 4
    assert rollout("a", 0, 1.0, actions=0).version == -1


def two_turns(member: int, reward: float, turn_rewards: list[float]) -> Rollout:
    """A token, an observation of one token, a token."""
    return replace(
        rollout("a", member, reward, actions=3),
        loss_mask=[0, 0, 0, 1, 0, 1],
        turn_spans=[
            TurnSpan(action_start=3, action_end=4, observation_end=5),
            TurnSpan(action_start=5, action_end=6, observation_end=6),
        ],
        turn_rewards=turn_rewards,
    )


def test_turn_rewards_reach_the_advantages_of_their_turn() -> None:
    """Returns to go: 0.4 + 1 and 1; 0 and 0. The means are 0.7 and 0.5."""
    groups = [[two_turns(0, 1.0, [0.4, 0.0]), two_turns(1, 0.0, [])]]
    spec = AlgorithmSpec(advantage="dr_grpo", reward_level="turn")
    batch = build_batch(groups, spec, max_tokens=64, version=0)
    first, second = (sample.fields["advantage"] for sample in batch.samples)
    assert first == pytest.approx([0, 0, 0, 0.7, 0, 0.5])
    assert second == pytest.approx([0, 0, 0, -0.7, 0, -0.5])
    plain = build_batch(groups, AlgorithmSpec(advantage="dr_grpo"), max_tokens=64, version=0)
    assert plain.samples[0].fields["advantage"] == pytest.approx([0, 0, 0, 0.7, 0, 0.7])


def test_the_reward_that_is_reported_holds_the_rewards_of_turns() -> None:
    """1 + 0.4 - 0.1 and 0."""
    metrics = batch_metrics(
        [two_turns(0, 1.0, [0.4, -0.1]), two_turns(1, 0.0, [])], AlgorithmSpec()
    )
    assert metrics["reward"] == pytest.approx(0.65) and metrics["success"] == 0.5


def test_the_length_penalty_belongs_to_the_last_turn() -> None:
    groups = [[two_turns(0, 1.0, [0.4, 0.0]), two_turns(1, 1.0, [0.4, 0.0])]]
    spec = AlgorithmSpec(
        advantage="gae", whiten_gae=False, lam=1.0, reward_level="turn", overlong_buffer=4
    )
    scoring = Scoring(values=constant(0.0, []))
    batch = build_batch(groups, spec, max_tokens=8, version=0, scoring=scoring)
    assert batch.samples[0].fields["advantage"] == pytest.approx([0, 0, 0, 0.9, 0, 0.5])


def test_signal_is_what_the_advantages_compare() -> None:
    """Totals that are equal teach all the same where turns earned them unlike, or nothing where
    they did not."""
    unlike = [two_turns(0, 1.0, [0.4, 0.0]), two_turns(1, 1.0, [0.0, 0.4])]
    alike = [two_turns(0, 1.0, [0.0, 0.0]), two_turns(1, 1.0, [])]
    by_turn = AlgorithmSpec(reward_level="turn", dynamic_sampling=True)
    for spec, group, count in [
        (by_turn, unlike, 2),
        (AlgorithmSpec(dynamic_sampling=True), unlike, 0),
        (by_turn, alike, 0),
        (by_turn, [two_turns(0, 0.5, []), two_turns(1, 1.0, [])], 2),
    ]:
        batch = build_batch([group], spec, max_tokens=64, version=0)
        assert batch.metrics["groups_with_signal"] == count / 2
        assert batch.metrics["num_trained_rollouts"] == count
        if count:
            assert all(any(sample.fields["advantage"]) for sample in batch.samples)


def test_turn_rewards_that_do_not_fit_the_turns_are_refused() -> None:
    spec = AlgorithmSpec(reward_level="turn")
    with pytest.raises(ValueError, match="rollout a-0: 1 turn rewards for 2 turns"):
        build_batch([[two_turns(0, 1.0, [0.4])]], spec, max_tokens=64, version=0)
    with pytest.raises(ValueError, match="rollout a-0: its reward is nan"):
        build_batch([[two_turns(0, 1.0, [0.4, math.nan])]], spec, max_tokens=64, version=0)


def test_the_fields_of_a_finished_batch_are_the_declared_ones() -> None:
    batch = build_batch([[rollout("a", 0, 1.0), rollout("a", 1, 0.0)]], AlgorithmSpec(),
                        max_tokens=64, version=0)  # fmt: skip
    check_fields(batch.samples)
    sample = batch.samples[0]
    with pytest.raises(ValueError, match="missing: advantage, unknown: none"):
        kept = {name: sample.fields[name] for name in sample.fields if name != Field.ADVANTAGE}
        check_fields([replace(sample, fields=kept)])
    with pytest.raises(ValueError, match="missing: none, unknown: bonus"):
        check_fields([replace(sample, fields=sample.fields | {"bonus": [0.0] * 5})])


def test_a_history_whose_turns_nobody_marked_is_one_turn_before_the_others() -> None:
    """Returns to go: 0.4 + 1 from the history and from the first turn on, 1 from the second."""
    members = []
    for member, reward, earned in ((0, 1.0, [0.4, 0.0]), (1, 0.0, [])):
        before = Branch(
            tokens=[5, 9], loss_mask=[0, 1], logps=[0.0, -0.5], versions=[-1, 0], is_history=True
        )
        members.append(replace(two_turns(member, reward, earned), branches=[before]))
    spec = AlgorithmSpec(advantage="dr_grpo", reward_level="turn")
    batch = build_batch([members], spec, max_tokens=64, version=0)
    first, history = batch.samples[:2]
    assert first.fields["advantage"] == pytest.approx([0, 0, 0, 0.7, 0, 0.5])
    assert history.fields["advantage"] == pytest.approx([0, 0.7])


def test_what_a_teacher_said_is_among_the_numbers_of_the_tokens() -> None:
    """Two tokens of a prompt of its own in place of three."""
    one = replace(two_turns(0, 1.0, []), hindsight=[8, 9])
    spec = AlgorithmSpec(advantage="none", loss="opd", hindsight="solution")
    scoring = Scoring(teacher=constant(-0.75, []))
    batch = build_batch([[one]], spec, max_tokens=64, version=0, scoring=scoring)
    expected = [[0, 0, 0, -0.75, -0.75, -0.75]]
    assert batch.stats["a-0"].values["teacher_logp"] == expected
    assert batch.samples[0].fields["teacher_logp"] == expected[0]


def test_the_gap_leaves_out_what_was_observed() -> None:
    """The engine sampled it at no log-prob at all."""
    groups = [[two_turns(0, 1.0, []), two_turns(1, 0.0, [])]]
    batch = build_batch(groups, AlgorithmSpec(observation_coef=0.1), max_tokens=64, version=0)
    assert batch.samples[0].loss_mask == [0, 0, 0, 1, 1, 1]
    gap = logp_gap(batch.samples, [torch.tensor([9.0, 9.0, 9.0, -0.5, -7.0, -0.25])] * 2)
    assert gap["logp_gap_tokens"] == 4 and gap["logp_gap_max"] == pytest.approx(0.25)
