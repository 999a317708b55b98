"""The update of any algorithm is independent of micro-batches, of the order of rollouts, of how
samples are dealt to ranks, and of padding: recipes drawn at random, with options drawn at random.

Layouts of several processes are in test_layouts.py; here ranks take turns in one engine, whose
gradients add up as theirs do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_cases import MAX_TOKENS, TEMPERATURE, VERSION, _rollout, write_model
from tiny_shapes import DENSE, VOCAB
from torch import Tensor

from nanoengine.build import build_engine
from nanoengine.config import EngineConfig
from nanoengine.packing import Sample, TopTokens
from nanoengine.parallel.dealing import deal
from nanoengine.parallel.layout import Layout
from nanoengine.state.whole_engine import Engine
from nanorl.algorithms.batch_scoring import Scoring
from nanorl.algorithms.recipes import RECIPES
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import TrainBatch, build_batch
from nanorl.types import Rollout

MOST_ERROR = 1e-6  # of the gradient's norm, fp32

OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "aggregation": st.sampled_from(
        ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "prompt_mean"]
    ),
    "correction": st.sampled_from(["none", "tis", "mis", "icepop", "kpop", "sequence_tis"]),
    "kl_coef": st.sampled_from([0.0, 0.1]),
    "kl_estimator": st.sampled_from(["k2", "k3", "rk3"]),
    "entropy_coef": st.sampled_from([0.0, 0.02]),
    "observation_coef": st.sampled_from([0.0, 0.1]),
    "gamma": st.sampled_from([1.0, 0.9]),
    "reward_level": st.sampled_from(["outcome", "turn"]),
    "dynamic_sampling": st.booleans(),
    "veto_below": st.sampled_from([0.0, 0.4]),
    "overlong_buffer": st.sampled_from([0, 12]),
    "mask_truncated": st.booleans(),
    "length_coef": st.sampled_from([0.0, 0.3]),
    "entropy_share": st.sampled_from([1.0, 0.2, 0.6]),
}


@st.composite
def specs(draw: st.DrawFn) -> AlgorithmSpec:
    """A recipe, with up to four options of its own; those that make no sense are left out."""
    spec = RECIPES[draw(st.sampled_from(sorted(RECIPES)))].spec
    for name in draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=4, unique=True)):
        value = draw(OPTIONS[name])
        try:
            spec = replace(spec, **{name: value})
        except ValueError:  # it would be ignored, or count twice
            continue
    # Of short rollouts and small groups.
    return replace(spec, overlong_buffer=min(spec.overlong_buffer, 16), pass_k=2)


def groups_of(seed: int) -> list[list[Rollout]]:
    """Two to four prompts, each played two to four times."""
    dice = random.Random(seed)
    groups = []
    for g in range(dice.randint(2, 4)):
        prompt = [dice.randrange(VOCAB) for _ in range(dice.randint(2, 8))]
        groups.append([_rollout(dice, g, m, prompt) for m in range(dice.randint(2, 4))])
    return groups


def guess(salt: str, spread: float = 0.3) -> Callable[[Sequence[Sample]], list[Tensor]]:
    """Somebody's log-probs, which depend on a sample's tokens alone."""

    def score(samples: Sequence[Sample]) -> list[Tensor]:
        found = []
        for sample in samples:
            dice = random.Random(f"{salt} {sample.tokens}")
            values = [-3.5 + dice.gauss(0, spread) for _ in sample.tokens]
            found.append(torch.tensor(values) * torch.tensor(sample.loss_mask))
        return found

    return score


def guess_top(k: int) -> Callable[[Sequence[Sample]], list[TopTokens]]:
    """Somebody's likeliest tokens, which have nine tenths of the probability."""

    def score(samples: Sequence[Sample]) -> list[TopTokens]:
        found = []
        for sample in samples:
            dice = random.Random(f"top {sample.tokens}")
            ids = [dice.sample(range(VOCAB), k) for _ in sample.tokens]
            shares = torch.tensor([[dice.random() + 0.1 for _ in row] for row in ids])
            logps = (0.9 * shares / shares.sum(-1, keepdim=True)).log()
            found.append(TopTokens(torch.tensor(ids), logps))
        return found

    return score


