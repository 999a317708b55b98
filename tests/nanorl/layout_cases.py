"""Stored rollouts, the specs whose losses read more than one token, and what the ranks do with
them in test_layouts.py.

Every engine has a learning rate of 0, so that all specs meet the same weights. Planted bugs are
patches that a rank applies to itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from parallel_cases import Result, owned
from pool import Rank
from tiny_shapes import DENSE, MOE, VOCAB
from torch import Tensor

from nanoengine.build import build_engine, build_value_engine
from nanoengine.config import EngineConfig
from nanoengine.engine import LossFn
from nanoengine.formats.hf import save_model
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample, TopTokens
from nanoengine.parallel.dealing import Deal, deal
from nanoengine.parallel.layout import DATA_AXES, Layout, SplitConfig
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.ranks import Ranks
from nanoengine.state.whole_engine import Engine
from nanorl.algorithms import corrections, losses
from nanorl.algorithms.batch_scoring import Scoring
from nanorl.algorithms.losses import value_loss
from nanorl.algorithms.recipes import RECIPES
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import TrainBatch, build_batch
from nanorl.grpo import Field
from nanorl.types import Rollout, Status, TurnSpan

VERSION = 4
MAX_TOKENS = 36
TEMPERATURE = 0.7
SHAPES = {"dense": DENSE, "moe": MOE}

SPECS: Mapping[str, AlgorithmSpec] = {
    "grpo": replace(RECIPES["grpo"].spec, kl_coef=0.1, entropy_coef=0.01),
    "gspo": replace(RECIPES["gspo"].spec, clip_low=0.03, clip_high=0.03, correction="none"),
    "sequence_tis": AlgorithmSpec(
        advantage="rloo",
        loss="reinforce",
        correction="sequence_tis",
        correction_cap=1.2,
        aggregation="seq_mean_token_sum",
    ),
    "geometric": AlgorithmSpec(
        loss="sapo",
        correction="geometric",
        correction_low=0.95,
        correction_high=1.05,
        aggregation="prompt_mean",
        kl_coef=0.1,
        kl_estimator="rk3",
    ),
    "veto": AlgorithmSpec(
        advantage="dr_grpo",
        loss="cispo",
        correction="mis",
        correction_cap=1.3,
        veto_below=0.49,
        aggregation="constant",
        constant_length=32,
    ),
    "icepop": replace(
        RECIPES["reinforce_pp"].spec,
        correction="icepop",
        correction_low=0.8,
        correction_high=1.3,
        gamma=0.9,
    ),
    "decoupled": AlgorithmSpec(advantage="maxrl", loss="decoupled_ppo", distill_coef=0.1),
    "opd": replace(RECIPES["opd"].spec, distill_trust_region=1e-2),
    "opd_topk": replace(RECIPES["opd_topk"].spec, top_k=3, correction="tis"),
    "sdft": replace(RECIPES["sdft"].spec, kl_coef=0.1),
    "sdpo": replace(RECIPES["sdpo"].spec, top_k=4, distill_kl="forward"),
    "dapo": replace(RECIPES["dapo"].spec, overlong_buffer=16),
    "rollout": AlgorithmSpec(advantage="reinforce_pp_baseline", old_policy="rollout"),
    "kl_cov": AlgorithmSpec(
        advantage="opo", loss="kl_cov", covariance_share=0.2, correction="kpop", correction_kl=3e-4
    ),
    "clip_cov": AlgorithmSpec(
        advantage="gdpo",
        reward_parts=("right", "short=-0.1"),
        loss="clip_cov",
        covariance_share=0.2,
        covariance_low=0.01,
    ),
    "gmpo": replace(
        RECIPES["gmpo"].spec, advantage="pass_at_k", pass_k=2, clip_low=0.05, clip_high=0.05
    ),
    "entropy": AlgorithmSpec(entropy_share=0.2, length_coef=0.2, mask_truncated=True),
    "otb": AlgorithmSpec(advantage="otb", loss="reinforce", kl_reward_coef=0.05),
    "echo": AlgorithmSpec(observation_coef=0.3, aggregation="seq_mean_token_mean"),
    "dppo_kl": replace(RECIPES["dppo_kl"].spec, clip_low=1e-3, clip_high=1e-3),
    "dppo_tv": replace(RECIPES["dppo_tv"].spec, clip_low=1e-2, clip_high=1e-2),
    "turns": AlgorithmSpec(reward_level="turn", gamma=0.9, correction="tis"),
    "hgpo": RECIPES["hgpo"].spec,
    "turn_batch": AlgorithmSpec(advantage="dr_grpo", reward_level="turn", turn_peers="batch"),
    "ppo": AlgorithmSpec(advantage="gae", gamma=0.95, aggregation="seq_mean_token_mean"),
    "turn_gae": AlgorithmSpec(advantage="gae", reward_level="turn", kl_reward_coef=0.05),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An engine: its layout and what may differ beside it."""

    layout: Layout = field(default_factory=Layout)
    zero: int = 0
    model: str = "dense"
    dtype: str = "fp64"
    share_prefix: bool = False
    budget: int = 120
    split: SplitConfig = field(default_factory=SplitConfig)
    bug: str = ""

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(
            dtype=self.dtype,  # type: ignore[arg-type]
            lr=0.0,
            max_grad_norm=0.0,
            micro_batch_tokens=self.budget,
            zero=self.zero,
            share_prefix=self.share_prefix,
            bucket_bytes=5_000,
        )


