"""`Agent` plays rollouts: a loop in an environment, to the end, then the score.

One coroutine plays one rollout. While it waits for its tool the engine decodes the others, so it
holds no lock and no thread. The loops are in loops.py, the token bookkeeping in tokens.py, what a
turn means in the environment.
Left out: retries of failed rollouts (nanorl/collector.py).
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.params import SamplingParams
from nanorl.agents.context import Generator
from nanorl.agents.episode import Episode, Names, OpenSession
from nanorl.agents.limits import Limits
from nanorl.agents.loops import AgentLoop, load_loop, tool
from nanorl.agents.times import TimesKept
from nanorl.envs.base import Environment, Opening
from nanorl.finite import unusable, without_numbers
from nanorl.types import InfrastructureError, Rollout, Task

if TYPE_CHECKING:
    from nanorl.http_record.access import HttpAccess

CLOSE_S = 30.0  # what an environment has to give back, it gives back within this time


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
    http: HttpAccess | None = None
    """The way to the run's recording proxy, for agents that are programs."""
    times: TimesKept = field(default_factory=TimesKept)
    """Where it is noted when what happened."""
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
        loop = load_loop(task.agent) if task.agent else self.loop
        try:
            async with asyncio.timeout(self.deadline_s):
                await loop(episode)
                score = await episode.judge() if episode.score is None else episode.score
        except InfrastructureError as error:
            return episode.rollout(None, str(error))
        except TimeoutError:
            limit = f"--agent.deadline-s {self.deadline_s:g}"
            return episode.rollout(None, f"it took longer than {limit}")
        finally:
            if self.openings is not None and episode.opening is not None:
                self.openings[rollout_id] = episode.opening
            self.times.add(rollout_id, start_ns, episode.times())
            with suppress(InfrastructureError, TimeoutError):  # the score stands already
                async with asyncio.timeout(CLOSE_S):
                    await env.close()
        episode.context.builder.metrics["answered"] = float(episode.answer is not None)
        rollout = episode.rollout(score)
        if fault := unusable(rollout):  # it would reach the advantages of the whole group
            return without_numbers(episode.rollout(None, fault))
        return rollout
