"""The learner role: groups of rollouts become optimizer steps, and its weights the engine's.

`Learner` is an actor of the trainer (nanosched) in the driver's process: its calls run one after
another, the heavy part in the compute thread that it is given, so that rollouts may go on
meanwhile. Its engine, critic and reference are objects of this process, or stand for ranks in
others (roles/). In this file, after it:

    Publisher        takes the weights to whoever samples with them
    load_reference   the policy that KL terms and distillation compare with: another model of the
                     same vocabulary (a teacher, or several: references.py), or the policy as RL
                     began. The latter is written
                     into the run's folder, because a resumed run must compare with the same weights
    Critic           the values that PPO's advantages read, and its own regression to the returns

Left out: which groups make a batch (trainer.py), the loss (batching.py, algorithms/losses.py), and
transports of weights to other processes and machines (weights/).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoengine.config import DTYPES, EngineConfig
from nanoengine.engine import LossFn, WeightFn
from nanoengine.model.config import ModelConfig
from nanoengine.model.hf import load_model
from nanoengine.model.sources import resolve_model
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample, TopTokens
from nanoengine.scoring import Policy, Scorer
from nanoengine.value_engine import ValueEngine, ValueModel
from nanorl.algorithms.fields import Field
from nanorl.algorithms.losses import value_loss
from nanorl.batching import (
    Scoring,
    TrainBatch,
    action_mask,
    build_batch,
    logp_gap,
    per_action_token,
    with_field,
)
from nanorl.config import RunConfig
from nanorl.references import References, parse_references
from nanorl.types import Rollout, TokenStats

Groups = Sequence[Sequence[Rollout]]


class TrainingEngine(Protocol):
    """An `Engine`, or what stands for the ranks of one in other processes."""

    last_logps: list[Tensor]
    last_entropies: list[Tensor]

    def train_step(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        weight_fn: WeightFn | None = None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> dict[str, float]: ...

    def forward_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]: ...

    def forward_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]: ...


class ValueEstimator(Protocol):
    """A `Critic`, or what stands for one in another process."""

    def values(self, samples: Sequence[Sample]) -> list[Tensor]: ...

    def train_step(self, samples: Sequence[Sample]) -> dict[str, float]: ...


class Publisher(Protocol):
    """The way from the trainer's weights to the engines that sample with them."""

    async def publish(self, version: int) -> float:
        """Hand them over as policy `version`; returns seconds. An engine that refuses them goes on
        with its old version."""
        ...

    def lent(self) -> AbstractAsyncContextManager[None]:
        """Inside, the trainer may use the devices that it shares with those engines."""
        ...


