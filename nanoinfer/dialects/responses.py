"""OpenAI's Responses: `POST /v1/responses`.

A conversation is a list of items. What the assistant says in a message and the calls behind it are
one turn; reasoning that comes back is left out. `previous_response_id` goes on from an answer of
the same episode, and `instructions` hold for one call, as in OpenAI's API.
Log-probs are those of all tokens of a turn, its reasoning and calls included.
Left out: images, audio and files; tools that OpenAI runs or defines; free-form tools; conversations
and prompts that a server stores; background answers; how many of the tokens are reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StrictBool, Tag

from nanoengine.model.chat_template import Message
from nanoengine.model.tokenizer import ChatTokenizer
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
)
from nanoinfer.params import Grammar
from nanoinfer.server.http_io import ApiError, read_json_body
from nanoinfer.server.requests import MAX_TOP_LOGPROBS, StrictBody
from nanoinfer.server.responses import chat_logprobs

DECIDED = ("temperature", "top_p")
"""Fields that the run decides."""
PREFIX = "resp_"
LOGPROBS = "message.output_text.logprobs"
ENDS = ("completed", "incomplete", "failed")
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""What OpenAI's API can add to an answer; here there are log-probs alone."""


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


class ItemText(StrictBody):
    ignored = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})
    type: Literal["input_text", "output_text"]
    text: str


ItemTexts = Annotated[list[ItemText], BeforeValidator(_as_parts)]


class MessageItem(StrictBody):
    ignored = frozenset({"id", "phase", "status"})
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemTexts


class FunctionCallItem(StrictBody):
    ignored = frozenset(
        {"async", "caller", "id", "namespace", "parsed_arguments", "status"},
    )
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(StrictBody):
    ignored = frozenset({"caller", "id", "name", "namespace", "status"})
    type: Literal["function_call_output"]
    call_id: str
    output: ItemTexts


class ReasoningItem(StrictBody):
    ignored = frozenset({"content", "encrypted_content", "id", "status", "summary"})
    type: Literal["reasoning"]


def _kind(item: Any) -> str | None:
    """The type of an item; a message need not say it."""
    if not isinstance(item, dict):
        return getattr(item, "type", None)
    kind = item.get("type")
    return "message" if kind is None and "role" in item else kind


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class FlatTool(StrictBody):
    """A function that the client runs."""

    ignored = frozenset({"allowed_callers", "async", "defer_loading", "output_schema", "strict"})
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def spec(self) -> Json:
        function = self.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": function}


def _as_choice(given: Any) -> Any:
    return {"type": given} if isinstance(given, str) else given


class FlatToolChoice(StrictBody):
    type: Literal["none", "auto", "required", "function"]
    name: str | None = None


class TextFormatChoice(StrictBody):
    ignored = frozenset({"description", "name", "strict"})
    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextConfig(StrictBody):
    ignored = frozenset({"verbosity"})
    format: TextFormatChoice | None = None


class ResponseRequest(StrictBody):
    ignored = frozenset(
        {"context_management", "max_tool_calls", "metadata", "parallel_tool_calls", "reasoning"}
        | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "service_tier"}
        | {"safety_identifier", "store", "stream_options", "truncation", "user", *DECIDED}
    )
    model: str | None = None
    input: Annotated[list[Item], BeforeValidator(_as_items)] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, strict=True)
    tools: list[FlatTool] = Field(default_factory=list)
    tool_choice: Annotated[FlatToolChoice, BeforeValidator(_as_choice)] = FlatToolChoice(
        type="auto"
    )
    text: TextConfig = TextConfig()
    include: list[Includable] = Field(default_factory=list)
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS, strict=True)
    stream: StrictBool = False
    background: Literal[False] = False

    def conversation(self) -> list[Message]:
        messages = _messages(self.input)
        if self.instructions:
            return [{"role": "system", "content": self.instructions}, *messages]
        return messages

    def continues(self) -> str:
        given = self.previous_response_id or ""
        if given and not given.startswith(PREFIX):
            raise ApiError(
                404, f"previous_response_id: {given!r} is no answer's id; one begins with {PREFIX}",
                "previous_response_id",
            )  # fmt: skip
        return given.removeprefix(PREFIX)

    def specs(self) -> list[Json]:
        """The tools; none where they must not be used."""
        return [] if self.tool_choice.type == "none" else [tool.spec() for tool in self.tools]

    def forced(self) -> str | None:
        choice = self.tool_choice
        if choice.type == "function" and choice.name is None:
            raise ApiError(400, "tool_choice.name: give the name of the function", "tool_choice")
        if choice.type not in ("required", "function"):
            return None
        return forced_tool(self.specs(), choice.name if choice.type == "function" else None)

    def grammar(self) -> Grammar | None:
        form = self.text.format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return Grammar("json_schema", '{"type": "object"}')
        if form.schema_ is None:
            raise ApiError(400, "text.format.schema: type json_schema needs it", "text")
        return Grammar("json_schema", json.dumps(form.schema_))


