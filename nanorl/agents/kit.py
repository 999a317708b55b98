"""What it takes to play a rollout beside the policy: tokenizer, agent, environment, sandbox.

Left out: whoever generates the tokens, which is given for each rollout: the run's replicas, or a
teacher's script.
"""

from __future__ import annotations

from pathlib import Path

from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.params import SamplingParams
from nanorl.agents.loop import Agent, Generator
from nanorl.config import RunConfig
from nanorl.envs.code import CodeEnv
from nanorl.presets import get_preset
from nanorl.rewards.rule import RuleReward
from nanorl.sandbox.base import SandboxSpec
from nanorl.sandbox.pool import SandboxPool
from nanorl.types import Rollout, Task


class AgentKit:
    """Owns the sandbox of a run. `close()` ends it."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """`folder` is the model's, for its tokenizer."""
        self.config = config
        self.preset = get_preset(config.preset)
        self.tokenizer = ChatTokenizer.from_folder(folder)
        limits = SandboxSpec(
            timeout_s=config.tool.timeout_s, memory_bytes=config.tool.memory_mb << 20
        )
        self.sandbox = SandboxPool(limits, num_workers=config.tool.workers)

    def close(self) -> None:
        self.sandbox.close()

    def environment(self, *, is_tool_enabled: bool = True) -> CodeEnv:
        return CodeEnv(
            self.sandbox,
            self.preset.action_format,
            timeout_s=self.config.tool.timeout_s,
            max_executions=self.config.agent.max_turns,
            is_tool_enabled=is_tool_enabled,
        )

    def agent(self, generator: Generator) -> Agent:
        """The run's agent, with the policy or a teacher as its `generator`."""
        return Agent(
            generator=generator,
            tokenizer=self.tokenizer,
            limits=self.config.agent,
            reward=RuleReward(),
        )

    async def play(
        self,
        task: Task,
        generator: Generator,
        *,
        group_id: str,
        rollout_id: str,
        sampling: SamplingParams,
        is_tool_enabled: bool = True,
    ) -> Rollout:
        """One rollout of the policy behind `generator`."""
        return await self.agent(generator).play(
            task,
            self.environment(is_tool_enabled=is_tool_enabled),
            group_id=group_id,
            rollout_id=rollout_id,
            sampling=sampling,
        )
