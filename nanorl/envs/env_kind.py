"""An environment as a whole run knows it: where its tasks come from, how an episode is opened, and
who can show how a task is played.

Left out: one episode (base.py), and how a name becomes a kind (catalog.py).
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.envs.base import Environment, Services
from nanorl.task import Task


class TaskSet(Protocol):
    """The tasks of a run, as functions of the arguments: resuming needs no state."""

    @property
    def fingerprint(self) -> str:
        """A hash of the tasks where they come from data, which a resumed run must find again; empty
        for tasks that follow from the options."""
        ...

    def batch(self, step: int, n: int) -> Sequence[Task]:
        """The `n` training tasks of a step."""
        ...

    def heldout(self, n: int, seed: int) -> Sequence[Task]:
        """Up to `n` different tasks that are never trained on."""
        ...


class Demonstrator(Protocol):
    """Plays one episode by a script, for the supervised steps before RL."""

    def next_action(self, history: Sequence[Any]) -> str | Awaitable[str]:
        """The text of the next turn, given all observations so far: texts, or lists of parts where
        they show pictures (`observed` of images.py). May raise `TeacherError`."""
        ...


async def shown_action(demonstrator: Demonstrator, history: Sequence[Any]) -> str:
    """The next turn of a demonstrator, whether or not it has to wait for its episode."""
    said = demonstrator.next_action(history)
    return said if isinstance(said, str) else await said


class EnvKind(Protocol):
    """An environment as a whole run knows it."""

    @property
    def name(self) -> str: ...

    @property
    def loop(self) -> str:
        """The agent loop that plays its episodes, where a task names none."""
        ...

    @property
    def has_tools(self) -> bool: ...

    @property
    def needs_sandbox(self) -> bool: ...

    @property
    def has_teacher(self) -> bool:
        """True where somebody can show how tasks are played, so that a warm start is possible."""
        ...

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Options of a run by their names ("agent.max_turns"), where the user gives none."""
        ...

    def tasks(self, seed: int) -> TaskSet: ...

    def open(self, services: Services) -> Environment:
        """An episode of it."""
        ...

    def demonstrator(
        self, task: Task, rng: random.Random, tokenizer: ChatTokenizer, episode: Environment
    ) -> Demonstrator:
        """Return the demonstrator of a task, where the environment has a teacher, in the form in
        which the model of `tokenizer` writes calls. `episode` is the one that it plays in."""
        ...

    def close(self) -> None: ...
