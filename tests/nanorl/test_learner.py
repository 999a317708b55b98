"""Which engine learns in which batch, and of which weights the reported numbers are."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_batching import rollout
from torch import Tensor

from kernels.linear_logprob import ChunkLogits
from nanoengine.config import EngineConfig
from nanoengine.engine import NonFiniteLoss
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.packing import Sample, make_micro_batches
from nanoengine.state.whole_engine import Engine
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.learner import Learner
from nanorl.options.phase_config import RLConfig
from nanorl.options.run_config import RunConfig
from nanorl.policy_loss import PolicyLoss
from nanorl.scorers.scored_learner import ScoredLearner
from nanorl.scorers.scored_learner import make_learner as made
from nanorl.types import TurnSpan


class CountingEngine:
    """Stands for an Engine: log-probs are -0.5, as the rollouts say, less 1 an update."""

    def __init__(self) -> None:
        self.num_updates = 0
        self.last_logps: list[Tensor] = []
        self.last_entropies: list[Tensor] = []
        self.foreseen: list[bool] = []  # of each update

    def forward_logprobs(self, samples: Sequence[Sample], **_: Any) -> list[Tensor]:
        return [torch.full((len(s.tokens),), -0.5 - self.num_updates) for s in samples]

    def train_step(
        self, samples: Sequence[Sample], loss_fn: PolicyLoss, **_: Any
    ) -> dict[str, float]:
        (micro,) = make_micro_batches(samples, 1000)
        told = loss_fn.foreseen_logp(micro)
        self.foreseen.append(told is not None)
        if told is not None:
            assert torch.equal(told, micro.loss_mask_T * -0.5)
        self.last_logps = self.forward_logprobs(samples)
        self.num_updates += 1
        return {"loss": float(self.num_updates)}


class CountingCritic:
    """Stands for a Critic whose values are all 0."""

    def __init__(self) -> None:
        self.num_updates = self.num_asked = 0

    def values(self, samples: Sequence[Sample]) -> list[Tensor]:
        self.num_asked += 1
        return [torch.zeros(len(sample.tokens)) for sample in samples]

    def train_step(self, samples: Sequence[Sample]) -> dict[str, float]:
        self.num_updates += 1
        return {}


class CountingReference:
    """Stands for a Policy whose log-probs follow from the tokens."""

    def __init__(self) -> None:
        self.num_asked = 0

    def forward_logprobs(self, samples: Sequence[Sample], **_: Any) -> list[Tensor]:
        self.num_asked += 1
        return [-torch.tensor(sample.tokens, dtype=torch.float32) / 10 for sample in samples]


class DeafPublisher:
    """Stands for engines that take weights."""

    async def publish(self, version: int) -> float:
        return 0.0


def make_learner(
    critic: CountingCritic | None = None,
    reference: CountingReference | None = None,
    scaffold: Any = None,
    **options: Any,
) -> Learner:
    doubles: dict[str, Any] = {
        "engine": CountingEngine(),
        "publisher": DeafPublisher(),
        "critic": critic,
        "reference": reference,
        "scaffold": scaffold,
        "thread": None,
    }
    return made(RunConfig(rl=RLConfig(**options)), **doubles)


def learn(learner: Learner, num_batches: int) -> list[dict[str, Any]]:
    """The metrics of each batch, each of two rollouts with a signal by the present policy."""

    async def run() -> list[dict[str, Any]]:
        metrics = []
        for version in range(num_batches):
            group = [rollout("a", member, float(member)) for member in range(2)]
            for one in group:
                one.versions[-2:] = [version, version]
            metrics.append(learner.train_on([group]))
            await learner.publish(version + 1)
        return metrics

    return asyncio.run(run())


def test_the_policy_waits_for_as_many_batches_as_the_critic_warms_up() -> None:
    critic = CountingCritic()
    learner = make_learner(critic, algorithm=AlgorithmSpec(advantage="gae"), critic_warmup_steps=2)
    metrics = learn(learner, 3)
    assert ["loss" in batch for batch in metrics] == [False, False, True]
    assert learner.engine.num_updates == 1  # type: ignore[attr-defined]
    assert critic.num_updates == 3


def test_the_gap_is_measured_before_the_first_of_several_updates() -> None:
    """Of the second batch: the engine's log-probs have moved by 2, and move by 1 more within it."""
    metrics = learn(make_learner(epochs=2), 2)
    assert [batch["loss"] for batch in metrics] == [2.0, 4.0]
    assert [batch["logp_gap_max"] for batch in metrics] == pytest.approx([0.0, 2.0])


@pytest.mark.parametrize(
    ("options", "foreseen"),
    [
        ({}, [True, True]),
        ({"epochs": 2}, [True, False, True, False]),
        ({"max_staleness": 1, "algorithm": AlgorithmSpec(correction="tis")}, [False, False]),
    ],
)
def test_only_a_step_by_the_policy_that_sampled_expects_the_log_probs_of_the_rollouts(
    options: dict[str, Any], foreseen: list[bool]
) -> None:
    learner = make_learner(**options)
    learn(learner, 2)
    assert learner.engine.foreseen == foreseen  # type: ignore[attr-defined]


