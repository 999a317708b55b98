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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from nanoengine.config import EngineConfig
from nanoengine.dtypes import DTYPES
from nanoengine.engine import LossFn, NonFiniteLoss, WeightFn
from nanoengine.model.config import ModelConfig
from nanoengine.model.hf import load_model
from nanoengine.model.sources import resolve_model
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample, TopTokens
from nanoengine.scoring import Policy, Scorer
from nanoengine.value_engine import ValueEngine, ValueModel
from nanorl.algorithms.losses import value_loss
from nanorl.algorithms.scoring import Scoring, score_group
from nanorl.batch_metrics import action_mask, logp_gap, merge_steps, per_action_token
from nanorl.batching import TrainBatch, build_batch, with_field
from nanorl.config import RunConfig
from nanorl.fields import Field
from nanorl.reference_names import parse_references
from nanorl.references import References
from nanorl.types import Rollout, TokenStats

if TYPE_CHECKING:
    from nanorl.observed import Scaffold

Groups = Sequence[Sequence[Rollout]]


@dataclass(frozen=True, kw_only=True)
class GroupScores:
    """What was said of the rollouts of a group, by rollout_id, after so many updates."""

    update: int
    known: dict[str, dict[Field, list[Tensor]]]


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
        scaffold: Scaffold | None = None,
    ) -> None:
        is_observing = config.rl.algorithm.observation_coef != 0
        assert scaffold is not None or not is_observing, "ECHO would learn the chat template"
        self.config = config
        self.scaffold = scaffold
        self.engine = engine
        self.reference = reference
        self.critic = critic
        self.publisher = publisher
        self.thread = thread
        self.version = 0
        self._stats: dict[str, TokenStats] = {}
        self._first_logps: list[Tensor] = []  # before the first update of a batch
        self._num_batches = 0  # that were trained on

    async def publish(self, version: int) -> float:
        """Hand the weights to the inference engines as policy `version`; returns seconds. The
        version counts optimizer batches, also those that gave no update."""
        self.version = version
        return await self.publisher.publish(version)

    async def train_and_publish(
        self,
        groups: Groups,
        version: int,
        scores: Sequence[GroupScores | None] = (),
        probe: Sequence[Rollout] = (),
    ) -> dict[str, Any]:
        """One optimizer batch, then its weights as policy `version`; the metrics of both. `scores`
        are what `score` said of the groups, `probe` rollouts that the present policy sampled,
        to measure the log-prob gap on where the batch trains on none."""
        loop = asyncio.get_running_loop()
        async with self.publisher.lent():
            metrics = await loop.run_in_executor(self.thread, self.train_on, groups, scores, probe)
        metrics["sync_s"] = await self.publish(version)
        return metrics

    async def score(self, group: Sequence[Rollout]) -> GroupScores:
        """What the reference and the critic say of a group before its batch is complete. The policy
        itself is not asked: its device may be the rollouts' (roles/turns.py)."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, self._score, group)

    def _score(self, group: Sequence[Rollout]) -> GroupScores:
        scoring = replace(self._scoring(), old=None, sharp=None)
        known = score_group(group, self.version, scoring) if group else {}
        return GroupScores(update=self._num_batches, known=known)

    def take_token_stats(self) -> dict[str, TokenStats]:
        """What the last batch said about the tokens of its rollouts, by their ids."""
        stats, self._stats = self._stats, {}
        return stats

    def train_on(
        self,
        groups: Groups,
        scores: Sequence[GroupScores | None] = (),
        probe: Sequence[Rollout] = (),
    ) -> dict[str, Any]:
        """One optimizer batch (a step for each of its minibatches, `rl.epochs` times); returns the
        metrics of the batch."""
        rl = self.config.rl
        start = time.perf_counter()
        batch = build_batch(
            groups,
            rl.algorithm,
            max_tokens=self.config.agent.max_context_tokens,
            version=self.version,
            scoring=self._scoring(self._still_true(scores)),
            num_minibatches=rl.minibatches,
            scaffold=self.scaffold,
        )
        metrics: dict[str, Any] = dict(batch.metrics)
        self._stats = batch.stats
        probed = self._probe(batch, probe) if probe else {}  # before the weights change
        if batch.samples and not self._only_critic_learns():
            metrics.update(self._train_policy(batch))
        elif batch.probe:  # a batch without signal still says whether the engines agree
            logps = self.engine.forward_logprobs(batch.probe, temperature=rl.temperature)
            metrics.update(logp_gap(batch.probe, logps))
        if not metrics.get("logp_gap_tokens"):
            metrics.update(probed)
        if batch.critic_samples:
            metrics.update(self._train_critic(batch))
        self._num_batches += 1
        metrics["train_s"] = time.perf_counter() - start
        if self.config.deterministic and metrics.get("logp_gap_max", 0.0) != 0.0:
            raise RuntimeError(
                f"--deterministic: rollout and training log-probs differ by "
                f"{metrics['logp_gap_max']:.3g} nats; they must be equal bit for bit. "
                "This is a defect of the engines on this machine, not of your task: please "
                "report it"
            )
        return metrics

    def _probe(self, batch: TrainBatch, rollouts: Sequence[Rollout]) -> dict[str, float]:
        from nanorl.gap_probe import gap_on  # only where rollouts run ahead of the trainer

        temperature = self.config.rl.temperature
        return gap_on(rollouts, self.version, self.engine, batch, temperature=temperature)

    def _still_true(
        self, scores: Sequence[GroupScores | None]
    ) -> dict[str, dict[Field, Sequence[Tensor]]]:
        """What was said of rollouts, but for what models said that have learnt since."""
        known: dict[str, dict[Field, Sequence[Tensor]]] = {}
        for one in scores:
            for rollout_id, said in one.known.items() if one is not None else ():
                is_new = one is not None and one.update == self._num_batches
                known[rollout_id] = {
                    name: tensors
                    for name, tensors in said.items()
                    if is_new or name == Field.REF_LOGP
                }
        return known

    def _scoring(
        self, known: Mapping[str, Mapping[Field, Sequence[Tensor]]] | None = None
    ) -> Scoring:
        """Rollouts of the present policy bring its log-probs with them; stale ones do not."""
        spec = self.config.rl.algorithm
        is_read = spec.needs_old_logp or self.config.rl.minibatches > 1
        is_old = is_read and spec.old_policy == "recomputed" and not self._is_exact
        temperature = self.config.rl.temperature
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
            known={} if known is None else known,
        )

    @property
    def _is_exact(self) -> bool:
        """True if all tokens are of the present policy, by the same numbers."""
        return self.config.rl.is_on_policy and self.config.engine.quantization == "none"

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
        """A step for each minibatch and epoch. The ratios of all but the very first are against
        the policy before it: its log-probs are those of the rollouts where these are its own, or
        were scored with the batch; in later epochs of one minibatch they are the first's."""
        rl = self.config.rl
        metrics: dict[str, Any] = {}
        samples, minibatches = batch.samples, batch.minibatches()
        if rl.minibatches > 1 and self._is_exact:
            old = [torch.tensor(sample.fields[Field.ROLLOUT_LOGP]) for sample in samples]
            samples = with_field(samples, Field.OLD_LOGP, old)
        for epoch in range(rl.epochs):
            results = []
            for number, places in enumerate(minibatches):
                names = [batch.places[i][0] for i in places]
                here = [samples[i] for i in places]
                is_first = epoch == number == 0  # of weights that the batch came with
                loss_fn = replace(batch.loss_fn, is_exact=is_first and self._is_exact)
                results.append(self._train_step(here, loss_fn, names))
                if is_first:
                    metrics.update(self._gap(batch, samples, places))
            metrics.update(per_action_token(merge_steps(results)))
            if epoch == 0 and rl.epochs > 1 and rl.minibatches == 1:
                samples = with_field(samples, Field.OLD_LOGP, self._first_logps)
        return metrics

    def _train_step(
        self, samples: Sequence[Sample], loss_fn: LossFn, names: Sequence[str]
    ) -> dict[str, float]:
        """One optimizer step on samples of the rollouts `names`. NonFiniteLoss, before the weights
        change, names the one whose log-probs are not finite, if there is one."""
        rl = self.config.rl
        try:
            return self.engine.train_step(
                samples,
                loss_fn,
                temperature=rl.temperature,
                entropy=rl.algorithm.entropy_coef != 0 or rl.keep_entropies,
            )
        except NonFiniteLoss as error:
            scored = zip(names, self.engine.last_logps, strict=False)
            damaged = [name for name, logp_T in scored if not logp_T.isfinite().all()]
            if not damaged:
                raise
            raise NonFiniteLoss(
                f"rollout {damaged[0]}: the trained policy gives its tokens log-probs that are "
                f"not finite. {error}"
            ) from error

    def _gap(
        self, batch: TrainBatch, samples: Sequence[Sample], places: Sequence[int]
    ) -> dict[str, float]:
        """What the first step says about its tokens before it changed the weights."""
        self._first_logps = self.engine.last_logps
        found = [batch.places[i] for i in places]
        here = [samples[i] for i in places]
        self._note_tokens(batch, found, here, "trained_logp", self.engine.last_logps)
        self._note_tokens(batch, found, here, "entropy", self.engine.last_entropies)
        return logp_gap(here, self.engine.last_logps)

    def _note_tokens(
        self,
        batch: TrainBatch,
        places: Sequence[tuple[str, int]],
        samples: Sequence[Sample],
        name: str,
        values: Sequence[Tensor],
    ) -> None:
        """Numbers of trained samples; the other sequences of their rollouts have none."""
        parts = zip(places, samples, values, strict=False)
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