class Learner:
    """Owns the training engine during the RL phase, and the reference and the critic where the
    algorithm has them."""

    def __init__(
        self,
        config: RunConfig,
        *,
        engine: TrainingEngine,
        publisher: Publisher,
        thread: Executor,
        reference: Policy | None = None,
        critic: ValueEstimator | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.reference = reference
        self.critic = critic
        self.publisher = publisher
        self.thread = thread
        self.version = 0
        self._stats: dict[str, TokenStats] = {}

    async def publish(self, version: int) -> float:
        """Hand the weights to the inference engines as policy `version`; returns seconds. The
        version counts optimizer batches, also those that gave no update."""
        self.version = version
        return await self.publisher.publish(version)

    async def train_and_publish(self, groups: Groups, version: int) -> dict[str, Any]:
        """One optimizer batch, then its weights as policy `version`; the metrics of both."""
        loop = asyncio.get_running_loop()
        async with self.publisher.lent():
            metrics = await loop.run_in_executor(self.thread, self.train_on, groups)
        metrics["sync_s"] = await self.publish(version)
        return metrics

    def take_token_stats(self) -> dict[str, TokenStats]:
        """What the last batch said about the tokens of its rollouts, by their ids."""
        stats, self._stats = self._stats, {}
        return stats

    def train_on(self, groups: Groups) -> dict[str, Any]:
        """One optimizer batch (`rl.epochs` steps over it); returns the metrics of the batch."""
        rl = self.config.rl
        start = time.perf_counter()
        batch = build_batch(
            groups,
            rl.algorithm,
            max_tokens=self.config.agent.max_context_tokens,
            version=self.version,
            scoring=self._scoring(),
        )
        metrics: dict[str, Any] = dict(batch.metrics)
        self._stats = batch.stats
        if batch.samples and not self._only_critic_learns():
            metrics.update(self._train_policy(batch))
        elif batch.probe:  # a batch without signal still says whether the engines agree
            logps = self.engine.forward_logprobs(batch.probe, temperature=rl.temperature)
            metrics.update(logp_gap(batch.probe, logps))
        if batch.critic_samples:
            metrics.update(self._train_critic(batch))
        metrics["train_s"] = time.perf_counter() - start
        if self.config.deterministic and metrics.get("logp_gap_max", 0.0) != 0.0:
            raise RuntimeError(
                f"--deterministic: rollout and training log-probs differ by "
                f"{metrics['logp_gap_max']:.3g} nats; they must be equal bit for bit. "
                "This is a defect of the engines on this machine, not of your task: please "
                "report it"
            )
        return metrics

    def _scoring(self) -> Scoring:
        """Rollouts of the present policy bring its log-probs with them; stale ones do not."""
        rl = self.config.rl
        spec = rl.algorithm
        is_exact = rl.max_staleness == 0 and self.config.engine.quantization == "none"
        is_old = spec.needs_old_logp and spec.old_policy == "recomputed" and not is_exact
        temperature = rl.temperature
        return Scoring(
            old=partial(self.engine.forward_logprobs, temperature=temperature) if is_old else None,
            sharp=partial(self.engine.forward_logprobs, temperature=temperature / 2)
            if spec.needs_sharp_logp
            else None,
            reference=partial(self.reference.forward_logprobs, temperature=temperature)
            if self.reference is not None and spec.needs_ref_logp
            else None,
            teacher=partial(self._teacher().forward_logprobs, temperature=temperature)
            if spec.loss == "opd" and spec.has_hindsight
            else None,
            top=partial(self._teacher().forward_top, k=spec.top_k, temperature=temperature)
            if spec.loss == "opd_topk"
            else None,
            values=None if self.critic is None else self.critic.values,
        )

    def _teacher(self) -> Policy:
        """Whose opinion a distillation asks for: the policy's own where hindsight is all that it
        has more."""
        spec = self.config.rl.algorithm
        if spec.has_hindsight and spec.hindsight_teacher == "policy":
            return self.engine
        assert self.reference is not None, "the algorithm needs one, so the run has opened it"
        return self.reference

    def _only_critic_learns(self) -> bool:
        return self.version < self.config.rl.critic_warmup_steps

    def _train_policy(self, batch: TrainBatch) -> dict[str, Any]:
        rl = self.config.rl
        metrics: dict[str, Any] = {}
        samples = batch.samples
        for epoch in range(rl.epochs):
            result = self.engine.train_step(
                samples,
                batch.loss_fn,
                temperature=rl.temperature,
                entropy=rl.algorithm.entropy_coef != 0 or rl.keep_entropies,
            )
            metrics.update(per_action_token(result))
            if epoch == 0:
                metrics.update(logp_gap(samples, self.engine.last_logps))
                self._note_tokens(batch, "trained_logp", self.engine.last_logps)
                self._note_tokens(batch, "entropy", self.engine.last_entropies)
            if epoch == 0 and rl.epochs > 1:
                # The policy before the first update: what the ratios of later epochs are against.
                samples = with_field(samples, Field.OLD_LOGP, self.engine.last_logps)
        return metrics

    def _note_tokens(self, batch: TrainBatch, name: str, values: Sequence[Tensor]) -> None:
        """Numbers of the trained samples; the other sequences of their rollouts have none."""
        parts = zip(batch.places, batch.samples, values, strict=False)
        for (rollout_id, sequence), sample, value_T in parts:
            of_rollout = batch.stats[rollout_id].values
            shape = of_rollout["advantage"]
            nothing = [[math.nan] * len(one) for one in shape]
            is_action = torch.tensor(action_mask(sample), dtype=torch.bool)
            own_T = torch.where(is_action, value_T.cpu(), 0.0)
            of_rollout.setdefault(name, nothing)[sequence] = own_T.tolist()

    def _train_critic(self, batch: TrainBatch) -> dict[str, float]:
        assert self.critic is not None, "it gave the values of these samples"
        metrics = {"explained_variance": explained_variance(batch.critic_samples)}
        for _ in range(self.config.rl.epochs):
            metrics |= self.critic.train_step(batch.critic_samples)
        return metrics


def check_reference(config: RunConfig, vocab_size: int) -> None:
    """`ValueError` unless the models of `rl.reference`, where any are given, have the same
    vocabulary."""
    for one in parse_references(config.rl.reference):
        found = ModelConfig.from_folder(_resolve(one.name, config)).vocab_size
        if found != vocab_size:
            raise ValueError(
                f"--rl.reference {one.name}: its vocabulary of {found} is not the policy's "
                f"{vocab_size}; choose a model with the same tokenizer"
            )


def _resolve(name: str, config: RunConfig) -> Path:
    try:
        return resolve_model(name, config.cache_dir)
    except ValueError as error:
        raise ValueError(f"--rl.reference {name}: {error}") from error


def reference_folders(
    config: RunConfig, own: Path, *, has_begun: bool, write_policy: Callable[[Path], None]
) -> list[Path]:
    """The Hugging Face folders of the reference, one for each entry of `rl.reference`, or `own`,
    where a run keeps the policy as RL began.

    `write_policy` writes the policy as it is now, which is that one unless RL steps were taken
    (`has_begun`). `ValueError` if the run's own is missing.
    """
    if config.rl.reference:
        return [_resolve(one.name, config) for one in parse_references(config.rl.reference)]
    if not own.is_dir():
        if has_begun:
            raise ValueError(
                f"{own} is missing: it holds the policy as RL began, which this run "
                "compares with; put it back, or start another run"
            )
        write_policy(own)
    return [own]


def load_reference(config: RunConfig, folders: Sequence[Path], device: torch.device) -> Policy:
    """The reference, frozen, in the run's dtype: the model of the one folder, or those of
    `rl.reference` together."""
    scorers = [_load_scorer(config, folder, device) for folder in folders]
    if len(scorers) == 1:
        return scorers[0]
    return References(parse_references(config.rl.reference), scorers)


def _load_scorer(config: RunConfig, folder: Path, device: torch.device) -> Scorer:
    model = load_model(folder, DTYPES[config.dtype], str(device))
    model.batch_invariant = config.deterministic  # as the policy's: a KL to its copy starts at 0
    limits = config.engine
    if limits.lm_head_fp32:
        model.head_dtype = torch.float32
        model.repack()
    return Scorer(
        model.requires_grad_(False),
        micro_batch_tokens=limits.micro_batch_tokens,
        share_prefix=limits.share_prefix,
    )


class Critic:
    """Owns the value engine. The samples that it learns from carry `Field.VALUE` (before the
    update), `Field.RETURN` and `Field.WEIGHT`.

    It starts as a copy of the policy at the beginning of RL with a value head of zeros, so the
    first advantages are plain discounted rewards. Schulman et al., "Proximal Policy Optimization
    Algorithms", arXiv 1707.06347 (clipped value loss as in its reference implementation).
    """

    def __init__(self, policy: Transformer, config: EngineConfig, *, value_clip: float) -> None:
        self.engine = ValueEngine(ValueModel(policy), config)
        self.value_clip = value_clip

    def values(self, samples: Sequence[Sample]) -> list[Tensor]:
        """fp32, one for each token of each sample; 0 where the loss mask is 0."""
        return self.engine.forward_values(samples)

    def train_step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step towards the returns; its metrics."""
        result = self.engine.train_step(samples, self._loss)
        return {"value_loss": result["loss"], "value_grad_norm": result["grad_norm"]}

    def _loss(
        self, value_T: Tensor, _: Tensor | None, micro: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        fields = micro.fields_T
        loss_T = value_loss(
            value_T, fields[Field.VALUE], fields[Field.RETURN], clip=self.value_clip
        )
        return (fields[Field.WEIGHT] * loss_T).sum(), {}


def explained_variance(samples: Sequence[Sample]) -> float:
    """1 − Var(return − value) / Var(return) over action tokens, before the update; 0 where the
    returns do not vary."""
    pairs = [
        (target, value)
        for sample in samples
        for target, value, is_action in zip(
            sample.fields[Field.RETURN], sample.fields[Field.VALUE], sample.loss_mask, strict=True
        )
        if is_action
    ]
    if not pairs:
        return 0.0
    returns, values = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    spread = float(returns.var(correction=0))
    return 1 - float((returns - values).var(correction=0)) / spread if spread > 0 else 0.0
