"""The learner of algorithms that read more than the rollouts say: references, teachers, a critic,
the policy's own log-probs of stale tokens.

`make_learner` chooses between it and the plain one (nanorl/learner.py) by what a run has.
Next: algorithms/batch_scoring.py, `Scoring`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

from torch import Tensor

from nanoengine.engine import LossFn, WeightFn
from nanoengine.heads.scorer import Policy
from nanoengine.packing import Sample
from nanoengine.state.whole_engine import Engine
from nanorl.algorithms.batch_scoring import Scoring, score_group
from nanorl.algorithms.observed import Scaffold
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import TrainBatch, build_batch
from nanorl.grpo import Field
from nanorl.learner import Groups, Learner, Publisher, UpdatePlan
from nanorl.options.run_config import RunConfig
from nanorl.scorers.averaged_teacher import AveragedTeacher, AveragingEngine
from nanorl.scorers.gap_probe import gap_on
from nanorl.scorers.value_critic import ValueEstimator, explained_variance
from nanorl.types import Rollout


@dataclass(frozen=True, kw_only=True)
class GroupScores:
    """The scores of the rollouts of a group, by rollout_id, as models gave them after so many
    updates."""

    update: int
    known: dict[str, dict[Field, list[Tensor]]]


class ScoringEngine(Policy, AveragingEngine, Protocol):
    """An `Engine` as a learner uses it, or what stands for the ranks of one in other processes."""

    last_logps: list[Tensor]
    last_entropies: list[Tensor]

    def forward_entropies(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]: ...

    def train_step(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        weight_fn: WeightFn | None = None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> dict[str, float]: ...


@dataclass(frozen=True, kw_only=True)
class Scorers:
    """Those who are asked beside the policy, where the algorithm has them."""

    reference: Policy | None = None
    critic: ValueEstimator | None = None
    critic_warmup_steps: int = 0
    """First versions in which only the critic learns."""
    scaffold: Scaffold | None = None
    """Tells what an environment said from the chat template around it."""


class ScoredLearner(Learner):
    """Owns the training engine, and the reference and the critic where the algorithm has them."""

    engine: Engine

    def __init__(
        self,
        plan: UpdatePlan,
        scorers: Scorers,
        *,
        engine: Engine,
        publisher: Publisher,
        thread: Executor,
    ) -> None:
        super().__init__(plan, engine=engine, publisher=publisher, thread=thread)
        assert isinstance(plan.algorithm, AlgorithmSpec), "the plain learner trains the others"
        self.spec = plan.algorithm
        is_observing = self.spec.observation_coef != 0
        has_scaffold = scorers.scaffold is not None
        assert has_scaffold or not is_observing, "ECHO would learn the chat template"
        self.scorers = scorers
        self._num_batches = 0  # that were trained on
        self._known: dict[str, dict[Field, Sequence[Tensor]]] = {}
        self._probe: Sequence[Rollout] = ()

    async def train_and_publish(
        self,
        groups: Groups,
        version: int,
        scores: Sequence[GroupScores | None] = (),
        probe: Sequence[Rollout] = (),
    ) -> dict[str, Any]:
        """Train on one batch, then publish the weights as policy `version`; returns the metrics of
        both. `scores` are what `score` said of the groups, `probe` rollouts that the present
        policy sampled, to measure the log-prob gap on where the batch trains on none."""
        self.prepare(scores, probe)
        return await super().train_and_publish(groups, version)

    async def score(self, group: Sequence[Rollout]) -> GroupScores:
        """Ask the reference and the critic about a group before its batch is complete. The policy
        itself is not asked: its device may be the rollouts' (distributed/roles/device_turns.py)."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, self.scored, group)

    def scored(self, group: Sequence[Rollout]) -> GroupScores:
        """Do so in the caller's thread."""
        scoring = replace(self._scoring(), old=None, sharp=None)
        known = score_group(group, self.version, scoring) if group else {}
        return GroupScores(update=self._num_batches, known=known)

    def prepare(
        self, scores: Sequence[GroupScores | None] = (), probe: Sequence[Rollout] = ()
    ) -> None:
        """Take what the next batch alone may use: scores of its groups, which hold but for those
        of models that have learnt since, and rollouts to measure the gap on."""
        self._probe, self._known = probe, {}
        for one in scores:
            for rollout_id, said in one.known.items() if one is not None else ():
                is_new = one is not None and one.update == self._num_batches
                self._known[rollout_id] = {
                    name: tensors
                    for name, tensors in said.items()
                    if is_new or name == Field.REF_LOGP
                }

    def _build(self, groups: Groups) -> TrainBatch:
        plan = self.plan
        known, self._known = self._known, {}
        return build_batch(
            groups,
            plan.algorithm,
            max_tokens=plan.max_tokens,
            version=self.version,
            scoring=self._scoring(known),
            num_minibatches=plan.minibatches,
        )

    def _learn(self, batch: TrainBatch) -> dict[str, Any]:
        probed = self._gap_on_probe(batch)  # before the weights change
        is_waiting = self.version < self.scorers.critic_warmup_steps
        metrics = self._compare(batch) if is_waiting else super()._learn(batch)
        if not metrics.get("logp_gap_tokens"):
            metrics.update(probed)
        if batch.critic_samples:
            metrics.update(self._train_critic(batch))
        self._num_batches += 1
        return metrics

    def _gap_on_probe(self, batch: TrainBatch) -> dict[str, float]:
        probe, self._probe = self._probe, ()
        temperature = self.plan.temperature
        return (
            gap_on(probe, self.version, self.engine, batch, temperature=temperature)
            if probe
            else {}
        )

    def _scoring(
        self, known: Mapping[str, Mapping[Field, Sequence[Tensor]]] | None = None
    ) -> Scoring:
        """Rollouts of the present policy bring its log-probs with them; stale ones do not."""
        spec, temperature = self.spec, self.plan.temperature
        reference, critic = self.scorers.reference, self.scorers.critic
        is_read = spec.needs_old_logp or self.plan.minibatches > 1
        is_old = is_read and spec.old_policy == "recomputed" and not self.plan.is_exact
        return Scoring(
            old=partial(self.engine.forward_logprobs, temperature=temperature) if is_old else None,
            sharp=partial(self.engine.forward_logprobs, temperature=temperature / 2)
            if spec.needs_sharp_logp
            else None,
            reference=partial(reference.forward_logprobs, temperature=temperature)
            if reference is not None and spec.needs_ref_logp
            else None,
            teacher=partial(self._teacher().forward_logprobs, temperature=temperature)
            if spec.loss == "opd" and spec.has_hindsight
            else None,
            top=partial(self._teacher().forward_top, k=spec.top_k, temperature=temperature)
            if spec.loss == "opd_topk"
            else None,
            values=None if critic is None else critic.values,
            entropies=partial(self.engine.forward_entropies, temperature=temperature)
            if spec.chooses_by_entropy
            else None,
            scaffold=self.scorers.scaffold,
            known={} if known is None else known,
        )

    def _teacher(self) -> Policy:
        """The model whose opinion a distillation asks for: the policy itself, or its average over
        time, where hindsight alone sets the teacher apart."""
        spec = self.spec
        if spec.has_hindsight and spec.hindsight_teacher == "policy":
            return self.engine
        if spec.has_average:
            return AveragedTeacher(self.engine)
        reference = self.scorers.reference
        assert reference is not None, "the algorithm needs one, so the run has opened it"
        return reference

    def _train_critic(self, batch: TrainBatch) -> dict[str, float]:
        critic = self.scorers.critic
        assert critic is not None, "it gave the values of these samples"
        metrics = {"explained_variance": explained_variance(batch.critic_samples)}
        for _ in range(self.plan.epochs):
            metrics |= critic.train_step(batch.critic_samples)
        return metrics


