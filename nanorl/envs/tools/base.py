"""The contract of a tool: a name, an OpenAI function schema, and `run`, which answers with text.

    class Echo:
        name = "echo"
        schema = {"type": "function", "function": {"name": "echo", "parameters": {...}}}

        async def run(self, context, arguments):
            return arguments["text"]

A tool object is shared by all episodes of a process; what belongs to one episode is in its
`ToolContext`. A call ends in one of four ways:

    text, or `Shown`      the observation, and pictures beside it
    ToolError             an observation too: the call was wrong, the text tells the model how
    Submitted             the episode is over, with this answer; `Env.done(...)` says the same
    InfrastructureError   nobody's fault but ours: the rollout is FAILED and is played again

Left out: reading calls from text (nanoinfer.chat).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from nanoinfer.chat.base import Described
from nanorl.sandbox.base import Sandbox
from nanorl.task import Task
from nanorl.types import InfrastructureError


def tool_schema(
    name: str, about: str, properties: Mapping[str, Any], optional: Collection[str] = ()
) -> dict[str, Any]:
    """The schema of a tool that takes these arguments and no others."""
    needed = [one for one in properties if one not in optional]
    parameters: dict[str, Any] = {"type": "object", "properties": dict(properties)}
    parameters |= {"required": needed, "additionalProperties": False}
    function = {"name": name, "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


class ToolError(ValueError):
    """The call cannot be answered as it stands; the message is written for the model."""


class Submitted(Exception):  # noqa: N818 - the end of an episode, not an error
    """Raised by a tool that ends the episode: `raise Submitted("42")`. With a `reward` that is the
    whole episode's; without one the answer is judged."""

    def __init__(self, answer: str | None = None, reward: float | None = None) -> None:
        super().__init__(answer)
        self.answer, self.reward = answer, reward


@dataclass(frozen=True, kw_only=True)
class Done:
    """The end of an episode, as `Env.done` returns it."""

    reward: float | None
    answer: str | None


@dataclass(frozen=True, eq=False)
class Shown:
    """A result with pictures (`nanorl.Image`) beside its text."""

    text: str
    pictures: list[Any]


@dataclass(kw_only=True, eq=False)
class ToolContext:
    """The state that the tools of one episode share. `close()` ends what they opened."""

    task: Task
    sandbox: Sandbox | None = None
    """Runs single programs; None where the environment has no tool that needs one."""
    timeout_s: float = 30.0
    """Wall-clock limit of one call."""
    open_session: Callable[[], Awaitable[Any]] | None = None
    """Opens the episode's session (a workspace and processes that stay from call to call)."""
    metrics: Counter[str] = field(default_factory=Counter)
    """What tools count; the environment takes it after every turn."""
    opened: dict[Any, Closing] = field(default_factory=dict)
    """What tools hold for this episode, each under a key of its own."""
    _session: Any = field(default=None, init=False, repr=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s}: must be positive")

    async def session(self) -> Any:
        """The session of this episode, opened by the first call that asks for it."""
        async with self._lock:  # calls of one turn run side by side
            if self._session is None:
                if self.open_session is None:
                    raise InfrastructureError(
                        "a tool asked for a session, and this environment opens none: "
                        "give its ToolContext `open_session`"
                    )
                self._session = await self.open_session()
            return self._session

    async def close(self) -> None:
        """Close the session, if one was opened, and what else tools hold; safe to call twice."""
        async with self._lock, AsyncExitStack() as stack:  # all are closed, even if one fails
            # Taken away first, so that a second `close` finds nothing to end twice.
            session, self._session = self._session, None
            opened, self.opened = self.opened, {}
            for one in opened.values():
                stack.push_async_callback(one.close)
            if session is not None:
                stack.push_async_callback(session.close)


class Closing(Protocol):
    """Something that an episode holds until its end."""

    async def close(self) -> None: ...


class Tool(Described, Protocol):
    """Something that an agent may call."""

    async def run(self, context: ToolContext, arguments: Mapping[str, Any]) -> str | Shown:
        """Answer one call. `arguments` are what the model wrote: check them here."""
        ...
