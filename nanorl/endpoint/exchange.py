"""What a client asks for and gets, in no dialect: `Call`, `Answer`; and the contract of a dialect.

A dialect reads a body into a `Call` and writes an `Answer` back; it has no state, samples nothing
and never touches a token. Left out: which tokens a call stands for (recording.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nanoengine.model.chat_template import Message
from nanoinfer.params import Grammar, Output
from nanoinfer.server.http_io import ApiError

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request of a client.

    Call(messages=[{"role": "user", "content": "2+2?"}], max_tokens=16)
    """

    messages: list[Message]
    """As chat templates read them: `content` is a text; an assistant's `tool_calls` are
    `{"id", "type": "function", "function": {"name", "arguments": {...}}}`; a result of one is of
    role "tool" with a `tool_call_id`. Reasoning that a client sends back is left out."""
    tools: list[Json] = field(default_factory=list)
    """Those offered, as `{"type": "function", "function": {"name", "description", "parameters"}}`.
    """
    forced_tool: str | None = None
    """The answer must be a call of this tool, or of any where it is empty; None: as it likes."""
    max_tokens: int | None = None
    """None leaves it to the limits of the episode."""
    n: int = 1
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    """What the answer's text must match, as a JSON schema."""
    num_top: int | None = None
    """Likeliest tokens to report at each position; None: no log-probs at all."""
    is_streamed: bool = False
    has_usage: bool = False
    """A stream ends with the numbers of tokens, in dialects that do so only when asked."""
    continues: str = ""
    """The id of the answer that the conversation goes on from: `messages` are then those after it.
    """
    ignored: tuple[str, ...] = ()
    """Names of given fields that the run decides, not the client: temperature, top_p, seed."""


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """A call of a tool in an answer: `ToolUse(id="call_1", name="add", arguments='{"a": 1}')`."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One choice of an answer."""

    text: str
    """What it says, without reasoning and calls; it may be empty."""
    reasoning: str = ""
    """The text inside of `<think>`, where the model wrote one."""
    calls: tuple[ToolUse, ...] = ()
    output: Output
    """The engine's own: ids, log-probs, versions."""
    stop_text: str | None = None
    """The text of `Call.stop` that ended it."""

    @property
    def is_cut(self) -> bool:
        """A limit ended it."""
        return self.output.finish_reason == "length"


def message_of(reply: Reply) -> Message:
    """The message of a conversation that a reply is: `Call.messages` has it when it comes back."""
    message: Json = {"role": "assistant", "content": reply.text}
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": use.id,
                "type": "function",
                "function": {"name": use.name, "arguments": read_arguments(use.arguments)},
            }
            for use in reply.calls
        ]
    return message


def read_arguments(text: str) -> Any:
    """The arguments of a call as chat templates read them; what is no JSON stays as written."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the engine said to a call."""

    id: str
    """Unique, of letters and digits; a dialect puts its own prefix in front."""
    model: str
    created: int
    """Unix time."""
    num_prompt_tokens: int
    replies: list[Reply]

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(reply.output.ids) for reply in self.replies)


@dataclass(frozen=True)
class Event:
    """A server-sent event: `data` as JSON, or as it is where it is a text ("[DONE]")."""

    data: Json | str
    name: str | None = None
    """Of an `event:` line; None: there is none."""


class Dialect(Protocol):
    """An API in which calls are made."""

    @property
    def path(self) -> str:
        """Where it is served, behind the episode's base URL: "/v1/chat/completions"."""
        ...

    def key(self, headers: Mapping[str, str]) -> str:
        """The API key of a request; empty without one. Names of headers are lower-case."""
        ...

    def read(self, body: Json) -> Call:
        """The call. ApiError 400 names the field that cannot be, and what can."""
        ...

    def write(self, call: Call, answer: Answer) -> Json:
        """The body of an answer that is not streamed."""
        ...

    def events(self, call: Call, answer: Answer) -> Iterator[Event]:
        """The same as a stream, from its first event to its last."""
        ...

    def error(self, error: ApiError) -> Json:
        """The body of an error, in the API's own form."""
        ...