def batch_of(groups: Sequence[Sequence[Rollout]], spec: AlgorithmSpec) -> TrainBatch:
    for group in groups:
        for rollout in group:
            plain = [Sample(tokens=rollout.tokens, loss_mask=rollout.loss_mask)]
            rollout.logps = guess("sampler")(plain)[0].tolist()
    scoring = Scoring(
        old=guess("old", 0.2),
        sharp=guess("sharp") if spec.needs_sharp_logp else None,
        reference=guess("reference") if spec.needs_ref_logp else None,
        teacher=guess("teacher") if spec.loss == "opd" and spec.has_hindsight else None,
        top=guess_top(spec.top_k) if spec.loss == "opd_topk" else None,
        values=guess("critic") if spec.needs_critic else None,
        entropies=guess("entropies") if spec.chooses_by_entropy else None,
    )
    return build_batch(groups, spec, max_tokens=MAX_TOKENS, version=VERSION, scoring=scoring)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("policy"), DENSE)


@cache
def engine_of(folder: Path, budget: int, share_prefix: bool) -> Engine:
    return build_engine(
        folder,
        EngineConfig(dtype="fp32", lr=0.0, micro_batch_tokens=budget, share_prefix=share_prefix),
    )


def gradient(engine: Engine, batch: TrainBatch, hands: Sequence[Sequence[Sample]]) -> Tensor:
    """Of the whole batch, whose samples are dealt to so many hands."""
    engine.optimizer.zero_grad()
    for hand in hands:
        engine.forward_backward(
            hand,
            batch.loss_fn,
            temperature=TEMPERATURE,
            entropy=batch.loss_fn.spec.entropy_coef != 0,
        )
    return torch.cat([grad.flatten().clone() for _, grad in engine.optimizer.entries("grad")])


def padded(sample: Sample, dice: random.Random) -> Sample:
    """With some tokens at its end that nothing counts."""
    more = dice.randint(0, 4)
    return replace(
        sample,
        tokens=[*sample.tokens, *(dice.randrange(VOCAB) for _ in range(more))],
        loss_mask=[*sample.loss_mask, *[0] * more],
        fields={name: [*values, *[0.0] * more] for name, values in sample.fields.items()},
        top=sample.top
        and TopTokens(_longer(sample.top.ids, more), _longer(sample.top.logps, more)),
    )


def _longer(x_TK: Tensor, more: int) -> Tensor:
    return torch.cat([x_TK, x_TK.new_zeros(more, x_TK.shape[1])])


@given(spec=specs(), seed=st.integers(0, 10_000))
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_the_update_does_not_depend_on_how_the_batch_is_split(
    folder: Path, spec: AlgorithmSpec, seed: int
) -> None:
    groups, dice = groups_of(seed), random.Random(seed)
    batch = batch_of(groups, spec)
    if not batch.samples:
        return  # dynamic sampling left nothing
    whole = engine_of(folder, 4096, share_prefix=False)
    expected = gradient(whole, batch, [batch.samples])
    assert expected.isfinite().all()
    shuffled = [dice.sample(group, len(group)) for group in dice.sample(groups, len(groups))]
    other = batch_of(shuffled, spec)
    dealt = deal(batch.samples, Layout(dp=3))
    hands = [[batch.samples[i] for i in part] for part in dealt.parts]
    small = engine_of(folder, 40, share_prefix=False)
    found = {
        "micro-batches": gradient(small, batch, [batch.samples]),
        "shared prefixes": gradient(engine_of(folder, 90, True), batch, [batch.samples]),
        "order": gradient(whole, other, [other.samples]),
        "ranks": gradient(whole, batch, [hand for hand in hands if hand]),
        "padding": gradient(whole, batch, [[padded(one, dice) for one in batch.samples]]),
    }
    scale = max(expected.norm().item(), 1e-3)
    errors = {name: (one - expected).norm().item() / scale for name, one in found.items()}
    assert max(errors.values()) <= MOST_ERROR, (spec, errors)
