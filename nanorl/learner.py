"""The learner: groups of rollouts become an optimizer step, and its weights the rollout engine's.

    rollouts -> batch    batching.py: samples with an advantage and a weight for every token
    batch -> update      the training engine: forward, backward, one update for each minibatch
    update -> rollouts   the publisher: what is sampled next comes from new weights

This is the whole of GRPO and PPO on rollouts of the present policy. Its calls run one after
another, the heavy part in the compute thread that it is given, so that the caller's event loop
goes on answering meanwhile.
Left out: which groups make a batch (trainer.py), the loss (batching.py), models that score beside
the policy, as a reference or a critic does (scorers/ has a learner that asks them), and publishers
to engines with weights of their own (weights/).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoengine.engine import LossFn, NonFiniteLoss, StepEngine
from nanoengine.packing import Sample
from nanoinfer.engine_loop import EngineLoop
from nanorl.batch_metrics import action_mask, logp_gap, merge_steps, per_action_token
from nanorl.batching import TrainBatch, build_batch, with_field
from nanorl.grpo import GRPO, Field
from nanorl.types import Rollout, TokenStats

Groups = Sequence[Sequence[Rollout]]


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """The options of a run that one optimizer batch reads.

    UpdatePlan(algorithm=GRPO(), max_tokens=256, temperature=0.7)
    """

    algorithm: GRPO
    max_tokens: int
    """The length limit of a sequence, prompt included."""
    temperature: float = 1.0
    """The rollouts were sampled at it, so log-probs are taken at it."""
    epochs: int = 1
    """Passes over the batch."""
    minibatches: int = 1
    """Optimizer steps of one pass, each on an equal part of the batch's groups."""
    entropies: bool = False
    """The loss, or the log, wants the entropy at every trained token."""
    is_exact: bool = True
    """The present policy sampled all tokens, with the very numbers that are trained."""
    deterministic: bool = False
    """A difference between the log-probs of both engines is an error."""


