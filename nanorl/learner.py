"""The learner role: groups of rollouts become optimizer steps, and its weights the engine's.

An actor of the trainer (nanosched): its calls run one after another, the heavy part in the compute
thread that it is given, so that rollouts may go on meanwhile.
Left out: which groups make a batch (trainer.py), and a loss of its own (batching.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from nanoengine.engine import Engine
from nanoengine.frozen import FrozenPolicy
from nanoinfer.async_engine import AsyncEngine
from nanorl.batching import (
    Scoring,
    TrainBatch,
    build_batch,
    logp_gap,
    per_action_token,
    with_field,
)
from nanorl.colocation import cache_lent
from nanorl.config import RunConfig
from nanorl.critic import Critic, explained_variance
from nanorl.types import Rollout
from nanorl.weight_sync import sync_weights

Groups = Sequence[Sequence[Rollout]]


class Learner:
    """Owns the training engine during the RL phase, and the reference and the critic where the
    algorithm has them."""

    def __init__(
        self,
        config: RunConfig,
        *,
        engine: Engine,
        generator: AsyncEngine,
        thread: Executor,
        reference: FrozenPolicy | None = None,
        critic: Critic | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.reference = reference
        self.critic = critic
        self.generator = generator
        self.thread = thread
        self.version = 0

    async def publish(self, version: int) -> float:
        """Copy the weights into the inference engine as policy `version`; returns seconds. The
        version counts optimizer batches, also those that gave no update."""
        self.version = version
        return await sync_weights(self.engine, self.generator, version)

    async def train_and_publish(self, groups: Groups, version: int) -> dict[str, Any]:
        """One optimizer batch, then its weights as policy `version`; the metrics of both."""
        loop = asyncio.get_running_loop()
        staleness = self.config.rl.max_staleness
        device = self.engine.model.device
        async with cache_lent(self.generator, device, max_staleness=staleness):
            metrics = await loop.run_in_executor(self.thread, self.train_on, groups)
        metrics["sync_s"] = await self.publish(version)
        return metrics

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
        is_old = spec.needs_old_logp and spec.old_policy == "recomputed" and rl.max_staleness > 0
        temperature = rl.temperature
        return Scoring(
            old=partial(self.engine.forward_logprobs, temperature=temperature) if is_old else None,
            reference=None
            if self.reference is None
            else partial(self.reference.forward_logprobs, temperature=temperature),
            values=None if self.critic is None else self.critic.values,
        )

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
                entropy=rl.algorithm.entropy_coef != 0,
            )
            metrics.update(per_action_token(result))
            if epoch == 0:
                metrics.update(logp_gap(samples, self.engine.last_logps))
            if epoch == 0 and rl.epochs > 1:
                # The policy before the first update: what the ratios of later epochs are against.
                samples = with_field(samples, "old_logp", self.engine.last_logps)
        return metrics

    def _train_critic(self, batch: TrainBatch) -> dict[str, float]:
        assert self.critic is not None, "it gave the values of these samples"
        metrics = {"explained_variance": explained_variance(batch.critic_samples)}
        for _ in range(self.config.rl.epochs):
            metrics |= self.critic.train_step(batch.critic_samples)
        return metrics
