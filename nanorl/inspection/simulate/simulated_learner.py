"""A simulated learner: it takes as long as the phases say, and gives the replicas new versions.

It has the methods of `Learner` (nanorl/learner.py) that the trainer calls. Minibatches are trained
one after the other, each as soon as its groups are there. The trainer hands over a batch when its
last group has come; what earlier minibatches have done by then is taken off:

    end(i) = max(end(i - 1), when the last group of minibatch i ended) + train_s / minibatches

which is when a trainer that streams would be ready, since nothing that rolls out waits for a
minibatch but only for the version after the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanorl.inspection.simulate.rollouts import END_S
from nanorl.inspection.simulate.simulated_replica import SimulatedReplica
from nanorl.inspection.simulate.simulation_config import SimulationConfig
from nanorl.types import Rollout, TokenStats


@dataclass(frozen=True)
class PhaseSpan:
    """A span of the trainer's time, from `start_s` to `end_s`; its phase is train, other or
    sync."""

    phase: str
    start_s: float
    end_s: float


class SimulatedLearner:
    """Sleeps where a trainer would work."""

    def __init__(
        self,
        config: SimulationConfig,
        replicas: Sequence[SimulatedReplica],
        spans: list[PhaseSpan],
    ) -> None:
        """It appends to `spans` what it does."""
        self.config, self.replicas, self.spans = config, replicas, spans
        self._free_s = 0.0  # when it had nothing more to do

    async def publish(self, version: int) -> float:
        """Give the weights to the replicas; returns seconds."""
        start_s = asyncio.get_running_loop().time()
        waits = not self.config.partial_rollouts
        await self._pass_time("sync", self.config.phases.sync_s)
        await asyncio.gather(*(r.load_weights(version, waits=waits) for r in self.replicas))
        self._free_s = asyncio.get_running_loop().time()
        return self._free_s - start_s

    async def train_and_publish(
        self, groups: Sequence[Sequence[Rollout]], version: int, *_: Sequence[Any]
    ) -> dict[str, Any]:
        """One batch, then its weights; the metrics are those that the simulation reads."""
        phases, count = self.config.phases, self.config.minibatches
        begin_s = asyncio.get_running_loop().time()
        part_s, end_s = phases.train_s / count, self._free_s
        for came_s in minibatch_times(groups, count):
            start_s = max(end_s, came_s)
            end_s = start_s + part_s
            self.spans.append(PhaseSpan("train", start_s, end_s))
        await asyncio.sleep(max(0.0, end_s - asyncio.get_running_loop().time()))
        await self._pass_time("other", phases.other_s)
        train_s = asyncio.get_running_loop().time() - begin_s
        return {"train_s": train_s, "sync_s": await self.publish(version)}

    def take_token_stats(self) -> dict[str, TokenStats]:
        """Nothing: no token has a log-prob."""
        return {}

    async def _pass_time(self, phase: str, seconds: float) -> None:
        start_s = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        self.spans.append(PhaseSpan(phase, start_s, start_s + seconds))


def minibatch_times(groups: Sequence[Sequence[Rollout]], count: int) -> list[float]:
    """When the last group of each minibatch had ended, if minibatches are made of groups as these
    end."""
    ends = sorted(max(rollout.metrics[END_S] for rollout in group) for group in groups)
    return [ends[len(ends) * (i + 1) // count - 1] for i in range(count)]