@dataclass(frozen=True)
class Step:
    """What the driver tells the ranks of one step."""

    samples: list[Sample]
    loss_fn: LossFn
    has_entropy: bool


def write_model(folder: Path, shape: ModelConfig, seed: int = 0) -> Path:
    """Random in every parameter, norms too."""
    model = Transformer(shape)
    model.init_weights(seed=seed, std=0.15)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    save_model(model, folder)
    return folder


# -- stored rollouts -----------------------------------------------------------------------------


def stored_groups() -> list[list[Rollout]]:
    """Four prompts, played three to four times in one to three turns, by policies up to two
    versions old; rewards differ in most groups. One rollout has no action token."""
    dice = random.Random(7)
    groups = []
    for g, num_members in enumerate((4, 3, 4, 3)):
        prompt = [dice.randrange(VOCAB) for _ in range(dice.randint(3, 9))]
        groups.append([_rollout(dice, g, m, prompt) for m in range(num_members)])
    silent = groups[1][2]
    count = len(silent.tokens)
    groups[1][2] = replace(
        silent,
        loss_mask=[0] * count,
        logps=[0.0] * count,
        versions=[-1] * count,
        turn_spans=[],
        turn_rewards=[],
    )
    return groups


def _rollout(dice: random.Random, group: int, member: int, prompt: list[int]) -> Rollout:
    tokens, mask = list(prompt), [0] * len(prompt)
    versions, spans = [-1] * len(prompt), []
    version = VERSION - dice.randint(0, 2)
    for _ in range(dice.randint(1, 3)):
        begin, num_actions, num_observed = len(tokens), dice.randint(1, 9), dice.randint(0, 3)
        spans.append(
            TurnSpan(
                action_start=begin,
                action_end=begin + num_actions,
                observation_end=begin + num_actions + num_observed,
            )
        )
        tokens += [dice.randrange(VOCAB) for _ in range(num_actions + num_observed)]
        mask += [1] * num_actions + [0] * num_observed
        version = min(VERSION, version + dice.randint(0, 1))
        versions += [version] * num_actions + [-1] * num_observed
    rewards = (1.0, 0.0, 1.0, 0.25) if group != 2 else (1.0, 1.0, 0.0, 0.0)
    return Rollout(
        task_id=f"t{group}",
        group_id=f"g{group}",
        rollout_id=f"g{group}-m{member}",
        tokens=tokens,
        loss_mask=mask,
        logps=[0.0] * len(tokens),
        versions=versions,
        turn_spans=spans,
        reward=rewards[member],
        status=Status.TRUNCATED_CONTEXT if member == 2 else Status.FINISHED,
        turn_rewards=[round(dice.random(), 2) for _ in spans],
        metrics={"reward/right": rewards[member], "reward/short": float(len(tokens))},
        hindsight=[*prompt, member + 1, member] if member else [],
    )


def noisy(logps: Sequence[Tensor], mask: Sequence[Sequence[int]], seed: int) -> list[list[float]]:
    """Log-probs of a policy near by: a shift for each sequence and noise for each token."""
    dice = random.Random(seed)
    found = []
    for values, is_action in zip(logps, mask, strict=True):
        shift = dice.gauss(0, 0.05)
        found.append(
            [
                float(v) + shift + dice.gauss(0, 0.2) if m else 0.0
                for v, m in zip(values.tolist(), is_action, strict=True)
            ]
        )
    return found


