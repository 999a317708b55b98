"""`ShortKind`: a class derived from `Env`, as a whole run knows it; and how a name becomes one.

    kind = load_kind("guess.py", {})     # a user's file, `module:Class`, or a name of ours
    env = kind.open(services)

Left out: the presets' own environment (presets.py) and worker processes (nanorl/hosting).
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from nanorl.envs.base import Demonstrator, Environment, EnvKind, Services, TaskSet
from nanorl.envs.env import Env
from nanorl.envs.episode import EnvEpisode
from nanorl.parsers.chat import ToolChat
from nanorl.parsers.choose import tool_chat
from nanorl.plugins import load_object
from nanorl.tasks.readers import read_tasks
from nanorl.tasks.source import GeneratedTasks, HeldoutTasks, ListTasks
from nanorl.tools.base import Tool
from nanorl.tools.function import function_tool
from nanorl.types import Task

PRESETS_OWN = "code"
"""The name of the environment that a preset trains in where nobody names another one."""

ENVIRONMENTS: Mapping[str, str] = MappingProxyType(
    {
        PRESETS_OWN: "nanorl.envs.code:CodeEnv",
        "alphabet_sort": "nanorl.envs.shipped.alphabet_sort:AlphabetSort",
        "guess": "nanorl.envs.shipped.guess:Guess",
        "humaneval": "nanorl.envs.shipped.humaneval:HumanEval",
        "math": "nanorl.envs.shipped.math:MathProblems",
        "reasoning_gym": "nanorl.envs.shipped.reasoning_gym:ReasoningGym",
        "reverse_text": "nanorl.envs.shipped.reverse_text:ReverseText",
        "search": "nanorl.envs.shipped.search:SearchCorpus",
        "wordle": "nanorl.envs.shipped.wordle:Wordle",
    }
)
"""The environments that come with the project, by the names that `--env` takes."""


class ShortKind:
    """A class derived from `Env`, with the arguments that each of its objects is made with."""

    def __init__(self, cls: type[Env], arguments: Mapping[str, Any] | None = None) -> None:
        """ValueError if the class does not take these arguments."""
        self.cls = cls
        self.arguments = dict(arguments or {})
        self.name = cls.__name__.lower()
        self._prototype = self._make()
        self.loop = self._prototype.loop
        self.defaults: Mapping[str, Any] = self._prototype.defaults
        self.tools: Sequence[Tool] = tuple(as_tool(one) for one in self._prototype.tools)
        self.has_tools = bool(self.tools)
        self.has_teacher = callable(getattr(self._prototype, "teacher", None))
        self.needs_sandbox = any(getattr(tool, "needs_sandbox", False) for tool in self.tools)
        self._chats: dict[int, ToolChat] = {}

    def tasks(self, seed: int) -> TaskSet:
        """ValueError if the class says nothing of its tasks."""
        env = self._episode_env()
        if env.data is not None:
            return ListTasks(read_tasks(env.data), seed, name=self.name)
        if type(env).tasks is Env.tasks:
            raise ValueError(
                f"{self.cls.__name__} has no tasks: define `tasks(self, rng)`, set `data` to a "
                "file, or name a file with --tasks"
            )
        if "rng" in inspect.signature(env.tasks).parameters:
            return GeneratedTasks({self.name: env.tasks}, seed)
        list_tasks: Any = env.tasks
        listed = read_tasks(list_tasks())
        if env.evaluation_only:
            return HeldoutTasks(listed, seed, name=self.name, reason=env.evaluation_only)
        return ListTasks(listed, seed, name=self.name)

    def open(self, services: Services) -> Environment:
        return EnvEpisode(self._episode_env(), self.tools, self._chat(services), services)

    def demonstrator(self, task: Task, rng: random.Random) -> Demonstrator:
        env = self._episode_env()
        env.task = task
        return _Shown(env, rng)

    def close(self) -> None:
        """Close what `setup` made."""
        close = getattr(self.__dict__.get("_shared"), "close", None)  # nobody may have asked for it
        if callable(close):
            close()

    @cached_property
    def _shared(self) -> Any:
        return self._prototype.setup()

    def _episode_env(self) -> Env:
        env = self._make()
        env.shared = self._shared
        return env

    def _make(self) -> Env:
        try:
            inspect.signature(self.cls).bind(**self.arguments)
        except TypeError as error:
            raise ValueError(
                f"--env-args {self.arguments}: {self.cls.__name__} does not take them: {error}"
            ) from None
        return self.cls(**self.arguments)

    def _chat(self, services: Services) -> ToolChat | None:
        if not self.tools:
            return None
        key = id(services.tokenizer)
        if key not in self._chats:
            self._chats[key] = tool_chat(services.tokenizer, self.tools, self._prototype.parser)
        return self._chats[key]


class _Shown:
    """A demonstrator that asks the environment's `teacher`."""

    def __init__(self, env: Env, rng: random.Random) -> None:
        self._env, self._rng = env, rng

    def next_action(self, history: Sequence[str]) -> str:
        return self._env.teacher(list(history), self._rng)  # type: ignore[attr-defined]


def load_kind(spec: str, arguments: Mapping[str, Any]) -> EnvKind:
    """The environment that `--env` names."""
    found = load_object(spec, what="env", known=ENVIRONMENTS, fits=is_environment)
    return as_kind(found, arguments)


def as_kind(given: Any, arguments: Mapping[str, Any] | None = None) -> EnvKind:
    """The kind of a class, or of an object that is one already."""
    if isinstance(given, type) and issubclass(given, Env):
        return ShortKind(given, arguments)
    if callable(getattr(given, "open", None)) and callable(getattr(given, "tasks", None)):
        return given
    raise ValueError(f"{given!r} is no environment: derive a class from nanorl.Env")


def as_tool(given: Tool | Callable[..., Any]) -> Tool:
    """A tool as it is, or a function as one."""
    return given if hasattr(given, "schema") else function_tool(given)  # type: ignore[return-value]


def is_environment(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Env) and value is not Env


def parse_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """`["family=chain_sum", "level=2"]` as arguments; values are JSON, or else texts."""
    arguments = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--env-args {pair}: write name=value")
        try:
            arguments[name] = json.loads(text)
        except json.JSONDecodeError:
            arguments[name] = text
    return arguments
