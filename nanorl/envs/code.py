"""The code environment, which both presets train in: the policy writes programs, reads what they
print, and answers.

The hidden answer never comes to the sandbox in any form: programs see the task's `files`, and
nothing else.
Left out: the tasks, which are drawn from a preset's family (nanorl/envs/tasks/family.py), and the
teacher that shows how the tool is used (tasks/teachers.py); a preset brings both.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.chat import ToolChat
from nanorl.envs.actions import ActionFormat
from nanorl.envs.base import Environment, Services
from nanorl.envs.env import Done, Env
from nanorl.envs.env_episode import EnvEpisode
from nanorl.envs.tools.python import PythonTool, python
from nanorl.task import Task


class CodeEnv(Env):
    """One episode of writing code, reading its output and answering, in the written form `form`."""

    tools = (python,)

    def __init__(self, form: ActionFormat) -> None:
        self.parser = self.form = form

    def step(self, text: str) -> Done:
        answer = self.form.answer_in(text)
        if answer is None:
            # Neither a program nor an answer: the episode ends, for nothing would answer it.
            self.metric("num_no_action")
        return self.done(answer=answer)


class TaskFamily(Protocol):
    """A source of tasks, such as `nanorl.envs.tasks.family.Family`."""

    def tasks(self, seed: int) -> Any:
        """A `TaskSet` (env_kind.py)."""
        ...


class Teacher(Protocol):
    """Somebody who knows how tasks are played, such as `TeacherConfig` (tasks/teachers.py)."""

    def script(self, form: ActionFormat, task: Task, rng: random.Random) -> Any:
        """A `Demonstrator` (env_kind.py) of one trace."""
        ...


@dataclass(frozen=True, kw_only=True)
class CodeKind:
    """The code environment over one family of generated tasks."""

    form: ActionFormat
    family: TaskFamily
    teacher: Teacher
    name: str = "code"
    loop: str = "tool"
    has_tools: bool = True
    needs_sandbox: bool = True
    has_teacher: bool = True
    tool: PythonTool = python

    @property
    def defaults(self) -> Mapping[str, Any]:
        return {}

    def tasks(self, seed: int) -> Any:
        return self.family.tasks(seed)

    def open(self, services: Services) -> Environment:
        # The tool has no state, so all episodes share the one object.
        return EnvEpisode(CodeEnv(self.form), (self.tool,), self.chat(services.tokenizer), services)

    def chat(self, tokenizer: ChatTokenizer) -> ToolChat:
        """The form in which any model is told of the tool and calls it."""
        return ToolChat(parser=self.form, description=self.form.system)

    def demonstrator(
        self, task: Task, rng: random.Random, tokenizer: ChatTokenizer, episode: Environment
    ) -> Any:
        return self.teacher.script(self.form, task, rng)

    def close(self) -> None:
        """It holds nothing."""