def test_what_a_batch_says_about_its_tokens_is_kept_by_rollout() -> None:
    """By hand: two rewards, 0 and 1, are one below and one above their mean; log-probs are -0.5."""
    learner = make_learner()
    learn(learner, 1)
    stats = learner.take_token_stats()
    first, second = (stats[name].values for name in sorted(stats))
    masks = [rollout("a", member, 0.0).loss_mask for member in range(2)]
    signs = [
        [(value > 0) - (value < 0) for value in one["advantage"][0]] for one in (first, second)
    ]
    assert signs == [[-m for m in masks[0]], masks[1]]
    assert first["trained_logp"] == [[-0.5 * m for m in masks[0]]]
    assert "entropy" not in first and learner.take_token_stats() == {}


@pytest.mark.parametrize(("shift", "products"), [(0.0, 1), (0.25, 2)])
def test_a_step_on_its_own_rollouts_multiplies_by_the_head_once(
    shift: float, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the rollouts say something else than the policy, the loss weighs tokens by how much,
    and a second product corrects the gradient."""
    shape = ModelConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = Transformer(shape)
    model.init_weights(seed=0, std=0.1)
    learner = make_learner(algorithm=AlgorithmSpec(correction="tis"))
    learner.engine = engine = Engine(model, EngineConfig(dtype="fp32", max_grad_norm=0.0))
    group = [rollout("a", 0, 1.0), rollout("a", 1, 0.0)]
    for one in group:
        sample = Sample(tokens=one.tokens, loss_mask=one.loss_mask)
        (logps,) = engine.forward_logprobs([sample], temperature=learner.plan.temperature)
        one.logps = [p * m + shift * m for p, m in zip(logps.tolist(), one.loss_mask, strict=True)]
    rows: list[int] = []
    multiply = ChunkLogits.multiply
    monkeypatch.setattr(
        ChunkLogits, "multiply", lambda chunks, h: (rows.append(len(h)), multiply(chunks, h))[1]
    )
    learner.train_on([group])
    assert rows == [4] * products  # two tokens of each rollout


def test_a_policy_that_is_damaged_stops_before_the_update_and_the_rollout_is_named() -> None:
    """Token 12 has an embedding of NaN; the second rollout has read it."""
    shape = ModelConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = Transformer(shape)
    model.init_weights(seed=0, std=0.1)
    engine = Engine(model, EngineConfig(dtype="fp32"))
    state = {name: value.clone() for name, value in engine.export_state()}
    with torch.no_grad():  # a folder with a NaN is not even loaded
        model.embedding[12] = math.nan
    learner = make_learner()
    learner.engine = engine
    good, bad = rollout("a", 0, 1.0), rollout("a", 1, 0.0)
    bad.tokens[-2:] = [12, 13]
    with pytest.raises(NonFiniteLoss, match=r"rollout a-1: the trained policy .* untouched"):
        learner.train_on([[good, bad]])
    assert engine.version == 0
    for name, value in engine.export_state():
        assert torch.equal(value, state[name]) or name == "model.embed_tokens.weight", name


def test_a_group_is_scored_before_its_batch_and_not_again() -> None:
    """The reference's word stands; that of a critic only until it has learnt."""
    critic, reference = CountingCritic(), CountingReference()
    spec = AlgorithmSpec(advantage="gae", kl_coef=0.1)
    learner = make_learner(critic, reference=reference, algorithm=spec)
    groups = [[rollout(name, member, float(member)) for member in range(2)] for name in "ab"]
    assert isinstance(learner, ScoredLearner)
    scores = [learner.scored(group) for group in groups]
    assert (critic.num_asked, reference.num_asked) == (2, 2)
    learner.prepare(scores)
    first = learner.train_on(groups)
    assert (critic.num_asked, reference.num_asked) == (2, 2)
    again = make_learner(CountingCritic(), reference=CountingReference(), algorithm=spec)
    without = again.train_on(groups)
    del first["train_s"], without["train_s"]
    assert first == without
    learner.prepare(scores)
    learner.train_on(groups)  # the critic has learnt
    assert (critic.num_asked, reference.num_asked) == (3, 2)
    learner.prepare([scores[0], None])
    learner.train_on(groups)  # one group was not scored: the batch is
    assert (critic.num_asked, reference.num_asked) == (4, 3)


class LastToken:
    """Stands for a Scaffold after which only the last token of an observation was said."""

    def said(self, tokens: Sequence[int]) -> list[int]:
        return [int(place == len(tokens) - 1) for place in range(len(tokens))]


def test_a_learner_trains_on_what_its_scaffold_says_was_observed() -> None:
    one = rollout("a", 0, 1.0, actions=5)
    one.loss_mask[4:7] = [0, 0, 0]  # a token, three that answer it, a token
    one.turn_spans = [
        TurnSpan(action_start=3, action_end=4, observation_end=7),
        TurnSpan(action_start=7, action_end=8, observation_end=8),
    ]
    spec = AlgorithmSpec(observation_coef=0.1)
    learner = make_learner(algorithm=spec, scaffold=LastToken(), max_staleness=1)
    metrics = learner.train_on([[one, rollout("a", 1, 0.0)]])
    assert metrics["observed_tokens"] == 1
    with pytest.raises(AssertionError, match="ECHO would learn the chat template"):
        make_learner(algorithm=spec)