def make_batches(folder: Path, reference: Path) -> dict[str, TrainBatch]:
    """The batch of each spec, from the same stored rollouts; the old policy is near the one that
    trains, and the sampling policies near the old one, so that clips and rejections act."""
    policy, teacher = build_engine(folder, EngineConfig()), build_engine(reference, EngineConfig())
    critic = build_value_engine(folder, EngineConfig())
    with torch.no_grad():
        critic.model.value_head.normal_(0, 0.2, generator=torch.Generator().manual_seed(3))  # type: ignore[operator, union-attr]
    groups = stored_groups()
    rollouts = [rollout for group in groups for rollout in group]
    plain = [Sample(tokens=r.tokens, loss_mask=r.loss_mask) for r in rollouts]
    masks = [r.loss_mask for r in rollouts]
    now = policy.forward_logprobs(plain, temperature=TEMPERATURE)
    old = noisy(now, masks, 1)
    before = noisy([torch.tensor(values) for values in old], masks, 2)
    for rollout, logps in zip(rollouts, before, strict=True):
        rollout.logps = logps
    place = {tuple(r.tokens): i for i, r in enumerate(rollouts)}

    def score_old(samples: Sequence[Sample]) -> list[Tensor]:
        return [torch.tensor(old[place[tuple(sample.tokens)]]) for sample in samples]

    def score_sharp(samples: Sequence[Sample]) -> list[Tensor]:
        return policy.forward_logprobs(samples, temperature=TEMPERATURE / 2, only_masked=True)

    def score_reference(samples: Sequence[Sample]) -> list[Tensor]:
        return teacher.forward_logprobs(samples, temperature=TEMPERATURE, only_masked=True)

    def score_hindsight(samples: Sequence[Sample]) -> list[Tensor]:
        return policy.forward_logprobs(samples, temperature=TEMPERATURE, only_masked=True)

    batches = {}
    for name, spec in SPECS.items():
        scoring = Scoring(
            old=score_old,
            sharp=score_sharp if spec.needs_sharp_logp else None,
            reference=score_reference if spec.needs_ref_logp else None,
            teacher=score_hindsight if spec.loss == "opd" and spec.has_hindsight else None,
            top=partial(teacher.forward_top, k=spec.top_k, temperature=TEMPERATURE)
            if spec.loss == "opd_topk"
            else None,
            values=critic.forward_values if spec.needs_critic else None,
            entropies=partial(policy.forward_entropies, temperature=TEMPERATURE)
            if spec.chooses_by_entropy
            else None,
        )
        batches[name] = build_batch(
            groups, spec, max_tokens=MAX_TOKENS, version=VERSION, scoring=scoring
        )
    return batches


def make_steps(batches: Mapping[str, TrainBatch]) -> dict[str, Step]:
    """Of every spec; one of a first step, where nobody has the old policy's log-probs; and one of a
    single sample, which leaves data ranks without any."""
    steps = {
        name: Step(batch.samples, batch.loss_fn, SPECS[name].entropy_coef != 0)
        for name, batch in batches.items()
    }
    first = [
        replace(s, fields={n: v for n, v in s.fields.items() if n != Field.OLD_LOGP})
        for s in steps["sequence_tis"].samples
    ]
    steps["first_epoch"] = replace(steps["sequence_tis"], samples=first)
    steps["one_sample"] = replace(steps["gspo"], samples=steps["gspo"].samples[:1])
    return steps


