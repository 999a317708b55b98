"""Anthropic's Messages: `POST /v1/messages`; its count_tokens, which counts those of a prompt.

A turn is a list of blocks. Results of tools, which Anthropic puts into a user's turn, become
messages of role "tool" in their places; one with `is_error` begins with "Error: ". Texts side by
side are joined as they are. Thinking is shown to clients that ask for it (`thinking`), signed with
the answer's id; where it comes back the model reads it as its template shows it. How much to think
goes to the chat template.
Pictures stand in a user's turn and in results of tools, for models that see. Documents and search
results of text are text; other documents, and pictures where the model reads text alone, are left
out of results with a note that says so, and refused in a user's turn.
Left out: citations; tools that Anthropic runs or defines (foreign_tools.py); threads; answers that
go on from a half-written one (prefill); log-probs, which this API does not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    StrictBool,
    Tag,
    model_validator,
)

from nanoengine.text.chat_template import Message
from nanoinfer.dialects.exchange import (
    ApiAnswer,
    ApiCall,
    ApiReply,
    ApiToolCall,
    Json,
    ServerEvent,
    assistant_message,
    forced_tool,
    given_fields,
    read_arguments,
)
from nanoinfer.dialects.foreign_tools import ForeignTool
from nanoinfer.http.api_error import ApiError
from nanoinfer.http.http_io import read_json_body
from nanoinfer.http.strict_body import Refused, StrictBody
from nanoinfer.params import Grammar
from nanoinfer.server.chat_messages import NOTES
from nanoinfer.server.harmless import HARMLESS
from nanoinfer.server.media import MediaPart, PictureTaker, content_of, refuse_media
from nanoinfer.server.template_fields import Effort, Thinking, thinking_variables

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
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_as_text(block) for block in content] if isinstance(content, list) else content


def _as_text(block: Any) -> Any:
    """The text of a block that is nothing else, as a block; others as they are. A document's ends
    with its line: what stands behind it is another text."""
    kind = block.get("type") if isinstance(block, dict) else None
    match kind:
        case "tool_reference":
            parts = [f"[tool: {block.get('tool_name')}]"]
        case "search_result":
            parts = [block.get("title"), block.get("source"), _plain(block.get("content"))]
        case "document":
            source = block.get("source")
            given = source if isinstance(source, dict) else {}
            text = given.get("data") if given.get("type") == "text" else None
            text = _plain(given.get("content")) if given.get("type") == "content" else text
            if text is None:
                return block
            parts = [block.get("title"), block.get("context"), text]
        case "compaction":
            parts = [block.get("content")]
        case _:
            return block
    if not all(part is None or isinstance(part, str) for part in parts):
        return block
    lines = "".join(f"{part}\n" for part in parts if part)
    return {"type": "text", "text": lines if kind in ("document", "search_result") else lines[:-1]}


def _plain(content: Any) -> Any:
    """The text of a content that is text or blocks of it."""
    if not isinstance(content, list):
        return content
    texts = [block.get("text") if isinstance(block, dict) else None for block in content]
    return "".join(text for text in texts if isinstance(text, str))


class TextBlock(StrictBody):
    ignored = NOTES | {"citations"}
    type: Literal["text"]
    text: str


Texts = Annotated[list[TextBlock], BeforeValidator(_as_blocks)]
Shown = Annotated[TextBlock | MediaPart, Field(discriminator="type")]


class ToolResultBlock(StrictBody):
    ignored = NOTES | {"toolset_name"}
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[Shown], BeforeValidator(_as_blocks)] = Field(default_factory=list)
    is_error: StrictBool = False

    def message(self) -> Message:
        content = content_of(self.content, "Error: " if self.is_error else "")
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


class ToolUseBlock(StrictBody):
    ignored = (NOTES - {"id"}) | {"caller", "toolset_name"}
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    def use(self) -> ApiToolCall:
        unread = self.input.get(UNREADABLE)
        arguments = unread if isinstance(unread, str) else json.dumps(self.input)
        return ApiToolCall(id=self.id, name=self.name, arguments=arguments)


class ThinkingBlock(StrictBody):
    ignored = NOTES | {"data", "signature"}
    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


UserBlock = Annotated[TextBlock | ToolResultBlock | MediaPart, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]


class UserTurn(StrictBody):
    ignored = NOTES
    role: Literal["user"]
    content: Annotated[list[UserBlock], BeforeValidator(_as_blocks)]

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        refuse_media(self.content, "content")
        return self

    def messages(self) -> list[Message]:
        messages: list[Message] = []
        said: list[TextBlock | MediaPart] = []
        for block in (*self.content, None):
            if isinstance(block, TextBlock | MediaPart):
                said.append(block)
                continue
            if said:
                messages.append({"role": "user", "content": content_of(said)})
                said = []
            if block is not None:
                messages.append(block.message())
        return messages


class AssistantTurn(StrictBody):
    ignored = NOTES
    role: Literal["assistant"]
    content: Annotated[list[AssistantBlock], BeforeValidator(_as_blocks)]

    def messages(self) -> list[Message]:
        text = _joined([block for block in self.content if isinstance(block, TextBlock)])
        calls = [block.use() for block in self.content if isinstance(block, ToolUseBlock)]
        thoughts = [one.thinking for one in self.content if isinstance(one, ThinkingBlock)]
        return [assistant_message(text, calls, "\n".join(filter(None, thoughts)))]


class SystemTurn(StrictBody):
    ignored = NOTES
    role: Literal["system"]
    content: Texts

    def messages(self) -> list[Message]:
        return [{"role": "system", "content": _joined(self.content)}]


class MessagesTool(StrictBody):
    """A tool that the client runs."""

    ignored = NOTES | {
        *("allowed_callers", "defer_loading", "eager_input_streaming", "input_examples", "strict")
    }
    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any]

    def spec(self) -> Json:
        told = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **told, "parameters": self.input_schema}
        return {"type": "function", "function": function}


def _tool_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind in (None, "custom") or not isinstance(kind, str) else "other"


OfferedTool = Annotated[
    Annotated[MessagesTool, Tag("custom")] | Annotated[ForeignTool, Tag("other")],
    Discriminator(_tool_kind),
]


class AnyToolChoice(StrictBody):
    ignored = frozenset({"disable_parallel_tool_use"})
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None


class OutputFormat(StrictBody):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictBody):
    ignored = frozenset({"task_budget"})
    effort: Effort | None = None
    format: OutputFormat | None = None


class Prompt(StrictBody):
    """The body of /v1/messages/count_tokens: the prompt that it counts."""

    ignored = HARMLESS | {
        *("anthropic_beta", "anthropic_version", "betas", "billing_policy", "compaction"),
        *("context_management", "diagnostics", "fallback_credit_token", "fallbacks"),
        *("inference_geo", "speed", "user_profile_id", "workspace_id", *DECIDED),
    }
    refused = {  # noqa: RUF012
        "container": Refused("this server runs no code; leave it out"),
        "mcp_servers": Refused("this server runs no tools; offer theirs as tools of the client"),
    }
    model: str
    messages: Annotated[
        list[Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]],
        Field(min_length=1),
    ]
    system: Texts = Field(default_factory=list)
    tools: list[OfferedTool] = Field(default_factory=list)
    tool_choice: AnyToolChoice = AnyToolChoice()
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""
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
        if self.tool_choice.type == "none":
            return []
        return [tool.spec() for tool in self.tools if isinstance(tool, MessagesTool)]

    def left_out(self) -> list[str]:
        """Types of tools that are not offered to the model."""
        return sorted({tool.type for tool in self.tools if isinstance(tool, ForeignTool)})

    def variables(self) -> Json:
        is_on = None if self.thinking is None else self.thinking.is_on
        return thinking_variables(self.output_config.effort, is_on)

    def forced(self) -> str | None:
        choice = self.tool_choice
        if choice.type == "tool" and choice.name is None:
            raise ApiError(400, "tool_choice.name: give the name of the tool", "tool_choice")
        if choice.type not in ("any", "tool"):
            return None
        return forced_tool(self.specs(), choice.name if choice.type == "tool" else None)

    def grammar(self) -> Grammar | None:
        form = self.output_config.format or self.output_format
        return None if form is None else Grammar("json_schema", json.dumps(form.schema_))


class MessageRequest(Prompt):
    max_tokens: int = Field(ge=1, strict=True)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    stream: StrictBool = False


class MessagesDialect:
    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"

    def read(self, body: Json, pictures: PictureTaker | None = None) -> ApiCall:
        asked = read_json_body(body, MessageRequest, pictures)
        forced = asked.forced()
        return ApiCall(
            messages=asked.conversation(),
            tools=asked.specs(),
            forced_tool=forced,
            variables=asked.variables(),
            max_tokens=asked.max_tokens,
            stop=tuple(asked.stop_sequences),
            grammar=asked.grammar() if forced is None else None,
            is_streamed=asked.stream,
            has_reasoning=asked.thinking is not None and asked.thinking.type != "disabled",
            ignored=(
                *(name for name in DECIDED if body.get(name) is not None),
                *asked.left_out(),
            ),
            sampling=given_fields(body, DECIDED),
        )

    def read_count(self, body: Json, pictures: PictureTaker | None = None) -> ApiCall:
        asked = read_json_body(body, Prompt, pictures)
        return ApiCall(
            messages=asked.conversation(), tools=asked.specs(), variables=asked.variables()
        )

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


def _joined(blocks: Sequence[TextBlock]) -> str:
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
    if reply.is_cut:
        return "max_tokens"
    if reply.calls:
        return "tool_use"
    return "end_turn" if reply.stop_text is None else "stop_sequence"


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
