"""Rollouts of several token sequences: their samples, weights and metrics by hand, and storage."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from nanoengine.packing import Sample, make_micro_batches
from nanorl.algorithms.batch_scoring import Scoring
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import build_batch
from nanorl.distributed.warm_start import sft_samples
from nanorl.grpo import Field
from nanorl.observability.store import RolloutStore, content_hash
from nanorl.rollout_json import from_json, to_json
from nanorl.types import Branch, Rollout, TurnSpan


def branch(tokens: list[int], mask: list[int], version: int = 3) -> Branch:
    return Branch(
        tokens=tokens,
        loss_mask=mask,
        logps=[-0.25 * token * m for token, m in zip(tokens, mask, strict=True)],
        versions=[version if m else -1 for m in mask],
        turn_spans=[TurnSpan(action_start=2, action_end=3, observation_end=len(tokens))],
    )


def rollout(name: str, reward: float, own: Branch, *branches: Branch) -> Rollout:
    return Rollout(
        task_id="t",
        group_id="g",
        rollout_id=name,
        reward=reward,
        branches=list(branches),
        **{name: value for name, value in vars(own).items() if name != "is_history"},
    )


def a_group() -> list[Rollout]:
    """One solved in three sequences of 2, 1 and 2 trained tokens (a history of which the second
    goes on, repeating an action masked; a sub-agent's); one of a single token failed."""
    history = branch([5, 6, 7, 8], [0, 0, 1, 0], version=2)
    sub_agent = branch([9, 9, 4, 4], [0, 0, 1, 1])
    solved = rollout("a", 1.0, branch([5, 6, 7, 3, 2, 1], [0, 0, 0, 0, 1, 1]), history, sub_agent)
    return [solved, rollout("b", 0.0, branch([5, 6, 7], [0, 0, 1]))]


def build(spec: AlgorithmSpec, groups: list[list[Rollout]] | None = None, **scoring: object):  # type: ignore[no-untyped-def]
    return build_batch(
        groups or [a_group()],
        spec,
        max_tokens=64,
        version=4,
        scoring=Scoring(**scoring),  # type: ignore[arg-type]
    )


def per_sample(samples: list[Sample], name: Field) -> list[list[float]]:
    """The values of each sample's trained tokens."""
    return [
        [value for value, m in zip(s.fields[name], s.loss_mask, strict=True) if m] for s in samples
    ]


@pytest.mark.parametrize(
    ("aggregation", "of_a", "of_b"),
    [
        ("token_mean", 1 / 6, 1 / 6),
        ("seq_mean_token_mean", 1 / (2 * 5), 1 / 2),  # two rollouts; a has five tokens in all
        ("seq_mean_token_sum", 1 / 2, 1 / 2),
        ("constant", 1 / (2 * 10), 1 / (2 * 10)),
        ("prompt_mean", 1 / 6, 1 / 6),
    ],
)
def test_all_sequences_share_the_rollouts_advantage_and_denominator(
    aggregation: str, of_a: float, of_b: float
) -> None:
    length = 10 if aggregation == "constant" else None
    spec = AlgorithmSpec(advantage="dr_grpo", aggregation=aggregation, constant_length=length)  # type: ignore[arg-type]
    samples = build(spec).samples
    assert [s.tokens for s in samples] == [s.tokens for r in a_group() for s in r.sequences]
    assert {s.group for s in samples} == {"g"}
    assert per_sample(samples, Field.ADVANTAGE) == [[0.5, 0.5], [0.5], [0.5, 0.5], [-0.5]]
    weights = [[of_a] * 2, [of_a], [of_a] * 2, [of_b]]
    assert per_sample(samples, Field.WEIGHT) == [pytest.approx(row) for row in weights]
    assert per_sample(samples, Field.ROLLOUT_LOGP) == [[-0.5, -0.25], [-1.75], [-1, -1], [-1.75]]
    assert per_sample(samples, Field.STALENESS) == [[1, 1], [2], [1, 1], [1]]
    for sample in samples:
        assert all(w == 0 for w, m in zip(sample.fields["weight"], sample.loss_mask) if not m)  # noqa: B905


def test_the_loss_of_a_batch_with_branches_by_hand() -> None:
    """The ratio of the first step is 1: the loss is -Σ weight · advantage."""
    for aggregation, expected in (("token_mean", -(5 - 1) / 12), ("seq_mean_token_mean", 0.0)):
        spec = AlgorithmSpec(advantage="dr_grpo", aggregation=aggregation)  # type: ignore[arg-type]
        batch = build(spec)
        (micro,) = make_micro_batches(batch.samples, 64, share_prefix=True)
        logp_T = micro.fields_T[Field.ROLLOUT_LOGP]
        loss, sums = batch.loss_fn(logp_T, None, micro)
        assert float(loss) == pytest.approx(expected, abs=1e-6)
        assert float(sums["action_count"]) == 6


def zeros(samples: list[Sample]) -> list[torch.Tensor]:
    return [torch.zeros(len(sample.tokens)) for sample in samples]


def test_an_estimator_of_tokens_rewards_each_sequence_with_the_outcome() -> None:
    spec = AlgorithmSpec(advantage="gae", whiten_gae=False, gamma=0.5, lam=1.0)
    samples = build(spec, values=zeros).critic_samples
    assert per_sample(samples, Field.RETURN) == [[0.5, 1.0], [1.0], [0.5, 1.0], [0.0]]


def test_turns_of_a_branch_have_the_advantage_of_the_whole_rollout() -> None:
    a, b = a_group()
    spans = [(2, 5, 5), (5, 6, 6)]
    a.turn_spans = [TurnSpan(action_start=x, action_end=y, observation_end=z) for x, y, z in spans]
    a.turn_rewards, b.turn_rewards = [0.25, 0.0], [0.0]
    spec = AlgorithmSpec(advantage="dr_grpo", reward_level="turn")
    samples = build(spec, [[a, b]]).samples
    # G_0 of a is 1.25, of b 0; b has no second turn, so a's is compared as a whole too
    assert per_sample(samples, Field.ADVANTAGE) == [[0.625] * 2, [0.625], [0.625] * 2, [-0.625]]
    spec = AlgorithmSpec(advantage="gae", reward_level="turn", whiten_gae=False, lam=1.0)
    samples = build(spec, [[a, b]], values=zeros).critic_samples
    assert per_sample(samples, Field.RETURN) == [[1.25, 1.0], [1.25], [1.25, 1.25], [0.0]]


def test_turns_before_a_compaction_share_in_what_later_ones_earned() -> None:
    a, b = a_group()
    groups = [[a, b]]
    history, sub_agent = a.branches
    history.is_history = True
    history.turn_rewards, a.turn_rewards = [0.25], [0.5]
    sub_agent.turn_rewards, b.turn_rewards = [2.0], [0.0]
    assert a.total_reward == 3.75
    a.turn_spans = [TurnSpan(action_start=4, action_end=6, observation_end=6)]
    # Turns of a: 0.25, then 0.5 + 1 + 2 of the helper; b has one, so later ones count as a whole.
    spec = AlgorithmSpec(advantage="dr_grpo", reward_level="turn")
    samples = build(spec, groups).samples
    whole = 3.75 / 2
    advantages = per_sample(samples, Field.ADVANTAGE)
    assert advantages == [[whole] * 2, [whole], [whole] * 2, [-whole]]
    b.turn_spans = [*b.turn_spans, TurnSpan(action_start=3, action_end=3, observation_end=3)]
    b.turn_rewards = [0.0, 0.0]
    samples = build(spec, groups).samples
    # Now both have a second turn, and that of a is worth 3.5.
    assert per_sample(samples, Field.ADVANTAGE) == [[1.75] * 2, [whole], [whole] * 2, [-whole]]
    spec = AlgorithmSpec(advantage="gae", reward_level="turn", whiten_gae=False, lam=1.0)
    samples = build(spec, groups, values=zeros).critic_samples
    assert per_sample(samples, Field.RETURN) == [[3.5, 3.5], [3.75], [3.75, 3.75], [0.0]]


def test_metrics_count_the_tokens_and_turns_of_all_sequences() -> None:
    metrics = build(AlgorithmSpec()).metrics
    assert metrics["num_rollouts"] == metrics["num_trained_rollouts"] == 2
    assert (metrics["action_tokens"], metrics["total_tokens"]) == (6, 6 + 4 + 4 + 3)
    assert metrics["turns"] == (3 + 1) / 2
    assert metrics["staleness_mean"] == (5 * 1 + 2) / 6 and metrics["staleness_max"] == 2


def test_a_branch_alone_may_be_trained() -> None:
    a, b = a_group()
    a.loss_mask, a.versions = [0] * 6, [-1] * 6
    batch = build(AlgorithmSpec(), [[a, b]])
    assert [len(s.tokens) for s in batch.samples] == [4, 4, 3]
    assert batch.metrics["num_trained_rollouts"] == 2
    assert len(batch.probe) == 3 and len(sft_samples([a, b])) == 3


def test_the_overlong_penalty_is_of_the_longest_sequence() -> None:
    a, b = a_group()
    b.branches = [branch([5, 6, *range(5)], [0, 0, 1, 0, 0, 0, 0])]  # 7 of at most 8 tokens
    spec = AlgorithmSpec(advantage="dr_grpo", overlong_buffer=2)
    batch = build_batch([[a, b]], spec, max_tokens=8, version=4)
    advantages = per_sample(batch.samples, Field.ADVANTAGE)
    assert advantages[0] == [0.75, 0.75] and advantages[3] == [-0.75]  # 1.0 against 0.0 - 0.5


def test_a_log_prob_that_is_not_finite_is_named_with_its_branch() -> None:
    a, b = a_group()
    a.branches[1].logps[3] = math.nan
    with pytest.raises(ValueError, match=r"rollout a: .* token 3 of branch 1 the value nan"):
        build(AlgorithmSpec(), [[a, b]])
    with pytest.raises(ValueError, match=r"'value'.* token 2 of branch 0 the value inf"):
        build(AlgorithmSpec(advantage="gae"), values=lambda samples: damaged(zeros(samples)))


def damaged(values: list[torch.Tensor]) -> list[torch.Tensor]:
    values[1][2] = math.inf
    return values


def test_a_rollout_counts_all_its_sequences() -> None:
    a, _ = a_group()
    assert [s.tokens for s in a.sequences] == [a.tokens, *(b.tokens for b in a.branches)]
    assert (a.num_tokens, a.num_action_tokens, a.num_turns) == (14, 5, 3)
    assert a.version == 2  # the history's, which began it
    with pytest.raises(AssertionError, match="differ in length"):
        Branch(tokens=[1, 2], loss_mask=[0, 1], logps=[0.0, -1.0], versions=[-1])


def test_branches_survive_json_and_the_store_to_the_last_bit(tmp_path: Path) -> None:
    a, b = a_group()
    a.branches[0].logps[2] = -0.1  # no fp32 number
    a.branches[0].is_history, a.branches[0].turn_rewards = True, [0.25]
    assert from_json(json.loads(json.dumps(to_json(a)))) == a
    old = {name: value for name, value in to_json(b).items() if name != "branches"}
    assert from_json(old) == b  # written before there were branches
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        store.add_group([a, b], step=1)
        assert store.query(step=1) == [a, b]
        entry = store.entries(step=1)[0]
        assert (entry.num_tokens, entry.num_turns, entry.version) == (14, 3, 2)


def test_the_content_hash_covers_branches() -> None:
    (a, b), (again, _) = a_group(), a_group()
    again.branches[1].logps[2] = -9.0
    assert content_hash(a) == content_hash(again)
    again.branches[1].tokens[0] = 8
    assert content_hash(a) != content_hash(again)
    # The hash of a rollout without branches is that of files written before there were any.
    assert content_hash(b).startswith("3e9c296684e76cde")