@dataclass(frozen=True)
class ValueLoss:
    """The critic's callback."""

    def __call__(
        self, value_T: Tensor, _: Tensor | None, micro: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        fields = micro.fields_T
        loss_T = value_loss(value_T, fields[Field.VALUE], fields[Field.RETURN], clip=0.2)
        return (fields[Field.WEIGHT] * loss_T).sum(), {}


# -- what a rank does ----------------------------------------------------------------------------


def take_steps(
    folder: Path, setting: Setting, steps: Mapping[str, Step], mesh: Mesh | None = None
) -> dict[str, Result]:
    """Of each step what this rank owns of the gradient, what it tells, and its log-probs by the
    sample's index."""
    with planted(setting.bug):
        engine = build_engine(folder, setting.config, mesh, setting.split)
        return {name: _take(engine, setting, step) for name, step in steps.items()}


def _take(engine: Engine, setting: Setting, step: Step) -> Result:
    mesh = engine.mesh
    dealt = deal(step.samples, setting.layout, share_prefix=setting.share_prefix)
    loss_fn: Any = step.loss_fn
    if setting.bug == "mean of means":
        loss_fn = _MeanOfHand(step, dealt, mesh)
    told = engine.train_step(
        dealt.hand(step.samples, mesh.rank()),
        loss_fn,
        temperature=TEMPERATURE,
        entropy=step.has_entropy,
    )
    mine = dealt.parts[mesh.rank(DATA_AXES)]
    logps = dict(zip(mine, engine.last_logps, strict=True))
    return Result([told], list(owned(engine)), logps, {}, 0)


Job = tuple[Path, Setting, Mapping[str, Step]]


def on_rank(rank: Rank, jobs: Sequence[Job]) -> list[dict[str, Result]]:
    return [
        take_steps(folder, setting, steps, rank.mesh(setting.layout))
        for folder, setting, steps in jobs
    ]


def scores_on_rank(
    rank: Rank, folder: Path, setting: Setting, samples: list[Sample]
) -> list[Tensor]:
    """Log-probs of this rank's hand."""
    engine = build_engine(folder, setting.config, rank.mesh(setting.layout), setting.split)
    hand = deal(samples, setting.layout).hand(samples, rank.rank)
    return engine.forward_logprobs(hand, temperature=TEMPERATURE, only_masked=True)


def entropies_on_rank(
    rank: Rank, folder: Path, setting: Setting, samples: list[Sample]
) -> list[Tensor]:
    """Entropies of this rank's hand."""
    engine = build_engine(folder, setting.config, rank.mesh(setting.layout), setting.split)
    hand = deal(samples, setting.layout).hand(samples, rank.rank)
    return engine.forward_entropies(hand, temperature=TEMPERATURE)


def tops_on_rank(
    rank: Rank, folder: Path, setting: Setting, samples: list[Sample], k: int
) -> list[TopTokens]:
    """The likeliest tokens of this rank's hand."""
    engine = build_engine(folder, setting.config, rank.mesh(setting.layout), setting.split)
    hand = deal(samples, setting.layout).hand(samples, rank.rank)
    return engine.forward_top(hand, k, temperature=TEMPERATURE)


def critic_on_rank(
    rank: Rank, folder: Path, setting: Setting, samples: list[Sample]
) -> tuple[list[Tensor], Result]:
    """Values of this rank's hand before a step towards the returns, and the step."""
    return critic_step(folder, setting, samples, rank.mesh(setting.layout))


def critic_step(
    folder: Path, setting: Setting, samples: list[Sample], mesh: Mesh | None = None
) -> tuple[list[Tensor], Result]:
    """The critic's own steps: one that leaves its first weights, whose values are all 0."""
    engine = build_value_engine(folder, replace(setting.config, lr=1e-2, eps=1e-4), mesh)
    dealt = deal(samples, setting.layout)
    hand = dealt.hand(samples, engine.mesh.rank())
    engine.train_step(hand, ValueLoss())
    values = engine.forward_values(hand)
    told = engine.train_step(hand, ValueLoss())
    return values, Result([told], list(owned(engine)), {}, {}, 0)


# -- bugs planted on purpose ---------------------------------------------------------------------


class _MeanOfHand:
    """Weights that add up to one on every rank, which is what each would get from its own hand."""

    def __init__(self, step: Step, dealt: Deal, mesh: Mesh) -> None:
        hand = dealt.hand(step.samples, mesh.rank())
        weights = [sum(sum(s.fields[Field.WEIGHT]) for s in part) for part in (step.samples, hand)]
        self._loss_fn = step.loss_fn
        self._factor = weights[0] / max(weights[1], 1e-9) / mesh.size(DATA_AXES)

    def __call__(self, *args: Any) -> Any:
        loss, sums = self._loss_fn(*args)
        return loss * self._factor, sums


def _half_mean(value_T: Tensor, mask_T: Tensor, ids_T: Tensor, count: int) -> Tensor:
    """Of the tokens that a rank of a ring of two might have."""
    is_mine_T = torch.arange(len(value_T)) % 4 < 2
    return _segment_mean(value_T, mask_T * is_mine_T, ids_T, count)


_segment_mean = losses.segment_mean


@contextmanager
def _with_half_means() -> Iterator[None]:
    with (
        mock.patch.object(losses, "segment_mean", _half_mean),
        mock.patch.object(corrections, "segment_mean", _half_mean),
    ):
        yield


@contextmanager
def planted(bug: str) -> Iterator[None]:
    patches = {
        "a ratio over a part of the sequence": _with_half_means,
        "statistics of one rank": lambda: mock.patch.object(
            Ranks, "summed", lambda self, loss, stats: (loss, stats)
        ),
    }
    if bug in patches:
        with patches[bug]():
            yield
    else:
        yield


def is_close(found: float, true: float, limit: float) -> bool:
    return math.isclose(found, true, rel_tol=limit, abs_tol=limit)
