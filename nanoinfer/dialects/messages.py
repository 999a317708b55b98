"""Anthropic's Messages: `POST /v1/messages`; its count_tokens, which counts those of a prompt.

A turn is a list of blocks. Results of tools, which Anthropic puts into a user's turn, become
messages of role "tool" in their places; one with `is_error` begins with "Error: ". Texts side by
side are joined as they are. Thinking is shown to clients that ask for it (`thinking`), signed with
the answer's id, and left out where it comes back.
Left out: images, documents and citations; tools that Anthropic runs or defines; threads; answers
that go on from a half-written one (prefill); log-probs, which this API does not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool

from nanoengine.model.chat_template import Message
from nanoinfer.dialects.exchange import (
    ApiAnswer,
    ApiCall,
    ApiReply,
    ApiToolCall,
    Json,
    ServerEvent,
    assistant_message,
    bearer_key,
    forced_tool,
    given_fields,
    read_arguments,
)
from nanoinfer.params import Grammar
from nanoinfer.server.http_io import ApiError, read_json_body
from nanoinfer.server.requests import StrictBody

DECIDED = ("temperature", "top_p", "top_k")
"""Fields that the run decides."""
UNREADABLE = "__arguments__"
"""`input` must be an object: arguments that are none are its text of this name."""
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Types of errors by their status; others are the client's below 500, the server's above."""

UNTHREADED = "thread_unsupported_request"
"""The code at which Anthropic's clients send whole conversations instead of threads."""


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class TextBlock(StrictBody):
    ignored = frozenset({"cache_control", "citations"})
    type: Literal["text"]
    text: str


Texts = Annotated[list[TextBlock], BeforeValidator(_as_blocks)]


class ToolResultBlock(StrictBody):
    ignored = frozenset({"cache_control", "toolset_name"})
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field(default_factory=list)
    is_error: StrictBool = False

    def message(self) -> Message:
        content = ("Error: " if self.is_error else "") + _joined(self.content)
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


class ToolUseBlock(StrictBody):
    ignored = frozenset({"cache_control", "caller", "toolset_name"})
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    def use(self) -> ApiToolCall:
        unread = self.input.get(UNREADABLE)
        arguments = unread if isinstance(unread, str) else json.dumps(self.input)
        return ApiToolCall(id=self.id, name=self.name, arguments=arguments)


class ThinkingBlock(StrictBody):
    ignored = frozenset({"data", "signature", "thinking"})
    type: Literal["thinking", "redacted_thinking"]


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]


class UserTurn(StrictBody):
    role: Literal["user"]
    content: Annotated[list[UserBlock], BeforeValidator(_as_blocks)]

    def messages(self) -> list[Message]:
        messages: list[Json] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                messages.append(dict(block.message()))
            elif messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += block.text
            else:
                messages.append({"role": "user", "content": block.text})
        return [*messages]


class AssistantTurn(StrictBody):
    role: Literal["assistant"]
    content: Annotated[list[AssistantBlock], BeforeValidator(_as_blocks)]

    def messages(self) -> list[Message]:
        text = _joined([block for block in self.content if isinstance(block, TextBlock)])
        calls = [block.use() for block in self.content if isinstance(block, ToolUseBlock)]
        return [assistant_message(text, calls)]


class SystemTurn(StrictBody):
    role: Literal["system"]
    content: Texts

    def messages(self) -> list[Message]:
        return [{"role": "system", "content": _joined(self.content)}]


class MessagesTool(StrictBody):
    """A tool that the client runs."""

    ignored = frozenset(
        {"allowed_callers", "cache_control", "defer_loading", "eager_input_streaming"}
        | {"input_examples", "strict"}
    )
    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any]

    def spec(self) -> Json:
        told = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **told, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class AnyToolChoice(StrictBody):
    ignored = frozenset({"disable_parallel_tool_use"})
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None


class OutputFormat(StrictBody):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictBody):
    ignored = frozenset({"effort"})
    format: OutputFormat | None = None


class Thinking(StrictBody):
    ignored = frozenset({"budget_tokens", "display"})
    type: str


