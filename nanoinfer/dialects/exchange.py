"""What a client asks for and gets, in no dialect: `ApiCall` and `ApiAnswer`; and what a dialect is.

A dialect reads a body into an `ApiCall` and writes an `ApiAnswer` back; it has no state, samples
nothing and never touches a token. Left out: which tokens a call stands for (recording.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from nanoengine.text.chat_template import Message
from nanoinfer.http.api_error import ApiError
from nanoinfer.params import Grammar, Output
from nanoinfer.server.media import PictureTaker

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ToolForm:
    """A tool as its client knows it, where a model is offered it as a plain function."""

    name: str
    namespace: str | None = None
    """The set of tools that it is one of."""
    is_freeform: bool = False
    """The client wants a text instead of arguments: the one argument, `input`, of the function."""


@dataclass(frozen=True, kw_only=True)
class ApiCall:
    """One request of a client.

    ApiCall(messages=[{"role": "user", "content": "2+2?"}], max_tokens=16)
    """

    messages: list[Message]
    """As chat templates read them: `content` is a text, or a list of texts and pictures,
    `{"type": "image", "sha256"}`; an assistant's `tool_calls` are
    `{"id", "type": "function", "function": {"name", "arguments": {...}}}`; a result of one is of
    role "tool" with a `tool_call_id`. Reasoning that comes back is an assistant's
    `reasoning_content`."""
    tools: list[Json] = field(default_factory=list)
    """Those offered, as `{"type": "function", "function": {"name", "description", "parameters"}}`.
    """
    forced_tool: str | None = None
    """The answer must be a call of this tool, or of any where it is empty; None: as it likes."""
    tool_forms: Mapping[str, ToolForm] = field(default_factory=dict)
    """By their names in `tools`: those that the client knows otherwise."""
    variables: Json = field(default_factory=dict)
    """For the chat template, beside the run's own."""
    max_tokens: int | None = None
    """None leaves it to the limits of the episode."""
    min_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    """What the answer's text must match, as a JSON schema."""
    num_top: int | None = None
    """Likeliest tokens to report at each position; None: no log-probs at all."""
    is_streamed: bool = False
    has_usage: bool = False
    """A stream ends with the numbers of tokens, in dialects that do so only when asked."""
    has_reasoning: bool = True
    """The answer shows what the model thought."""
    continues: str = ""
    """The id of the answer that the conversation goes on from: `messages` are then those after it.
    """
    has_instructions: bool = False
    """The first of `messages` is a system message of this call alone: a call that continues it has
    its own, or none."""
    ignored: tuple[str, ...] = ()
    """Names of given fields that the run decides, not the client: temperature, top_p, seed; and of
    tools that are not offered, since the API's own server would run them: web_search."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The fields that a run decides with what was given, which a server goes by:
    {"temperature": 0.7}."""
    is_kept: bool = False
    """A later call may go on from the answer, by its id."""

    @property
    def has_bare_calls(self) -> bool:
        """A schema rules the whole answer, so calls are JSON without the model's frame."""
        has_schema = self.grammar is not None and self.grammar.kind == "json_schema"
        return self.forced_tool is not None or (has_schema and bool(self.tools))


@dataclass(frozen=True, kw_only=True)
class ApiToolCall:
    """A call in an answer: `ApiToolCall(id="call_1", name="add", arguments='{"a": 1}')`."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


@dataclass(frozen=True, kw_only=True)
class ApiReply:
    """One choice of an answer."""

    text: str
    """What it says, without reasoning and calls; it may be empty."""
    reasoning: str = ""
    """The text inside of `<think>`, where the model wrote one."""
    calls: tuple[ApiToolCall, ...] = ()
    output: Output
    """The engine's own: ids, log-probs, versions."""
    stop_text: str | None = None
    """The text of `ApiCall.stop` that ended it."""

    @property
    def is_cut(self) -> bool:
        """A limit ended it, or whoever controls the engine."""
        return self.output.finish_reason != "stop"


def message_of(reply: ApiReply) -> Message:
    """The message that a reply is in a conversation: `ApiCall.messages` has it later."""
    return assistant_message(reply.text, reply.calls, reply.reasoning)


