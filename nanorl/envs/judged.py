"""An environment whose episodes a reward of the user's scores, in place of their own score."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.envs.base import Environment, Opening, Services, TimeStep
from nanorl.envs.env_kind import Demonstrator, EnvKind, TaskSet
from nanorl.envs.rewards.base import Reward, Score, Transcript
from nanorl.envs.rewards.function_reward import score_rollout
from nanorl.task import Task
from nanorl.types import Rollout

if TYPE_CHECKING:
    from nanorl.envs.rewards.judge_questions import AsksJudge


class JudgedKind:
    """`kind` with another reward."""

    def __init__(self, kind: EnvKind, reward: Reward) -> None:
        self.kind, self.reward = kind, reward
        self.name, self.loop = kind.name, kind.loop
        self.has_teacher = kind.has_teacher
        self.has_tools, self.needs_sandbox = kind.has_tools, kind.needs_sandbox
        self.defaults: Mapping[str, Any] = kind.defaults

    @property
    def judges(self) -> Sequence[AsksJudge]:
        """The LLM judges of its reward."""
        return getattr(self.reward, "judges", ())

    def tasks(self, seed: int) -> TaskSet:
        return self.kind.tasks(seed)

    def open(self, services: Services) -> Environment:
        return JudgedEpisode(self.kind.open(services), self.reward)

    def demonstrator(
        self, task: Task, rng: random.Random, tokenizer: ChatTokenizer, episode: Environment
    ) -> Demonstrator:
        return self.kind.demonstrator(task, rng, tokenizer, episode)

    def close(self) -> None:
        """Close the environment, and the reward where it has something to give back."""
        try:
            self.kind.close()
        finally:
            close = getattr(self.reward, "close", None)
            if callable(close):
                close()


class JudgedEpisode:
    """Passes everything on but the score."""

    def __init__(self, env: Environment, reward: Reward) -> None:
        self._env, self._reward = env, reward
        self._task: Task | None = None

    async def reset(self, task: Task) -> Opening:
        self._task = task
        return await self._env.reset(task)

    async def step(self, text: str) -> TimeStep:
        return await self._env.step(text)

    async def show(self, observations: Sequence[Any], rng: random.Random) -> str:
        said: str = await self._env.show(observations, rng)  # type: ignore[attr-defined]
        return said

    @property
    def subject(self) -> Any:
        return self._env.subject

    def format_observation(self, observation: str | list[Message]) -> list[Message]:
        return self._env.format_observation(observation)

    async def score(self, rollout: Rollout, transcript: Transcript) -> Score:
        assert self._task is not None, "reset comes first"
        transcript = replace(transcript, environment=self.subject)
        return await score_rollout(self._reward, rollout, self._task, transcript)

    async def close(self) -> None:
        await self._env.close()


def judges_of(kind: EnvKind) -> Sequence[AsksJudge]:
    """The LLM judges that score its episodes in the process of the caller; those of each, where it
    is several environments."""
    members: Mapping[str, EnvKind] = getattr(kind, "members", {})
    of_members = [judge for one in members.values() for judge in judges_of(one)]
    return kind.judges if isinstance(kind, JudgedKind) else of_members
