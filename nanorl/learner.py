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
from typing import Any

from nanoengine.engine import Engine
from nanoinfer.async_engine import AsyncEngine
from nanorl.batching import build_batch, logp_gap, per_action_token
from nanorl.config import RunConfig
from nanorl.types import Rollout
from nanorl.weight_sync import sync_weights

Groups = Sequence[Sequence[Rollout]]


class Learner:
    """Owns the training engine during the RL phase."""

    def __init__(
        self, config: RunConfig, *, engine: Engine, generator: AsyncEngine, thread: Executor
    ) -> None:
        self.config = config
        self.engine = engine
        self.generator = generator
        self.thread = thread

    async def publish(self, version: int) -> float:
        """Copy the weights into the inference engine as policy `version`; returns seconds."""
        return await sync_weights(self.engine, self.generator, version)

    async def train_and_publish(self, groups: Groups, version: int) -> dict[str, Any]:
        """One optimizer batch, then its weights as policy `version`; the metrics of both."""
        loop = asyncio.get_running_loop()
        metrics = await loop.run_in_executor(self.thread, self.train_on, groups)
        metrics["sync_s"] = await self.publish(version)
        return metrics

    def train_on(self, groups: Groups) -> dict[str, Any]:
        """One optimizer batch (`rl.epochs` steps over it); returns the metrics of the batch."""
        rl = self.config.rl
        start = time.perf_counter()
        batch = build_batch(groups, rl.algorithm, max_tokens=self.config.agent.max_context_tokens)
        metrics: dict[str, Any] = dict(batch.metrics)
        if not batch.samples:
            logps = self.engine.forward_logprobs(batch.probe, temperature=rl.temperature)
            metrics.update(logp_gap(batch.probe, logps))
        elif rl.epochs > 1 or rl.max_staleness > 0:
            logps = self.engine.forward_logprobs(batch.samples, temperature=rl.temperature)
            batch.set_field("old_logp", logps)
        for epoch in range(rl.epochs if batch.samples else 0):
            result = self.engine.train_step(
                batch.samples,
                batch.loss_fn,
                temperature=rl.temperature,
                entropy=rl.algorithm.entropy_coef != 0,
            )
            metrics.update(per_action_token(result))
            if epoch == 0:
                metrics.update(logp_gap(batch.samples, self.engine.last_logps))
        metrics["train_s"] = time.perf_counter() - start
        if self.config.deterministic and metrics.get("logp_gap_max", 0.0) != 0.0:
            raise RuntimeError(
                f"--deterministic: rollout and training log-probs differ by "
                f"{metrics['logp_gap_max']:.3g} nats; they must be equal bit for bit. "
                "This is a defect of the engines on this CPU, not of your task: please report it"
            )
        return metrics
