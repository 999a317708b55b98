"""Tokens that learn by their entropy: the choice by hand and against numpy, its place in a batch,
and that neither order nor split has a say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradient_cases import checked_gradient
from layout_cases import stored_groups, write_model
from tiny_shapes import DENSE
from torch import Tensor

from nanoengine.build import build_engine
from nanoengine.config import EngineConfig
from nanoengine.model.attention import PackedContext
from nanoengine.packing import Sample
from nanorl.algorithms.batch_scoring import Scoring
from nanorl.algorithms.entropy_mask import choose_by_entropy
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import TrainBatch, build_batch
from nanorl.grpo import Field
from nanorl.types import Rollout, Status

ENTROPIES = {"g-m0": [0.1, 2.0, 0.3], "g-m1": [0.9, 0.2, 1.5], "h-m0": [3.0], "h-m1": [0.0]}


def rollout(name: str, reward: float) -> Rollout:
    """A prompt of two tokens and as many sampled ones as `ENTROPIES` has; the third names it."""
    count = len(ENTROPIES[name])
    number = 10 * (1 + list(ENTROPIES).index(name))
    return Rollout(
        task_id=name[0],
        group_id=name[0],
        rollout_id=name,
        tokens=[1, 2, *range(number, number + count)],
        loss_mask=[0, 0, *[1] * count],
        logps=[0.0, 0.0, *[-1.0] * count],
        versions=[-1, -1, *[0] * count],
        reward=reward,
    )


def entropies(samples: Sequence[Sample]) -> list[Tensor]:
    """Large where nobody sampled: a mask has to keep those out."""
    by_number = list(ENTROPIES.values())
    return [torch.tensor([9.0, 9.0, *by_number[s.tokens[2] // 10 - 1]]) for s in samples]


def batch_of(groups: Sequence[Sequence[Rollout]], share: float, **options: Any) -> TrainBatch:
    spec = AlgorithmSpec(**{"advantage": "dr_grpo", "entropy_share": share, **options})
    scoring = Scoring(entropies=entropies)
    return build_batch(groups, spec, max_tokens=64, version=0, scoring=scoring)


def advantages(batch: TrainBatch) -> dict[str, list[float]]:
    pairs = zip(batch.places, batch.samples, strict=True)
    return {place[0]: sample.fields[Field.ADVANTAGE][2:] for place, sample in pairs}


GROUPS = [
    [rollout("g-m0", 1.0), rollout("g-m1", 0.0)],
    [rollout("h-m0", 1.0), rollout("h-m1", 0.5)],
]


def test_the_choice_by_hand() -> None:
    entropy, mask = torch.tensor([0.5, 9.0, 2.0, 1.0, 0.0, 2.0]), torch.tensor([1, 0, 1, 1, 1, 1])
    for share, expected in (
        (0.1, [0, 0, 1, 0, 0, 1]),  # at least one, and ties with it
        (0.6, [0, 0, 1, 1, 0, 1]),
        (0.8, [1, 0, 1, 1, 0, 1]),
        (1.0, [1, 0, 1, 1, 1, 1]),
    ):
        assert choose_by_entropy(entropy, mask, share).tolist() == expected
    assert not choose_by_entropy(entropy, torch.zeros(6), 0.5).any()


def test_the_choice_against_numpy() -> None:
    rng = np.random.default_rng(4)
    for _ in range(200):
        num, share = int(rng.integers(1, 300)), float(rng.choice([0.05, 0.2, 0.9]))
        entropy, mask = rng.exponential(size=num), (rng.random(num) < 0.7).astype(int)
        got = choose_by_entropy(torch.tensor(entropy), torch.tensor(mask), share)
        acts = np.flatnonzero(mask)
        expected = np.zeros(num)
        if len(acts):
            count = max(int(share * len(acts)), 1)
            expected[acts[np.argsort(-entropy[acts])[:count]]] = 1
        assert got.tolist() == expected.tolist()
        order = rng.permutation(num)
        again = choose_by_entropy(torch.tensor(entropy[order]), torch.tensor(mask[order]), share)
        assert again.tolist() == expected[order].tolist(), "the order of the tokens has no say"


def test_the_other_tokens_have_no_advantage_and_stay_in_the_denominator() -> None:
    """Of 8 sampled tokens the 4 with 3.0, 2.0, 1.5 and 0.9, whatever rollout they are of. A is
    ±1/2 and ±1/4; the last rollout has none left, and is not trained on."""
    batch = batch_of(GROUPS, 0.5)
    assert advantages(batch) == {
        "g-m0": [0, 0.5, 0],
        "g-m1": [-0.5, 0, -0.5],
        "h-m0": [0.25],
    }
    weights = {w for sample in batch.samples for w in sample.fields[Field.WEIGHT][2:]}
    assert weights == {1 / 8}
    assert batch.metrics["high_entropy_tokens"] == 4
    assert batch.stats["g-m1"].values["advantage"] == [[0, 0, -0.5, 0, -0.5]]


def test_the_gradient_is_that_of_the_chosen_tokens() -> None:
    first, second, third = checked_gradient(batch_of(GROUPS, 0.5, loss="reinforce"))
    assert first.tolist() == pytest.approx([0, 0, 0, -0.5 / 8, 0])
    assert second.tolist() == pytest.approx([0, 0, 0.5 / 8, 0, 0.5 / 8])
    assert third.tolist() == pytest.approx([0, 0, -0.25 / 8])
    checked_gradient(batch_of(GROUPS, 0.5))


def test_the_choice_is_over_all_minibatches_and_without_what_was_cut_off() -> None:
    spec = AlgorithmSpec(advantage="dr_grpo", entropy_share=0.25)
    scoring = Scoring(entropies=entropies)
    batch = build_batch(GROUPS, spec, max_tokens=64, version=0, scoring=scoring, num_minibatches=2)
    assert advantages(batch) == {"g-m0": [0, 0.5, 0], "h-m0": [0.25]}
    cut = [[*GROUPS[0]], [rollout("h-m0", 1.0), rollout("h-m1", 0.5)]]
    cut[1][0] = replace(cut[1][0], status=Status.TRUNCATED_TURN)
    batch = batch_of(cut, 0.25, mask_truncated=True)  # one of the 7 that are left
    assert advantages(batch) == {"g-m0": [0, 0.5, 0]}


def test_a_kl_and_an_entropy_bonus_hold_for_every_token() -> None:
    batch = batch_of(GROUPS, 0.5, entropy_coef=0.1)
    assert len(batch.samples) == 4
    assert all(all(sample.fields[Field.WEIGHT][2:]) for sample in batch.samples)
    assert advantages(batch)["h-m1"] == [0]


def test_nobody_to_ask_is_named() -> None:
    spec = AlgorithmSpec(entropy_share=0.2)
    for scoring in (None, Scoring()):
        with pytest.raises(ValueError, match="entropies are missing: entropy_share reads them"):
            build_batch(GROUPS, spec, max_tokens=64, version=0, scoring=scoring)


def test_an_entropy_that_is_no_number_is_refused() -> None:
    def damaged(samples: Sequence[Sample]) -> list[Tensor]:
        return [one * float("nan") for one in entropies(samples)]

    with pytest.raises(ValueError, match="g-m0: the model behind 'entropies' gives its token 2"):
        build_batch(
            GROUPS,
            AlgorithmSpec(entropy_share=0.2),
            max_tokens=64,
            version=0,
            scoring=Scoring(entropies=damaged),
        )


def test_the_engine_s_entropies_are_those_of_the_distribution(tmp_path: Path) -> None:
    """They follow from the logits at the temperature, and the choice is the same whatever the
    micro-batches and the order of the samples."""
    folder = write_model(tmp_path, DENSE)
    dice = random.Random(1)
    samples = [
        Sample(tokens=one.tokens, loss_mask=one.loss_mask)
        for group in stored_groups()
        for one in dice.sample(group, len(group))
    ]
    temperature = 0.7
    found: list[list[Tensor]] = []
    for budget, order in ((4096, samples), (40, samples), (90, samples[::-1])):
        engine = build_engine(folder, EngineConfig(dtype="fp64", micro_batch_tokens=budget))
        told = engine.forward_entropies(order, temperature=temperature)
        found.append(told if order is samples else told[::-1])
    for sample, *values in zip(samples, *found, strict=True):
        ids = torch.tensor(sample.tokens)
        hidden = engine.model(ids, torch.arange(len(ids)), PackedContext.from_lengths([len(ids)]))
        logp = torch.log_softmax(engine.model.logits(hidden).double() / temperature, -1)
        expected = torch.zeros(len(ids), dtype=torch.float64)
        expected[1:] = -(logp.exp() * logp).sum(-1)[:-1]
        expected *= torch.tensor(sample.loss_mask)
        for value in values:
            torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-6)
    mask = torch.tensor([m for one in samples for m in one.loss_mask])
    chosen = [choose_by_entropy(torch.cat(told), mask, 0.2) for told in found]
    assert torch.equal(chosen[0], chosen[1]) and torch.equal(chosen[0], chosen[2])
    assert 0 < int(chosen[0].sum()) <= 0.2 * int(mask.sum())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"entropy_share": 0.0}, "entropy_share=0.0: must be more than 0"),
        ({"entropy_share": 1.5}, "entropy_share=1.5: must be at most 1"),
        ({"loss": "kl_cov"}, r"entropy_share=0.2: loss='kl_cov' chooses tokens itself"),
        ({"loss": "gmpo"}, r"entropy_share=0.2: loss='gmpo' is of whole sequences"),
        ({"loss": "opd"}, r"entropy_share=0.2: it takes the advantage .* loss='opd'"),
        ({"advantage": "none", "kl_coef": 0.1}, r"entropy_share=0.2: .* advantage='none'"),
    ],
)
def test_what_has_no_advantage_of_tokens_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmSpec(**{"entropy_share": 0.2, **options})
    assert AlgorithmSpec(advantage="none", distill_coef=0.1, entropy_share=0.2).modifiers
