"""A plain class whose public methods are the tools: the shape of TRL's `environment_factory`.

    class Counter:
        def reset(self, **task):
            self.count = 0

        def add(self, amount: int) -> str:
            '''Add to the counter.

            Args:
                amount: how much
            '''
            self.count += amount
            return str(self.count)

        def score(self):
            return float(self.count == 7)

An object is one episode. `reset` is given the fields of the task by name, and may return a text to
put behind the prompt. The tasks come from --tasks, or from `tasks` as in `nanorl.Env`. The score is
`score()`, or the attribute `reward`, or else the answer's equality with the task's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Real
from typing import Any

from nanoengine.text.chat_template import Message
from nanorl.envs.base import Environment, Services
from nanorl.envs.env import Env
from nanorl.envs.env_class import EnvClassKind
from nanorl.envs.env_episode import EnvEpisode
from nanorl.envs.images import with_text
from nanorl.envs.rewards.base import Transcript
from nanorl.envs.tools.function import NOT_TOOLS, bind_tools, method_tools


def is_tool_class(value: Any) -> bool:
    """True for a class that resets, has another public method, and is no `Env`."""
    return (
        isinstance(value, type)
        and not issubclass(value, Env)
        and callable(getattr(value, "reset", None))
        and not hasattr(value, "step")
        and bool(_tool_names(value))
    )


class ToolClassKind(EnvClassKind):
    """Such a class, as a whole run knows it."""

    def __init__(self, cls: type, arguments: Mapping[str, Any] | None = None) -> None:
        """ValueError where a method's signature cannot be a tool's."""
        self.plain = cls
        self.plain_arguments = dict(arguments or {})
        super().__init__(_env_of(cls))
        self.name = cls.__name__.lower()
        self.tools = tuple(method_tools(self._make_plain()))
        self.has_tools = True

    def open(self, services: Services) -> Environment:
        env = self._episode_env()
        assert isinstance(env, ToolClassEnv)
        env.plain = self._make_plain()
        tools = bind_tools(self.tools, env.plain)
        return EnvEpisode(env, tools, self.chat(services.tokenizer), services)

    def _make_plain(self) -> Any:
        try:
            return self.plain(**self.plain_arguments)
        except TypeError as error:
            raise ValueError(f"--env-args {self.plain_arguments}: {error}") from None


class ToolClassEnv(Env):
    """The short form around an object of such a class."""

    plain: Any

    @property
    def subject(self) -> Any:
        return self.plain

    def reset(self) -> list[Message]:
        fields = {"prompt": self.task.prompt, "answer": self.task.answer, **self.task.data}
        parameters = inspect.signature(self.subject.reset).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        said = self.subject.reset(
            **{name: value for name, value in fields.items() if takes_all or name in parameters}
        )
        *before, last = self.task.messages()
        return [*before, with_text(last, said, between="") if said else last]

    def score(self, transcript: Transcript) -> Any:
        if callable(getattr(self.subject, "score", None)):
            return self.subject.score()
        if isinstance(reward := getattr(self.subject, "reward", None), Real):
            return float(reward)
        return super().score(transcript)

    def close(self) -> Any:
        close = getattr(self.subject, "close", None)
        return close() if callable(close) else None


def _env_of(cls: type) -> type[ToolClassEnv]:
    """The short form with what the class says of itself as a whole."""
    names = ("system", "parser", "loop", "data", "defaults", "tasks", "teacher", "setup")
    own = {name: vars(cls)[name] for name in names if name in vars(cls)}
    if "teacher" in own:
        own["teacher"] = _teacher
    return type(cls.__name__, (ToolClassEnv,), {"__module__": cls.__module__, **own})


def _teacher(self: ToolClassEnv, observations: Any, rng: Any) -> Any:
    """The class's own, asked of the object that plays, which finds `self.task` as in an `Env`."""
    if not hasattr(self.plain, "task"):
        self.plain.task = self.task
    return self.plain.teacher(observations, rng)


def _tool_names(cls: type) -> list[str]:
    return [
        name
        for name in dir(cls)
        if not name.startswith("_")
        and name not in NOT_TOOLS
        and inspect.isroutine(getattr(cls, name))
    ]