class Learner:
    """Owns the training engine during the RL phase.

    learner = Learner(plan, engine=engine, publisher=publisher, thread=thread)
    metrics = await learner.train_and_publish(groups, version=1)
    """

    def __init__(
        self, plan: UpdatePlan, *, engine: StepEngine, publisher: Publisher, thread: Executor
    ) -> None:
        self.plan = plan
        self.engine = engine
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
        """Train on one batch, then publish the weights as policy `version`; returns the metrics of
        both."""
        loop = asyncio.get_running_loop()
        # Nobody samples during a synchronous step, so the rollout engine's cache can make room.
        async with self.publisher.lent():
            metrics = await loop.run_in_executor(self.thread, self.train_on, groups)
        metrics["sync_s"] = await self.publish(version)
        return metrics

    def take_token_stats(self) -> dict[str, TokenStats]:
        """Return what the last batch said about the tokens of its rollouts, by their ids, once."""
        stats, self._stats = self._stats, {}
        return stats

    def train_on(self, groups: Groups) -> dict[str, Any]:
        """Make one optimizer batch of the groups (a step for each minibatch and epoch); returns
        its metrics. RuntimeError of a deterministic run whose engines disagree."""
        start = time.perf_counter()
        batch = self._build(groups)
        self._stats = batch.stats
        metrics = {**batch.metrics, **self._learn(batch)}
        metrics["train_s"] = time.perf_counter() - start
        # The comparison costs nothing: the step has computed the log-probs of both sides anyway.
        if self.plan.deterministic and metrics.get("logp_gap_max", 0.0) != 0.0:
            raise RuntimeError(
                f"--deterministic: rollout and training log-probs differ by "
                f"{metrics['logp_gap_max']:.3g} nats; they must be equal bit for bit. "
                "This is a defect of the engines on this machine, not of your task: please "
                "report it"
            )
        return metrics

    def _build(self, groups: Groups) -> TrainBatch:
        """Turn the groups into samples with advantages and weights."""
        plan = self.plan
        return build_batch(
            groups,
            plan.algorithm,
            max_tokens=plan.max_tokens,
            version=self.version,
            num_minibatches=plan.minibatches,
        )

    def _learn(self, batch: TrainBatch) -> dict[str, Any]:
        """Update the weights by the batch; returns the metrics of the update."""
        # Without a signal no sample is left: the loss would have a gradient of exactly 0.
        return self._train_policy(batch) if batch.samples else self._compare(batch)

    def _compare(self, batch: TrainBatch) -> dict[str, float]:
        """Compare the log-probs of both engines on a batch that changes no weight."""
        if not batch.probe:
            return {}
        temperature = self.plan.temperature
        return logp_gap(
            batch.probe, self.engine.forward_logprobs(batch.probe, temperature=temperature)
        )

    def _train_policy(self, batch: TrainBatch) -> dict[str, Any]:
        """Take a step for each minibatch and epoch. The ratios of all but the very first are
        against the policy before it."""
        plan, samples = self.plan, batch.samples
        metrics: dict[str, Any] = {}
        if plan.minibatches > 1 and plan.is_exact:
            # The policy before the batch is the one that sampled it: nothing is scored again.
            old = [torch.tensor(sample.fields[Field.ROLLOUT_LOGP]) for sample in samples]
            samples = with_field(samples, Field.OLD_LOGP, old)
        for epoch in range(plan.epochs):
            results = []
            for number, places in enumerate(batch.minibatches()):
                is_first = epoch == number == 0  # of weights that the batch came with
                loss_fn = replace(batch.loss_fn, is_exact=is_first and plan.is_exact)
                here = [samples[i] for i in places]
                found = [batch.places[i] for i in places]
                results.append(self._train_step(here, loss_fn, [name for name, _ in found]))
                if is_first:
                    metrics |= self._note_first(batch, here, found)
            metrics |= per_action_token(merge_steps(results))
            if epoch == 0 and plan.epochs > 1 and plan.minibatches == 1:
                # The one step of this epoch scored all samples before it changed the weights.
                samples = with_field(samples, Field.OLD_LOGP, self.engine.last_logps)
        return metrics

    def _train_step(
        self, samples: Sequence[Sample], loss_fn: LossFn, names: Sequence[str]
    ) -> dict[str, float]:
        """Take one optimizer step on samples of the rollouts `names`. NonFiniteLoss, before the
        weights change, names the one whose log-probs are not finite, if there is one."""
        try:
            return self.engine.train_step(
                samples,
                loss_fn,
                temperature=self.plan.temperature,
                entropy=self.plan.entropies,
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

    def _note_first(
        self, batch: TrainBatch, samples: Sequence[Sample], places: Sequence[tuple[str, int]]
    ) -> dict[str, float]:
        """Keep what the first step says about its tokens; returns the gap between the engines.
        Only this step's forward pass reads the weights that sampled."""
        _note_tokens(batch, places, samples, "trained_logp", self.engine.last_logps)
        _note_tokens(batch, places, samples, "entropy", self.engine.last_entropies)
        return logp_gap(samples, self.engine.last_logps)


def _note_tokens(
    batch: TrainBatch,
    places: Sequence[tuple[str, int]],
    samples: Sequence[Sample],
    name: str,
    values: Sequence[Tensor],
) -> None:
    """Write numbers of trained samples into the batch's statistics; the other sequences of their
    rollouts have NaN."""
    # Entropies are computed on demand: without them `values` is empty, and nothing is written.
    for (rollout_id, sequence), sample, value_T in zip(places, samples, values, strict=False):
        of_rollout = batch.stats[rollout_id].values
        nothing = [[math.nan] * len(one) for one in of_rollout["advantage"]]
        is_action = torch.tensor(action_mask(sample), dtype=torch.bool)
        own_T = torch.where(is_action, value_T.cpu(), 0.0)
        of_rollout.setdefault(name, nothing)[sequence] = own_T.tolist()


class Publisher(Protocol):
    """The way from the trainer's weights to the engines that sample with them."""

    async def publish(self, version: int) -> float:
        """Hand them over as policy `version`; returns seconds. An engine that refuses them goes on
        with its old version."""
        ...

    def lent(self) -> AbstractAsyncContextManager[None]:
        """Inside, the trainer may use the devices that it shares with those engines."""
        ...


class SharedWeights:
    """The publisher where trainer and rollout engine take turns and read one model, parameters and
    prepacked copies (4 bytes a weight in bf16), as on a CPU. Nothing is copied: an update is
    complete when the trainer has repacked its model, and until it is published the rollout engine
    sleeps, and would refuse to run a step.
    """

    def __init__(self, generator: EngineLoop) -> None:
        self._generator = generator

    async def publish(self, version: int) -> float:
        """Have the rollout engine take the weights for policy `version`; returns seconds.

        It happens between two steps of the engine, which checks every value, bumps its version and
        drops the KV cache: the keys in it were computed by the old weights.
        ValueError for a weight that is not finite; the engine serves none of them.
        """
        start = time.perf_counter()
        await self._generator.adopt_weights(version)
        return time.perf_counter() - start

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Inside, the rollout engine sleeps, and its cache's memory is free for activations: what
        it held would be worthless after the update anyway."""
        await self._generator.sleep()
        try:
            yield
        finally:
            # A trainer that has written leaves weights of no version: `publish` wakes the engine.
            if self._generator.engine.is_current:
                await self._generator.wake()