def _messages(items: list[Item]) -> list[Message]:
    """A turn of the assistant is a message and the calls right behind it, or calls alone."""
    messages: list[Message] = []
    turn: list[MessageItem | FunctionCallItem] = []
    for item in (*items, None):
        if isinstance(item, FunctionCallItem):
            turn.append(item)
            continue
        if turn:
            messages.append(_said(turn))
            turn = []
        if isinstance(item, FunctionOutputItem):
            content = _joined(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif isinstance(item, MessageItem) and item.role == "assistant":
            turn.append(item)
        elif isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": _joined(item.content)})
    return messages


def _said(turn: list[MessageItem | FunctionCallItem]) -> Message:
    text = "".join(_joined(item.content) for item in turn if isinstance(item, MessageItem))
    uses = [
        ApiToolCall(id=item.call_id, name=item.name, arguments=item.arguments)
        for item in turn
        if isinstance(item, FunctionCallItem)
    ]
    return assistant_message(text, uses)


def _joined(parts: list[ItemText]) -> str:
    return "".join(part.text for part in parts)


class ResponsesDialect:
    """Stateless; `tokenizer` writes the texts of log-probs."""

    path = "/v1/responses"

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def key(self, headers: Mapping[str, str]) -> str:
        return bearer_key(headers)

    def read(self, body: Json) -> ApiCall:
        asked = read_json_body(body, ResponseRequest)
        continues = asked.continues()
        if not asked.input and not continues:
            raise ApiError(400, "input: give a text or at least one item", "input")
        forced = asked.forced()
        grammar = asked.grammar()
        return ApiCall(
            messages=asked.conversation(),
            tools=asked.specs(),
            forced_tool=forced,
            max_tokens=asked.max_output_tokens,
            grammar=grammar if forced is None else None,
            num_top=asked.top_logprobs if LOGPROBS in asked.include else None,
            is_streamed=asked.stream,
            continues=continues,
            has_instructions=bool(asked.instructions),
            ignored=tuple(name for name in DECIDED if body.get(name) is not None),
            sampling=given_fields(body, DECIDED),
            is_kept=body.get("store") is not False,
        )

    def write(self, call: ApiCall, answer: ApiAnswer) -> Json:
        (reply,) = answer.replies
        is_cut = reply.is_cut and not reply.calls
        return _head(call, answer) | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items(call, answer),
            "usage": _usage(answer),
        }

    def events(self, call: ApiCall, answer: ApiAnswer) -> Iterator[ServerEvent]:
        written = self.stream(call, replace(answer, replies=[]))
        yield from written.begin()
        yield from written.end(answer)

    def stream(self, call: ApiCall, begun: ApiAnswer) -> ResponseStream:
        return ResponseStream(self, call, begun)

    def error(self, error: ApiError) -> Json:
        return error.to_json()

    def _items(self, call: ApiCall, answer: ApiAnswer) -> list[Json]:
        """What was said. Without calls there is a message, if only an empty one: clients count on
        it."""
        (reply,) = answer.replies
        items: list[Json] = []
        if reply.reasoning:
            items.append(_thought(answer, reply.reasoning))
        if reply.text or not reply.calls:
            said = _message(answer, reply.text, self._logprobs(call, reply))
            if reply.is_cut and not reply.calls:
                said["status"] = "incomplete"
            items.append(said)
        return items + [
            _item(
                "function_call", f"fc_{use.id}",
                call_id=use.id, name=use.name, arguments=use.arguments,
            )
            for use in reply.calls
        ]  # fmt: skip

    def _logprobs(self, call: ApiCall, reply: ApiReply) -> list[Json]:
        if call.num_top is None:
            return []
        output = reply.output
        entries: list[Json] = chat_logprobs(
            self._tokenizer, output.ids, output.logps, output.top_logps
        )["content"]
        return [
            _with_bytes(entry)
            | {"top_logprobs": [_with_bytes(top) for top in entry["top_logprobs"]]}
            for entry in entries
        ]