def make_learner(config: RunConfig, **parts: Any) -> Learner:
    """Build what `choose_learner` chooses, of the same arguments."""
    return choose_learner(config, **parts)()


def choose_learner(
    config: RunConfig,
    *,
    engine: ScoringEngine,
    publisher: Publisher,
    thread: Executor,
    reference: Policy | None = None,
    critic: ValueEstimator | None = None,
    scaffold: Scaffold | None = None,
) -> partial[Learner]:
    """Choose the learner of a run, with its arguments: the plain one where the rollouts say all
    that the algorithm reads."""
    plan, spec = update_plan(config), config.rl.algorithm
    # Ranks in other processes have every method of an engine that a learner calls.
    parts: dict[str, Any] = {
        "engine": cast(Engine, engine),
        "publisher": publisher,
        "thread": thread,
    }
    asks_policy = not plan.is_exact or spec.needs_sharp_logp or spec.has_hindsight
    asks_policy = asks_policy or spec.chooses_by_entropy
    asks_models = reference is not None or critic is not None
    if not (asks_policy or asks_models or spec.observation_coef):
        return partial(Learner, replace(plan, algorithm=spec.acting), **parts)
    scorers = Scorers(
        reference=reference,
        critic=critic,
        critic_warmup_steps=config.rl.critic_warmup_steps,
        scaffold=scaffold,
    )
    chosen: Callable[..., Learner] = ScoredLearner
    return partial(chosen, plan, scorers, **parts)


def update_plan(config: RunConfig) -> UpdatePlan:
    """The options of a run that one optimizer batch reads."""
    rl = config.rl
    return UpdatePlan(
        algorithm=rl.algorithm,
        max_tokens=config.agent.max_context_tokens,
        temperature=rl.temperature,
        epochs=rl.epochs,
        minibatches=rl.minibatches,
        entropies=rl.algorithm.entropy_coef != 0 or rl.keep_entropies,
        is_exact=rl.is_on_policy and config.engine.quantization == "none",
        deterministic=config.deterministic,
    )
