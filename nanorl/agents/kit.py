"""`Kit`: what it takes to play a rollout beside the policy: an environment, its helpers, an agent.

    make_agent = partial(Agent, tokenizer=tokenizer, limits=Limits())
    kit = Kit(kind.open, Services(tokenizer=tokenizer, sandbox=pool, timeout_s=2.0), make_agent)
    rollout = await kit.play(task, engine, group_id="s0-t3", rollout_id="s0-t3-m1",
                             sampling=SamplingParams(seed=7))

Left out: whoever generates the tokens, which is given for each rollout: the run's engine, or a
demonstrator's script; and how a run's options become a kit (nanorl/options/agent_kit.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanoinfer.params import SamplingParams
from nanorl.agents.context import Generator
from nanorl.agents.loop import Agent
from nanorl.envs.base import Environment, Opening, Services
from nanorl.task import Task
from nanorl.types import Rollout, Withheld


class Kit:
    """Plays any number of rollouts at a time, each in an episode of its own."""

    def __init__(
        self,
        open_env: Callable[[Services], Environment],
        services: Services,
        make_agent: Callable[..., Agent],
    ) -> None:
        """`open_env` opens an episode; `make_agent` is `Agent` with all but its generator."""
        self.open_env, self.services, self.make_agent = open_env, services, make_agent
        self.tokenizer = services.tokenizer

    def environment(self, *, is_tool_enabled: bool = True) -> Environment:
        """An episode of the environment. Without tools every call of one is refused."""
        return self.open_env(replace(self.services, is_tool_enabled=is_tool_enabled))

    def agent(
        self,
        generator: Generator,
        openings: dict[str, Opening] | None = None,
        withheld: Withheld = "",
    ) -> Agent:
        """The agent, with the policy or a demonstrator as its `generator`; it notes in `openings`
        what its rollouts read first. Pictures may be withheld from it."""
        if withheld in ("", "tools"):
            return self.make_agent(generator=generator, openings=openings)
        hiding = self.tokenizer.hiding(withheld)  # type: ignore[attr-defined]  # of a model that sees
        return self.make_agent(generator=generator, openings=openings, tokenizer=hiding)

    async def play(
        self,
        task: Task,
        generator: Generator,
        *,
        group_id: str,
        rollout_id: str,
        sampling: SamplingParams,
        withheld: Withheld = "",
        openings: dict[str, Opening] | None = None,
    ) -> Rollout:
        """One rollout of the policy behind `generator`, which goes without what is `withheld`."""
        # An agent and an episode are made for each rollout: nothing of one reaches another.
        return await self.agent(generator, openings, withheld).play(
            task,
            self.environment(is_tool_enabled=withheld != "tools"),
            group_id=group_id,
            rollout_id=rollout_id,
            sampling=sampling,
        )
