"""`MixedAgent`: the agent of a run in several environments, each with limits and a loop of its own.

Left out: which limits those are (options/env_mix.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nanoinfer.params import SamplingParams
from nanorl.agents.limits import Limits
from nanorl.agents.loop import Agent, AgentLoop
from nanorl.envs.base import Environment
from nanorl.envs.mix import environment_of
from nanorl.task import Task
from nanorl.types import Rollout


@dataclass(frozen=True, kw_only=True)
class MixedAgent(Agent):
    """An agent that plays a task as its environment wants it played."""

    members: Mapping[str, tuple[Limits, AgentLoop]]
    """Limits and loop by the environment's name."""

    async def play(
        self,
        task: Task,
        env: Environment,
        *,
        group_id: str,
        rollout_id: str,
        sampling: SamplingParams,
    ) -> Rollout:
        """One rollout, as `Agent.play`."""
        limits, loop = self.members[environment_of(task.task_id)]
        return await Agent.play(
            replace(self, limits=limits, loop=loop),
            task,
            env,
            group_id=group_id,
            rollout_id=rollout_id,
            sampling=sampling,
        )
