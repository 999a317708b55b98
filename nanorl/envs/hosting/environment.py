"""An episode whose code runs in a worker process, behind the protocol of every environment.

The worker holds the whole episode: the user's object, its tools and what reads its calls. Only what
the agent loop asks for travels. An episode that is lost with its worker FAILED and is played again.
Left out: which environment it is, and how one is opened; that is the host's object, which is made
in each worker and whose `open(*arguments)` returns an `Environment` there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from nanoengine.text.chat_template import Message
from nanorl.envs.base import Environment, Opening, TeacherError, TimeStep
from nanorl.envs.hosting.host_pool import HostedObject, WorkerPool
from nanorl.envs.rewards.base import Score, Transcript, as_score
from nanorl.task import Task
from nanorl.types import InfrastructureError, Rollout

T = TypeVar("T")
Reading = tuple[TimeStep, list[Message]]


class Opens(Protocol):
    """The object that a worker holds and that opens episodes."""

    def open(self, *arguments: Any) -> Environment: ...


class EpisodeHost:
    """Lives in a worker, with what opens its episodes."""

    def __init__(self, make: Any, *arguments: Any) -> None:
        """`make(*arguments)` makes what opens episodes."""
        self._kind: Opens = make(*arguments)

    def open(self, *arguments: Any) -> _Played:
        """Begin to hold an episode."""
        return _Played(self._kind.open(*arguments))


class _Played:
    """An episode in its worker. With an observation goes how the policy reads it: the protocol has
    `format_observation` answer at once, and no other process can."""

    def __init__(self, env: Environment) -> None:
        self._env = env

    async def reset(self, task: Task) -> Opening:
        return await self._env.reset(task)

    async def step(self, text: str) -> Reading:
        step = await self._env.step(text)
        said = step.observation
        return step, [] if said is None else self._env.format_observation(said)

    async def show(self, observations: Sequence[Any], rng: random.Random) -> tuple[str, str]:
        """The teacher's turn, and what went wrong in it, which is no fault of the worker."""
        try:
            return await self._env.show(observations, rng), ""  # type: ignore[attr-defined]
        except TeacherError as error:
            return "", str(error)

    async def score(self, rollout: Rollout, transcript: Transcript) -> Score:
        return await self._env.score(rollout, transcript)

    async def close(self) -> None:
        await self._env.close()


class HostedEnvironment:
    """One episode, opened in a worker at `reset`; `arguments` are those of the host's `open`."""

    def __init__(self, pool: WorkerPool, *arguments: Any) -> None:
        self._pool = pool
        self._arguments = arguments
        self._hosted: HostedObject | None = None
        self._read: tuple[Any, list[Message]] = (None, [])

    async def reset(self, task: Task) -> Opening:
        self._hosted = await self._pool.open(*self._arguments)
        return _expect(Opening, await self._hosted.call("reset", task), "reset")

    async def step(self, text: str) -> TimeStep:
        step, messages = _expect(tuple, await self._episode.call("step", text), "step")
        step = _expect(TimeStep, step, "step")
        self._read = (step.observation, messages)
        return step

    async def show(self, observations: Sequence[Any], rng: random.Random) -> str:
        """The turn of the environment's teacher, who sits in the worker. May raise
        `TeacherError`."""
        called = await self._episode.call("show", list(observations), rng)
        said, error = _expect(tuple, called, "show")
        if error:
            raise TeacherError(error)
        return _expect(str, said, "show")

    @property
    def subject(self) -> None:
        """It lives in the worker."""

    def format_observation(self, observation: str | list[Message]) -> list[Message]:
        """As the environment formats its own observations; those of others, which it has not seen,
        are what a user says."""
        said, messages = self._read
        if observation == said:
            return messages
        if isinstance(observation, str):
            return [{"role": "user", "content": observation}]
        return observation

    async def score(self, rollout: Rollout, transcript: Transcript) -> Score:
        return as_score(await self._episode.call("score", rollout, transcript), "of the episode")

    async def close(self) -> None:
        hosted, self._hosted = self._hosted, None
        if hosted is not None:
            try:
                await hosted.call("close")
            finally:
                hosted.close()

    @property
    def _episode(self) -> HostedObject:
        assert self._hosted is not None, "reset comes first, close last"
        return self._hosted


def _expect(kind: type[T], result: Any, method: str) -> T:
    if not isinstance(result, kind):
        raise InfrastructureError(f"{method} returned {result!r:.200}, which is no {kind.__name__}")
    return result
