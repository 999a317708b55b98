"""The contract of a parser: it reads calls of tools out of a turn, writes them, and shows results.

    parser.read('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall("add", {"a": 1})]

`read` never raises and loses no call: a malformed one stands in its place as the `ToolCallError`
whose text the model reads. It undoes `write`, and forgives what a model adds around a call.
Left out: whether the tool exists and takes these arguments (nanorl/envs/tools/base.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nanoengine.text.chat_template import Message


class Described(Protocol):
    """The description of a tool that a model is given, whoever runs the tool."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> dict[str, Any]:
        """`{"type": "function", "function": {"name", "description", "parameters"}}`."""
        ...


class ToolCallError(ValueError):
    """The call cannot be read; the message is written for the model."""


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it: `ToolCall("add", {"a": 1, "b": 2})`."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = field(default="", compare=False)
    """That the model wrote with it, as Mistral's do; empty where it wrote none."""


class Parser(Protocol):
    """The written form of calls and results. It has no state: one object serves all episodes."""

    @property
    def name(self) -> str: ...

    def read(self, text: str) -> list[ToolCall | ToolCallError]:
        """The calls of one turn in their order; empty where the turn has none."""
        ...

    def write(self, call: ToolCall) -> str:
        """The text of one call: what a teacher says."""
        ...

    def describe(self, tools: Sequence[Described]) -> str:
        """The text of the system prompt about the tools, where the chat template cannot list
        them."""
        ...

    def observation(self, results: Sequence[str]) -> list[Message]:
        """The messages that bring the results of one turn's calls back, in their order."""
        ...