def assistant_message(text: str, calls: Sequence[ApiToolCall], reasoning: str = "") -> Message:
    """A turn of the assistant as chat templates read it."""
    message: Json = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": use.id,
                "type": "function",
                "function": {"name": use.name, "arguments": read_arguments(use.arguments)},
            }
            for use in calls
        ]
    return message


def read_arguments(text: str) -> Any:
    """The arguments of a call as chat templates read them: none are an empty object. What is no
    JSON stays as written, and so does what no JSON answer could hold: NaN, half of a character,
    brackets without end."""
    if not text.strip():
        return {}  # a call without arguments
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return value


def forced_tool(tools: Sequence[Json], name: str | None) -> str:
    """`ApiCall.forced_tool` where one of `tools` must be called: the one of that name, or any.
    ApiError where there is none."""
    names = [tool["function"]["name"] for tool in tools]
    if not names:
        raise ApiError(400, "tool_choice: asks for a call, but tools is empty", "tool_choice")
    if name is not None and name not in names:
        raise ApiError(
            400, f"tool_choice: no tool is called {name!r}; there is {', '.join(names)}",
            "tool_choice",
        )  # fmt: skip
    return name or ""


def given_fields(body: Json, names: Sequence[str]) -> Json:
    """Those of `names` that a body gives; a null is a field left out."""
    return {name: body[name] for name in names if body.get(name) is not None}


@dataclass(frozen=True, kw_only=True)
class ApiAnswer:
    """The engine's answer to a call."""

    id: str
    """Unique, of letters and digits; a dialect puts its own prefix in front."""
    model: str
    created: int
    """Unix time."""
    num_prompt_tokens: int
    replies: list[ApiReply]

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(reply.output.ids) for reply in self.replies)


@dataclass(frozen=True)
class ServerEvent:
    """A server-sent event: `data` as JSON, or as it is where it is a text ("[DONE]")."""

    data: Json | str
    name: str | None = None
    """Of an `event:` line; None: there is none."""


class AnswerStream(Protocol):
    """The events of one answer of a single reply, while it is sampled. What `think` and `say` were
    not told of the answer, `end` writes; so `begin` and `end` alone write the whole of it."""

    def begin(self) -> Iterator[ServerEvent]:
        """The events before the first token."""
        ...

    def think(self, text: str) -> Iterator[ServerEvent]:
        """The reasoning goes on with `text`."""
        ...

    def say(self, text: str) -> Iterator[ServerEvent]:
        """The reply goes on with `text`; no reasoning follows."""
        ...

    def end(self, answer: ApiAnswer) -> Iterator[ServerEvent]:
        """The rest of the answer, whose reasoning and text begin with what was told."""
        ...

    def fail(self, error: ApiError) -> Iterator[ServerEvent]:
        """The last events where there will be no answer."""
        ...


class Dialect(Protocol):
    """An API in which calls are made."""

    @property
    def path(self) -> str:
        """The path at which it is served, behind the episode's base URL: "/v1/chat/completions"."""
        ...

    def read(self, body: Json, pictures: PictureTaker | None = None) -> ApiCall:
        """The call, whose pictures are given to `pictures`; None: the model reads text. ApiError
        400 names the field that cannot be, and what can."""
        ...

    def write(self, call: ApiCall, answer: ApiAnswer) -> Json:
        """The body of an answer that is not streamed."""
        ...

    def events(self, call: ApiCall, answer: ApiAnswer) -> Iterator[ServerEvent]:
        """The same as a stream, from its first event to its last."""
        ...

    def error(self, error: ApiError) -> Json:
        """The body of an error, in the API's own form."""
        ...


@runtime_checkable
class StreamingDialect(Dialect, Protocol):
    """An API whose answers stream while they are sampled."""

    def stream(self, call: ApiCall, begun: ApiAnswer) -> AnswerStream:
        """The stream of an answer, of which `begun` is what is known: it has no replies yet."""
        ...


@runtime_checkable
class CountingDialect(Dialect, Protocol):
    """An API that counts the tokens of a prompt, too."""

    @property
    def count_path(self) -> str:
        """The path at which it counts tokens, behind the episode's base URL."""
        ...

    def read_count(self, body: Json, pictures: PictureTaker | None = None) -> ApiCall:
        """The call whose prompt is counted."""
        ...

    def write_count(self, num_tokens: int) -> Json:
        """The body of the answer."""
        ...
