"""`EnvMix`: several environments in one run, as one kind.

    mix = EnvMix({"sums": EnvClassKind(Sums), "maze": EnvClassKind(Maze)}, {"sums": 2, "maze": 1})
    [task] = mix.tasks(seed=0).batch(7, 1)      # task.task_id "sums/task-1f2e...", kind "sums/task"

A task says in its id and in its kind which environment it is of, so whatever counts by kind counts
by environment, and whoever plays it again finds the way. The environment itself is given its own
task, as if it were alone.

Tasks are drawn in blocks of `BLOCK`: for a start u of (seed, block), the places (i + u) / BLOCK are
put on the line of the cumulated shares, which gives each environment its share of the block to
within one task, and exactly on average (systematic sampling); then they are shuffled. So the
environment of a task is a function of the seed and of the task's number, and no state is kept. The
task of number i is the environment's own of number i: lists are gone through with gaps.
Left out: limits and agent loops of each environment (options/env_mix.py, agents/mixed_agent.py).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.envs.base import Environment, Opening, Services, TimeStep
from nanorl.envs.env_kind import Demonstrator, EnvKind, TaskSet
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.envs.tools.base import Tool
from nanorl.task import Task
from nanorl.types import Rollout

BLOCK = 12
SEPARATOR = "/"


def environment_of(name: str) -> str:
    """The environment that a task's id or kind begins with; "" in a run of a single one."""
    first, separator, _ = name.partition(SEPARATOR)
    return first if separator else ""


def marked(task: Task, name: str) -> Task:
    """The task with its environment in id and kind."""
    return replace(
        task,
        kind=f"{name}{SEPARATOR}{task.kind}",
        task_id=f"{name}{SEPARATOR}{task.task_id}",
    )


def unmarked(task: Task) -> Task:
    """The task as its environment made it."""
    return replace(
        task,
        kind=task.kind.partition(SEPARATOR)[2],
        task_id=task.task_id.partition(SEPARATOR)[2],
    )


class MixedTasks:
    """The tasks of several sources, drawn by weights."""

    def __init__(
        self,
        sources: Mapping[str, TaskSet],
        weights: Mapping[str, float],
        seed: int,
        *,
        taught: Collection[str] = (),
    ) -> None:
        """`weights` are relative; `taught` names the sources of which somebody can show how tasks
        are played."""
        self.sources, self.weights, self.seed = sources, weights, seed
        self._taught = taught
        prints = {name: source.fingerprint for name, source in sources.items()}
        listed = "\n".join(f"{name} {one}" for name, one in sorted(prints.items()) if one)
        self.fingerprint = hashlib.sha256(listed.encode()).hexdigest() if listed else ""

    @property
    def taught(self) -> MixedTasks:
        """The same without sources that have no teacher, for a warm start."""
        sources = {name: one for name, one in self.sources.items() if name in self._taught}
        return MixedTasks(sources, self.weights, self.seed, taught=self._taught)

    def batch(self, step: int, n: int) -> list[Task]:
        """The `n` tasks of a step, the same ones in every call and process."""
        return [self.candidates(step * n + i, 1)[0] for i in range(n)]

    def candidates(self, number: int, n: int) -> list[Task]:
        """The `n` tasks that a curriculum may choose from as task `number` of the run: all of the
        environment whose turn it is, so that its choice leaves the shares as they are."""
        name = self.environment_at(number)
        return [marked(task, name) for task in self.sources[name].batch(number, n)]

    def heldout(self, n: int, seed: int) -> list[Task]:
        """Up to `n` held-out tasks, of each environment in proportion to its weight, in the whole
        list and in every beginning of it; where one has too few, the others fill its places."""
        left = {name: list(source.heldout(n, seed)) for name, source in self.sources.items()}
        counts = dict.fromkeys(left, 0)
        total = sum(self.weights[name] for name in left)
        found: list[Task] = []
        while len(found) < n and any(left.values()):
            behind = {
                name: self.weights[name] / total * (len(found) + 1) - counts[name]
                for name, tasks in left.items()
                if tasks
            }
            name = max(behind, key=lambda one: behind[one])  # of equals the first
            counts[name] += 1
            found.append(marked(left[name].pop(0), name))
        return found

    def environment_at(self, index: int) -> str:
        """The environment of the task of that number."""
        block, place = divmod(index, BLOCK)
        rng = random.Random(f"environments {self.seed} {block}")
        start = rng.random()
        places = [(i + start) / BLOCK for i in range(BLOCK)]
        rng.shuffle(places)
        names = list(self.sources)
        at = places[place] * sum(self.weights[name] for name in names)
        for name in names:
            at -= self.weights[name]
            if at < 0:
                return name
        return names[-1]  # where rounding left nothing of the line