class Prompt(StrictBody):
    """What /v1/messages/count_tokens counts."""

    ignored = frozenset(
        {"cache_control", "context_management", "diagnostics", "inference_geo", "metadata"}
        | {"service_tier", "speed", *DECIDED}
    )
    model: str
    messages: Annotated[
        list[Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]],
        Field(min_length=1),
    ]
    system: Texts = Field(default_factory=list)
    tools: list[MessagesTool] = Field(default_factory=list)
    tool_choice: AnyToolChoice = AnyToolChoice()
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    thread: dict[str, Any] | None = None

    def conversation(self) -> list[Message]:
        if self.thread is not None:
            raise ApiError(
                400, "thread: nothing is kept from call to call; send all messages, without it",
                "thread", code=UNTHREADED,
            )  # fmt: skip
        said = [message for turn in self.messages for message in turn.messages()]
        system = _joined(self.system)
        return [{"role": "system", "content": system}, *said] if system else said

    def specs(self) -> list[Json]:
        """The tools; none where they must not be used."""
        return [] if self.tool_choice.type == "none" else [tool.spec() for tool in self.tools]

    def forced(self) -> str | None:
        choice = self.tool_choice
        if choice.type == "tool" and choice.name is None:
            raise ApiError(400, "tool_choice.name: give the name of the tool", "tool_choice")
        if choice.type not in ("any", "tool"):
            return None
        return forced_tool(self.specs(), choice.name if choice.type == "tool" else None)

    def grammar(self) -> Grammar | None:
        form = self.output_config.format
        return None if form is None else Grammar("json_schema", json.dumps(form.schema_))


class MessageRequest(Prompt):
    max_tokens: int = Field(ge=1, strict=True)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    stream: StrictBool = False


class MessagesDialect:
    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"

    def key(self, headers: Mapping[str, str]) -> str:
        return headers.get("x-api-key", "").strip() or bearer_key(headers)

    def read(self, body: Json) -> ApiCall:
        asked = read_json_body(body, MessageRequest)
        forced = asked.forced()
        return ApiCall(
            messages=asked.conversation(),
            tools=asked.specs(),
            forced_tool=forced,
            max_tokens=asked.max_tokens,
            stop=tuple(asked.stop_sequences),
            grammar=asked.grammar() if forced is None else None,
            is_streamed=asked.stream,
            has_reasoning=asked.thinking is not None and asked.thinking.type != "disabled",
            ignored=tuple(name for name in DECIDED if body.get(name) is not None),
            sampling=given_fields(body, DECIDED),
        )

    def read_count(self, body: Json) -> ApiCall:
        asked = read_json_body(body, Prompt)
        return ApiCall(messages=asked.conversation(), tools=asked.specs())

    def write_count(self, num_tokens: int) -> Json:
        return {"input_tokens": num_tokens}

    def write(self, call: ApiCall, answer: ApiAnswer) -> Json:
        (reply,) = answer.replies
        return _head(answer) | {
            "content": _blocks(call, answer),
            "stop_reason": _stop_reason(reply),
            "stop_sequence": reply.stop_text,
            "usage": _usage(answer, answer.num_sampled_tokens),
        }

    def events(self, call: ApiCall, answer: ApiAnswer) -> Iterator[ServerEvent]:
        written = self.stream(call, replace(answer, replies=[]))
        yield from written.begin()
        yield from written.end(answer)

    def stream(self, call: ApiCall, begun: ApiAnswer) -> MessageStream:
        return MessageStream(self, call, begun)

    def error(self, error: ApiError) -> Json:
        other = "invalid_request_error" if error.status < 500 else "api_error"
        kind = ERRORS.get(error.status, other)
        told: Json = {"type": kind, "message": error.message}
        if error.code == UNTHREADED:
            told["details"] = {"error_code": UNTHREADED}
        return {"type": "error", "error": told, "request_id": None}


