"""A reward whose code runs in worker processes: it may hang, die or talk nonsense.

reward = HostedReward("my_rewards:by_length", num_workers=2)
await reward.start()                     # ValueError where it cannot be loaded
score = await reward.score(rollout, task, transcript)
reward.close()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanorl.envs.hosting.host_pool import HostingLimits, WorkerPool
from nanorl.envs.rewards.base import Reward, Score, Transcript, as_score
from nanorl.envs.rewards.function_reward import score_rollout
from nanorl.envs.rewards.load import load_reward
from nanorl.task import Task
from nanorl.types import Rollout


class ScoreHost:
    """Lives in a worker, with the reward."""

    def __init__(self, spec: str, arguments: Mapping[str, Any]) -> None:
        self._reward: Reward = load_reward(spec, arguments)

    async def score(self, rollout: Rollout, task: Task, transcript: Transcript) -> Score:
        return await score_rollout(self._reward, rollout, task, transcript)


class HostedReward:
    """A `Reward`; what it raises is `InfrastructureError`."""

    def __init__(
        self,
        spec: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        num_workers: int = 2,
        limits: HostingLimits | None = None,
    ) -> None:
        """`spec` names the reward, as `--reward` does; `arguments` are those of a class."""
        self.spec = spec
        self._pool = WorkerPool(
            ScoreHost, (spec, dict(arguments or {})), num_workers=num_workers, limits=limits
        )

    async def start(self) -> None:
        """Load the code in every worker. ValueError, saying why, where that fails."""
        await self._pool.start()

    async def score(self, rollout: Rollout, task: Task, transcript: Transcript) -> Score:
        return as_score(await self._pool.call("score", rollout, task, transcript), self.spec)

    def close(self) -> None:
        """End the workers. Closing twice is fine."""
        self._pool.close()