class EnvMix:
    """Several environments as one kind. What only one of them has, the mix has."""

    def __init__(self, members: Mapping[str, EnvKind], weights: Mapping[str, float]) -> None:
        """`members` by their names, `weights` of each, relative."""
        self.members, self.weights = members, weights
        kinds = list(members.values())
        self.name = "+".join(members)
        self.loop = kinds[0].loop  # of a member: options/agent_kit.py asks each for its own
        self.has_tools = any(kind.has_tools for kind in kinds)
        self.needs_sandbox = any(kind.needs_sandbox for kind in kinds)
        self.has_teacher = any(kind.has_teacher for kind in kinds)
        self.defaults: Mapping[str, Any] = {}  # likewise (options/env_mix.py)

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools of all."""
        inner = (getattr(kind, "kind", kind) for kind in self.members.values())
        return [tool for kind in inner for tool in getattr(kind, "tools", ())]

    def each(self, change: Callable[[str, EnvKind], EnvKind]) -> EnvMix:
        """The mix of what `change` makes of each name and member."""
        changed = {name: change(name, kind) for name, kind in self.members.items()}
        return EnvMix(changed, self.weights)

    def member_of(self, task_id: str) -> EnvKind:
        """The environment of a task. ValueError where it is of none."""
        name = environment_of(task_id)
        if name not in self.members:
            raise ValueError(
                f"the task {task_id!r} is of no environment of this run, which has "
                f"{', '.join(self.members)}: its id begins with one of them and {SEPARATOR}"
            )
        return self.members[name]

    def tasks(self, seed: int) -> MixedTasks:
        sources = {name: kind.tasks(seed) for name, kind in self.members.items()}
        taught = [name for name, kind in self.members.items() if kind.has_teacher]
        return MixedTasks(sources, self.weights, seed, taught=taught)

    def open(self, services: Services) -> Environment:
        return MixedEpisode(self, services)

    def demonstrator(
        self, task: Task, rng: random.Random, tokenizer: ChatTokenizer, episode: Environment
    ) -> Demonstrator:
        member = self.member_of(task.task_id)
        return member.demonstrator(unmarked(task), rng, tokenizer, episode)

    def close(self) -> None:
        for kind in self.members.values():
            kind.close()


class MixedEpisode:
    """An episode of the environment that its task is of, which `reset` says."""

    def __init__(self, mix: EnvMix, services: Services) -> None:
        self._mix, self._services = mix, services
        self._opened: Environment | None = None

    async def reset(self, task: Task) -> Opening:
        self._opened = self._mix.member_of(task.task_id).open(self._services)
        return await self._opened.reset(unmarked(task))

    async def step(self, text: str) -> TimeStep:
        return await self._episode.step(text)

    async def show(self, observations: Sequence[Any], rng: random.Random) -> str:
        said: str = await self._episode.show(observations, rng)  # type: ignore[attr-defined]
        return said

    @property
    def subject(self) -> Any:
        return self._episode.subject

    def format_observation(self, observation: str | list[Message]) -> list[Message]:
        return self._episode.format_observation(observation)

    async def score(self, rollout: Rollout, transcript: Transcript) -> Score:
        return await self._episode.score(rollout, transcript)

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    @property
    def _episode(self) -> Environment:
        assert self._opened is not None, "reset comes first"
        return self._opened