class ResponseStream:
    """An `AnswerStream`: an item at a time. Log-probs are told of a whole text, at its end."""

    def __init__(self, dialect: ResponsesDialect, call: ApiCall, begun: ApiAnswer) -> None:
        self._dialect, self._call, self._begun = dialect, call, begun
        self._shown = {"reasoning": "", "message": ""}
        self._open: Json | None = None
        self._closed: set[str] = set()
        self._num_events = self._num_items = 0

    def begin(self) -> Iterator[ServerEvent]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def think(self, text: str) -> Iterator[ServerEvent]:
        yield from self._tell(_thought(self._begun, ""), text)

    def say(self, text: str) -> Iterator[ServerEvent]:
        yield from self._tell(_message(self._begun, "", []), text)

    def end(self, answer: ApiAnswer) -> Iterator[ServerEvent]:
        whole = self._dialect.write(self._call, answer)
        for item in whole["output"]:
            if item["id"] not in self._closed:
                yield from self._rest(item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def fail(self, error: ApiError) -> Iterator[ServerEvent]:
        told = {"code": error.code or "server_error", "message": error.message}
        failed = self._response("failed") | {"error": told}
        yield self._event("response.failed", response=failed)

    def _rest(self, item: Json) -> Iterator[ServerEvent]:
        if item["type"] == "function_call":
            yield from self._call_events(item)
            return
        (part,) = item["content"]
        done, kind = len(self._shown[item["type"]]), f"response.{part['type']}"
        logprobs = {name: part[name] for name in ("logprobs",) if name in part}
        yield from self._tell(item, part["text"][done:], logprobs if done == 0 else None)
        if self._open is None:  # a text without a word is an item all the same
            yield from self._start(item)
        where = {"content_index": 0, "item_id": item["id"]}
        yield self._event(f"{kind}.done", **where, text=part["text"], **logprobs)
        yield self._event("response.content_part.done", **where, part=part)
        yield from self._close(item)

    def _tell(self, item: Json, text: str, logprobs: Json | None = None) -> Iterator[ServerEvent]:
        if not text:
            return
        if self._open is not None and self._open["id"] != item["id"]:
            shown = self._shown[self._open["type"]]
            yield from self._rest(_thought(self._begun, shown))
        if self._open is None:
            yield from self._start(item)
        self._shown[item["type"]] += text
        (part,) = item["content"]
        none_yet: Json = {"logprobs": []} if "logprobs" in part else {}
        where = {"content_index": 0, "item_id": item["id"]}
        yield self._event(
            f"response.{part['type']}.delta", **where, delta=text, **(logprobs or none_yet)
        )

    def _call_events(self, item: Json) -> Iterator[ServerEvent]:
        yield from self._add(item | {"arguments": ""})
        kind, arguments = "response.function_call_arguments", item["arguments"]
        yield self._event(f"{kind}.delta", item_id=item["id"], delta=arguments)
        yield self._event(
            f"{kind}.done", item_id=item["id"], arguments=arguments, name=item["name"]
        )
        yield from self._close(item)

    def _start(self, item: Json) -> Iterator[ServerEvent]:
        (part,) = item["content"]
        yield from self._add(item | {"content": []})
        empty = part | {"text": ""} | ({"logprobs": []} if "logprobs" in part else {})
        where = {"content_index": 0, "item_id": item["id"]}
        yield self._event("response.content_part.added", **where, part=empty)

    def _add(self, item: Json) -> Iterator[ServerEvent]:
        self._open = item
        yield self._event("response.output_item.added", item=item | {"status": "in_progress"})

    def _close(self, item: Json) -> Iterator[ServerEvent]:
        yield self._event("response.output_item.done", item=item)
        self._open = None
        self._closed.add(item["id"])
        self._num_items += 1

    def _response(self, status: str) -> Json:
        unsaid: Json = {"incomplete_details": None, "output": [], "usage": None}
        return _head(self._call, self._begun) | {"status": status} | unsaid

    def _event(self, kind: str, **fields: Any) -> ServerEvent:
        is_of_item = kind.split(".")[1] not in ("created", "in_progress", *ENDS)
        where = {"output_index": self._num_items} if is_of_item else {}
        data = {"type": kind, **where, **fields, "sequence_number": self._num_events}
        self._num_events += 1
        return ServerEvent(data, kind)


def _thought(answer: ApiAnswer, text: str) -> Json:
    content = [{"type": "reasoning_text", "text": text}]
    return _item("reasoning", f"rs_{answer.id}", summary=[], content=content)


def _message(answer: ApiAnswer, text: str, logprobs: list[Json]) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return _item("message", f"msg_{answer.id}", role="assistant", content=[part])


def _with_bytes(entry: Json) -> Json:
    """This API knows no null there: a token that is no text by itself has no bytes."""
    return entry | {"bytes": entry["bytes"] or []}


def _head(call: ApiCall, answer: ApiAnswer) -> Json:
    """What is known before the answer, with the fields that clients require."""
    named = {"type": "function", "name": call.forced_tool}
    required = "required" if call.forced_tool == "" else named
    return {
        "id": PREFIX + answer.id,
        "object": "response",
        "created_at": answer.created,
        "model": answer.model,
        "error": None,
        "metadata": {},
        "max_output_tokens": call.max_tokens,
        "parallel_tool_calls": True,
        "previous_response_id": PREFIX + call.continues if call.continues else None,
        "tool_choice": "auto" if call.forced_tool is None else required,
        "tools": [{"type": "function", "strict": False} | tool["function"] for tool in call.tools],
    }


def _item(kind: str, item_id: str, **fields: Any) -> Json:
    return {"type": kind, "id": item_id, "status": "completed", **fields}


def _usage(answer: ApiAnswer) -> Json:
    (reply,) = answer.replies
    cached = {"cached_tokens": reply.output.num_cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": cached,
        "output_tokens": answer.num_sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
    }
