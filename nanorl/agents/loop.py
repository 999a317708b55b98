"""`Agent` plays rollouts: a loop in an environment, to the end, then the score.

One coroutine plays one rollout. While it waits for its tool the engine decodes the others, so it
holds no lock and no thread. A loop says when the policy speaks and what it reads; `tool` is the
usual one. The token bookkeeping is in tokens.py, what a turn means in the environment.
Left out: other loops (loops.py), retries of failed rollouts (nanorl/agents/collector.py).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any, Protocol

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.params import SamplingParams
from nanorl.agents.context import Generator, TurnTimes
from nanorl.agents.episode import Episode, Names, OpenSession
from nanorl.agents.limits import Limits
from nanorl.envs.base import Environment, Opening
from nanorl.task import Task
from nanorl.types import InfrastructureError, Rollout, unusable

LOAD_LOOP = "nanorl.agents.loops:load_loop"
"""Finds the loop that a task names."""
CLOSE_S = 30.0  # an environment gives back within this time what it holds

AgentLoop = Callable[[Episode], Awaitable[None]]


async def tool(episode: Episode) -> None:
    """Take turns until the environment is done, or a limit is hit."""
    await episode.start()
    while (text := await episode.turn()) is not None:
        step = await episode.step(text)
        # What does not fit ends the episode too: the policy would answer what it has not read.
        if step.is_done or not episode.observe(step):
            return


async def single_turn(episode: Episode) -> None:
    """Take one turn. What the environment would say next is not read by anybody."""
    await episode.start()
    text = await episode.turn()
    if text is not None:
        await episode.step(text)


class Times(Protocol):
    """Keeps the times of rollouts for somebody who asks (times.py)."""

    def add(
        self, rollout_id: str, start_ns: int, sequences: Sequence[Sequence[TurnTimes]]
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A policy with its limits and its manner of playing.

    agent = Agent(generator=engine, tokenizer=tokenizer, limits=Limits())
    rollout = await agent.play(task, env, group_id="s0-t3", rollout_id="s0-t3-m1",
                               sampling=SamplingParams(seed=7))
    """

    generator: Generator
    tokenizer: ChatTokenizer
    limits: Limits
    loop: AgentLoop = tool
    """Plays the tasks that name none of their own (`Task.agent`)."""
    deadline_s: float | None = None
    """Wall-clock limit of one rollout; one that takes longer FAILED."""
    open_session: OpenSession | None = None
    """Where agents that call the policy through an API are let in; None: there is no such place."""
    http: Any = None
    """The way to the run's recording proxy (envs/http_record), for agents that are programs."""
    times: Times | None = None
    """Is told when what happened; None: nobody asks."""
    openings: dict[str, Opening] | None = None
    """Where it is noted what each rollout read first, by its id; None: nobody asks."""

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

        A rollout that hits a limit keeps its tokens, and is scored as unanswered.
        `InfrastructureError`, a passed deadline and a reward or metric that is no finite number
        give status FAILED; everything else that raises is a defect and propagates.
        """
        episode = Episode(
            task, env, generator=self.generator, tokenizer=self.tokenizer, limits=self.limits,
            sampling=sampling, names=Names(group_id, rollout_id),
        )  # fmt: skip
        episode.open_session, episode.http = self.open_session, self.http
        start_ns = time.time_ns()
        loop = resolve_name(LOAD_LOOP)(task.agent) if task.agent else self.loop
        try:
            # The score is inside of the limit: a reward may hang as a tool may.
            async with asyncio.timeout(self.deadline_s):
                await loop(episode)
                score = await episode.judge() if episode.score is None else episode.score
        except InfrastructureError as error:
            # Without a score it is FAILED, never 0: the policy is not to blame for a machine.
            return episode.rollout(None, str(error))
        except TimeoutError:
            limit = f"--agent.deadline-s {self.deadline_s:g}"
            return episode.rollout(None, f"it took longer than {limit}")
        finally:
            if self.openings is not None and episode.opening is not None:
                self.openings[rollout_id] = episode.opening
            if self.times is not None:
                self.times.add(rollout_id, start_ns, episode.times())
            # Whatever happened, also where the task was cancelled: a session holds a worker.
            with suppress(InfrastructureError, TimeoutError):  # the score stands already
                async with asyncio.timeout(CLOSE_S):
                    await env.close()
        # Only here, so that a curve of answers counts no rollout that failed.
        episode.context.builder.metrics["answered"] = float(episode.answer is not None)
        rollout = episode.rollout(score)
        if fault := unusable(rollout):  # it would reach the advantages of the whole group
            return _without_numbers(episode.rollout(None, fault))
        return rollout


def _without_numbers(rollout: Rollout) -> Rollout:
    """A rollout that FAILED for such a number, without what turns earned and counted, so that the
    number gets into no database and no curve."""
    metrics = {name: value for name, value in rollout.metrics.items() if math.isfinite(value)}
    branches = [replace(one, turn_rewards=[], turn_metrics=[]) for one in rollout.branches]
    return replace(rollout, metrics=metrics, branches=branches, turn_rewards=[], turn_metrics=[])
