"""The code environment, which both presets train in: the policy writes programs, reads what they
print, and answers.

The hidden answer never comes to the sandbox in any form: programs see the task's `files`, and
nothing else. Tasks are drawn from the preset's families; a sloppy teacher shows how the tool is
used.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.chat import ToolChat
from nanorl.envs.actions import ActionFormat
from nanorl.envs.base import Demonstrator, Environment, Services, TaskSet
from nanorl.envs.env import Done, Env
from nanorl.envs.episode import EnvEpisode
from nanorl.tasks.problem import Family, generators_of
from nanorl.tasks.source import GeneratedTasks
from nanorl.tasks.teachers import SloppyTeacher, TeacherConfig
from nanorl.tools.python import python
from nanorl.types import Task


class CodeEnv(Env):
    """One episode of writing code, reading its output and answering, in the written form `form`."""

    tools = (python,)

    def __init__(self, form: ActionFormat) -> None:
        self.parser = self.form = form

    def step(self, text: str) -> Done:
        answer = self.form.answer_in(text)
        if answer is None:
            self.metric("num_no_action")
        return self.done(answer=answer)


@dataclass(frozen=True, kw_only=True)
class CodeKind:
    """The code environment over one family of generated tasks."""

    form: ActionFormat
    family: Family
    teacher: TeacherConfig
    name: str = "code"
    loop: str = "tool"
    has_tools: bool = True
    needs_sandbox: bool = True
    has_teacher: bool = True

    @property
    def defaults(self) -> Mapping[str, Any]:
        return {}

    def tasks(self, seed: int) -> TaskSet:
        return GeneratedTasks(generators_of([self.family]), seed)

    def open(self, services: Services) -> Environment:
        return EnvEpisode(CodeEnv(self.form), (python,), self.chat(services.tokenizer), services)

    def chat(self, tokenizer: ChatTokenizer) -> ToolChat:
        """How the tool is told of and called, by any model."""
        return ToolChat(parser=self.form, description=self.form.system)

    def demonstrator(
        self, task: Task, rng: random.Random, tokenizer: ChatTokenizer, episode: Environment
    ) -> Demonstrator:
        return SloppyTeacher(self.form, self.teacher).trace(task, rng)

    def close(self) -> None:
        """It holds nothing."""
