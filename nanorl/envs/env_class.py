"""`EnvClassKind`: a class derived from `Env`, as a whole run knows it.

Left out: how a name becomes one (catalog.py) and worker processes (nanorl/envs/hosting).
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.chat import ToolChat
from nanoinfer.chat.choose import tool_chat
from nanorl.envs.base import Environment, Services
from nanorl.envs.env import Env
from nanorl.envs.env_episode import EnvEpisode
from nanorl.envs.env_kind import Demonstrator, TaskSet
from nanorl.envs.hooks import check_hooks, tools_of
from nanorl.envs.tasks.readers import read_tasks
from nanorl.envs.tasks.source import GeneratedTasks, HeldoutTasks, ListTasks
from nanorl.envs.tools.base import Tool
from nanorl.envs.tools.function import bind_tools
from nanorl.plugins import where_raised
from nanorl.task import Task


class EnvClassKind:
    """A class derived from `Env`, with the arguments that each of its objects is made with."""

    def __init__(self, cls: type[Env], arguments: Mapping[str, Any] | None = None) -> None:
        """ValueError if the class does not take these arguments, or has a misspelt method."""
        self.cls = cls
        self.arguments = dict(arguments or {})
        self.name = cls.__name__.lower()
        check_hooks(cls)
        self._prototype = self._make()
        self.loop = self._prototype.loop
        self.defaults: Mapping[str, Any] = self._prototype.defaults
        self.tools: Sequence[Tool] = tools_of(self._prototype)
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
        chat = self.chat(services.tokenizer)
        env = self._episode_env()
        return EnvEpisode(env, bind_tools(self.tools, env), chat, services)

    def chat(self, tokenizer: ChatTokenizer) -> ToolChat | None:
        """The form in which the model of `tokenizer` is told of the tools and calls them; None
        where there are no tools."""
        if not self.tools:
            return None
        key = id(tokenizer)
        if key not in self._chats:
            self._chats[key] = tool_chat(tokenizer, self.tools, self._prototype.parser)
        return self._chats[key]

    def demonstrator(
        self, task: Task, rng: random.Random, tokenizer: ChatTokenizer, episode: Environment
    ) -> Demonstrator:
        return _Shown(episode, rng)

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
            takes = inspect.signature(self.cls)
            raise ValueError(
                f"--env-args {self.arguments}: {self.cls.__name__} does not take them: {error}; "
                f"it takes {takes}"
            ) from None
        try:
            return self.cls(**self.arguments)
        except (ValueError, OSError):  # says what is wrong in its own words
            raise
        except Exception as error:  # a plug-in boundary
            raise ValueError(
                f"{self.cls.__name__} cannot be made with --env-args {self.arguments}: "
                f"{type(error).__name__}: {error}{where_raised(error)}"
            ) from error


class _Shown:
    """A demonstrator that has the episode's own object ask its `teacher`."""

    def __init__(self, episode: Any, rng: random.Random) -> None:
        self._episode, self._rng = episode, rng

    async def next_action(self, history: Sequence[Any]) -> str:
        said: str = await self._episode.show(list(history), self._rng)
        return said