class MessageStream:
    """An `AnswerStream`: a block at a time, the next one once it is known that the last is over."""

    def __init__(self, dialect: MessagesDialect, call: ApiCall, begun: ApiAnswer) -> None:
        self._dialect, self._call, self._begun = dialect, call, begun
        self._shown = {"thinking": "", "text": ""}
        self._open: str | None = None
        self._index = 0

    def begin(self) -> Iterator[ServerEvent]:
        opened: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = _head(self._begun) | opened | {"usage": _usage(self._begun, 0)}
        yield _event("message_start", message=message)

    def think(self, text: str) -> Iterator[ServerEvent]:
        if self._call.has_reasoning:
            yield from self._tell("thinking", text)

    def say(self, text: str) -> Iterator[ServerEvent]:
        yield from self._tell("text", text)

    def end(self, answer: ApiAnswer) -> Iterator[ServerEvent]:
        (reply,) = answer.replies
        for block in _blocks(self._call, answer):
            kind = block["type"]
            if kind == "tool_use":
                yield from self._use(block)
                continue
            rest = block[kind][len(self._shown[kind]) :]
            if not block[kind]:  # a text without a word is a block all the same
                yield from self._start(kind, {**block})
            yield from self._tell(kind, rest)
        yield from self._close()
        ended = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_text}
        usage = _usage(answer, answer.num_sampled_tokens)
        yield _event("message_delta", delta=ended, usage=usage)
        yield _event("message_stop")

    def fail(self, error: ApiError) -> Iterator[ServerEvent]:
        told = self._dialect.error(error)
        yield ServerEvent(told, told["type"])

    def _tell(self, kind: str, text: str) -> Iterator[ServerEvent]:
        if not text:
            return
        if self._open != kind:
            unsigned = {"signature": ""} if kind == "thinking" else {}
            yield from self._start(kind, {"type": kind, kind: "", **unsigned})
        self._shown[kind] += text
        delta = {"type": f"{kind}_delta", kind: text}
        yield _event("content_block_delta", index=self._index, delta=delta)

    def _use(self, block: Json) -> Iterator[ServerEvent]:
        written = json.dumps(block["input"], ensure_ascii=False)
        yield from self._start("tool_use", block | {"input": {}})
        delta = {"type": "input_json_delta", "partial_json": written}
        yield _event("content_block_delta", index=self._index, delta=delta)

    def _start(self, kind: str, block: Json) -> Iterator[ServerEvent]:
        yield from self._close()
        self._open = kind
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[ServerEvent]:
        if self._open is None:
            return
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": self._begun.id}
            yield _event("content_block_delta", index=self._index, delta=delta)
        yield _event("content_block_stop", index=self._index)
        self._open = None
        self._index += 1


def _joined(blocks: list[TextBlock]) -> str:
    return "".join(block.text for block in blocks)


def _head(answer: ApiAnswer) -> Json:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
    }


def _blocks(call: ApiCall, answer: ApiAnswer) -> list[Json]:
    """An answer's content. Without calls there is a text, if only an empty one: clients take the
    first block for it."""
    (reply,) = answer.replies
    blocks: list[Json] = []
    if reply.reasoning and call.has_reasoning:
        thought = {"thinking": reply.reasoning, "signature": answer.id}
        blocks.append({"type": "thinking"} | thought)
    if reply.text or not reply.calls:
        blocks.append({"type": "text", "text": reply.text})
    return blocks + [_use_block(use) for use in reply.calls]


def _use_block(use: ApiToolCall) -> Json:
    read = read_arguments(use.arguments)
    given = read if isinstance(read, dict) else {UNREADABLE: use.arguments}
    return {"type": "tool_use", "id": use.id, "name": use.name, "input": given}


def _stop_reason(reply: ApiReply) -> str:
    if reply.calls:
        return "tool_use"
    if reply.stop_text is not None:
        return "stop_sequence"
    return "max_tokens" if reply.is_cut else "end_turn"


def _usage(answer: ApiAnswer, num_sampled: int) -> Json:
    """Tokens found in the prefix cache are none of `input_tokens` in this API."""
    cached = sum(reply.output.num_cached_tokens for reply in answer.replies)
    return {
        "input_tokens": answer.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": num_sampled,
    }


def _event(kind: str, **fields: Any) -> ServerEvent:
    return ServerEvent({"type": kind, **fields}, kind)
