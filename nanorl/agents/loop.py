"""The agent loop: generate, step the environment, append what it says, until an answer.

One coroutine plays one rollout. While it waits for its tool the engine decodes the others, so it
holds no lock and no thread. The token bookkeeping is in tokens.py, the meaning of an action in
envs/actions.py. There is one loop: an agent that answers at once is one of a single turn
(`Limits.max_turns`), and evaluation without the tool asks the environment to refuse its calls.
Left out: retries of failed rollouts (nanorl/collector.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.tokens import Limits, TurnBuilder
from nanorl.envs.base import Environment
from nanorl.types import InfrastructureError, Rollout, Status, Task


class Generator(Protocol):
    """An inference engine, as far as an agent needs it."""

    async def generate(self, ids: list[int], params: SamplingParams) -> Output: ...


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A policy with its limits and its judge.

    agent = Agent(generator=engine, tokenizer=tokenizer, limits=Limits(), reward=RuleReward())
    rollout = await agent.play(task, CodeEnv(sandbox, MARKDOWN), group_id="s0-t3",
                               rollout_id="s0-t3-m1", sampling=SamplingParams(seed=7))
    """

    generator: Generator
    tokenizer: ChatTokenizer
    limits: Limits
    reward: Callable[[str | None, str], float]

    async def play(
        self,
        task: Task,
        env: Environment,
        *,
        group_id: str,
        rollout_id: str,
        sampling: SamplingParams,
    ) -> Rollout:
        """Play one rollout. `sampling.seed` is the rollout's seed; every turn derives its own.

        A rollout that hits a limit keeps its tokens and scores as unanswered. `InfrastructureError`
        gives status FAILED; everything else that raises is a defect and propagates.
        """
        builder = TurnBuilder(
            self.tokenizer, self.limits, task_id=task.task_id, group_id=group_id,
            rollout_id=rollout_id,
        )  # fmt: skip
        try:
            builder.start(await env.reset(task))
            answer = await self._converse(builder, env, sampling)
        except InfrastructureError:
            return builder.close(0.0, Status.FAILED)
        finally:
            await env.close()
        builder.metrics["answered"] = float(answer is not None)
        return builder.close(self.reward(answer, task.answer))

    async def _converse(
        self, builder: TurnBuilder, env: Environment, sampling: SamplingParams
    ) -> str | None:
        """Take turns until there is an answer, which is returned, or a limit is hit: None."""
        while True:
            await self._generate_turn(builder, sampling)
            if not builder.is_parseable:
                return None
            step = await env.step(builder.action_text())
            builder.note(step.reward, step.metrics)
            if step.observation is None:
                return step.answer
            if builder.num_turns >= self.limits.max_turns:
                builder.truncation = "context"  # nobody would read the observation
                return None
            if not builder.append_observation(env.format.observation_messages(step.observation)):
                return None

    async def _generate_turn(self, builder: TurnBuilder, sampling: SamplingParams) -> None:
        """Sample one turn of as many tokens as the limits leave; `sampling.max_tokens` is not read.

        An output that was aborted for a weight update is continued by re-prefill.
        """
        turn = builder.num_turns
        while True:
            room, kind = builder.room()
            if room == 0:
                builder.truncation = kind
                return
            # The same seed for the pieces of an aborted turn: sampling depends on (seed, position).
            seed = turn_seed(sampling.seed, turn)
            params = replace(sampling, max_tokens=room, seed=seed)
            output = await self.generator.generate(builder.prompt_ids, params)
            builder.append_action(output)
            if output.finish_reason != "abort":
                return


def turn_seed(seed: int, turn: int) -> int:
    """The engine seed of one turn: 63 bits, a function of the rollout's seed and the turn alone."""
    digest = hashlib.blake2b(f"{seed}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
