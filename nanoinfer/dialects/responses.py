"""OpenAI's Responses: `POST /v1/responses`.

A conversation is a list of items. What the assistant says in a message and the calls behind it are
one turn, and so is the reasoning in front of it. `previous_response_id` goes on from an answer of
the same episode, and `instructions` hold for one call, as in OpenAI's API.
Log-probs are those of all tokens of a turn, its reasoning and calls included.
A tool of a namespace is offered as `NAMESPACE__NAME`, one without a schema as a function with one
text argument; calls of both come as their client knows them.
Pictures stand in a user's message and in results of calls, for models that see. A `computer_call`
of a history is a call of the function `computer`, and its screenshot the result.
Left out: audio and files (media.py); tools that OpenAI runs or defines (foreign_tools.py);
conversations and prompts that a server stores; background answers; how many of the tokens are
reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    StrictBool,
    Tag,
    model_validator,
)

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.dialects.exchange import (
    ApiAnswer,
    ApiCall,
    ApiReply,
    ApiToolCall,
    Json,
    ServerEvent,
    ToolForm,
    assistant_message,
    forced_tool,
    given_fields,
)
from nanoinfer.dialects.foreign_tools import (
    ForeignTool,
    freeform_arguments,
    freeform_spec,
    freeform_text,
)
from nanoinfer.http.api_error import ApiError
from nanoinfer.http.http_io import read_json_body
from nanoinfer.http.strict_body import Refused, StrictBody
from nanoinfer.params import Grammar
from nanoinfer.server.chat_messages import NOTES, RefusalPart, Text
from nanoinfer.server.harmless import HARMLESS
from nanoinfer.server.media import (
    MediaPart,
    PictureTaker,
    content_of,
    refusals,
    refuse_media,
)
from nanoinfer.server.requests import MAX_TOP_LOGPROBS
from nanoinfer.server.responses import chat_logprobs
from nanoinfer.server.template_fields import Reasoning, thinking_variables

CALL_FIELDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "function_call": ("arguments", "function_call_arguments"),
        "custom_tool_call": ("input", "custom_tool_call_input"),
    }
)
"""Of a call's item, by its type: the field that is streamed, and its events."""
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
    if isinstance(content, dict):  # a screenshot
        return [content]
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


class ItemText(StrictBody):
    ignored = NOTES | {"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"}
    type: Literal["input_text", "output_text", "text", "summary_text"]
    text: str


ItemPart = Annotated[ItemText | RefusalPart | MediaPart, Field(discriminator="type")]
ItemParts = Annotated[list[ItemPart], BeforeValidator(_as_parts)]
OF_ITEMS = NOTES | {"caller", "created_by", "status"}
"""What any item may have."""


class MessageItem(StrictBody):
    ignored = OF_ITEMS | {"phase"}
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemParts

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        refuse_media(self.content, "content", role=self.role)
        return self


class CallItem(StrictBody):
    """A call of a function, or of a tool without a schema."""

    ignored = OF_ITEMS | {"async", "parsed_arguments"}
    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None

    @model_validator(mode="after")
    def _has_arguments(self) -> Self:
        name = "arguments" if self.type == "function_call" else "input"
        if getattr(self, name) is None:
            raise refusals([((name,), "Field required", None)])
        return self

    def use(self) -> ApiToolCall:
        given = self.arguments
        arguments = freeform_arguments(self.input or "") if given is None else given
        name = offered_name(self.name, self.namespace)
        return ApiToolCall(id=self.call_id, name=name, arguments=arguments)


class ComputerCallItem(StrictBody):
    """A call of OpenAI's computer: what to click or type, which is answered by a screenshot."""

    ignored = OF_ITEMS | {"pending_safety_checks"}
    type: Literal["computer_call"]
    call_id: str
    action: dict[str, Any] | None = None
    actions: list[dict[str, Any]] = Field(default_factory=list)

    def use(self) -> ApiToolCall:
        given = {"actions": self.actions} if self.action is None else {"action": self.action}
        return ApiToolCall(id=self.call_id, name="computer", arguments=json.dumps(given))


class OutputItem(StrictBody):
    """The result of a call."""

    ignored = OF_ITEMS | {"acknowledged_safety_checks", "name", "namespace"}
    type: Literal["function_call_output", "custom_tool_call_output", "computer_call_output"]
    call_id: str
    output: ItemParts


class ReasoningText(StrictBody):
    ignored = NOTES
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(StrictBody):
    """The model's reasoning. Encrypted reasoning is another server's and is ignored."""

    ignored = OF_ITEMS | {"encrypted_content", "summary"}
    type: Literal["reasoning"]
    content: list[ReasoningText] = Field(default_factory=list)


class SilentItem(BaseModel):
    """A search that another server made on its way; it says nothing to the model."""

    type: Literal["web_search_call"]


class OtherItem(BaseModel):
    """An item that cannot be read here."""

    type: Literal["item_reference", "compaction", "other"]

    @model_validator(mode="after")
    def _cannot_be(self) -> Self:
        why = "it is kept by another server; send the messages themselves"
        raise refusals([(("type",), f"{self.type}: {why}", self.type)])


TurnItem = MessageItem | CallItem | ComputerCallItem | ReasoningItem
"""What a turn of the assistant is made of."""


def _kind(item: Any) -> str | None:
    """The type of an item; a message need not say it."""
    if not isinstance(item, dict):
        return getattr(item, "type", None)
    kind = item.get("type")
    return "message" if kind is None and "role" in item else kind


def offered_name(name: str, namespace: str | None) -> str:
    """The name under which a model knows a tool."""
    return f"{namespace}__{name}" if namespace else name


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


OF_TOOLS = NOTES | {"allowed_callers", "async", "defer_loading", "output_schema", "strict"}


class FlatTool(StrictBody):
    """A function that the client runs."""

    ignored = OF_TOOLS
    type: Literal["function"]
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def spec(self) -> Json:
        function = self.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": function}


class CustomTool(StrictBody):
    """A tool that takes a text."""

    ignored = OF_TOOLS
    type: Literal["custom"]
    name: Text
    description: str | None = None
    format: dict[str, Any] | None = None

    def spec(self) -> Json:
        return freeform_spec(self.name, self.description, self.format)


def _tool_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return kind if kind in ("function", "custom", "namespace") else "other"


PlainTool = Annotated[
    Annotated[FlatTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[ForeignTool, Tag("other")],
    Discriminator(_tool_kind),
]


class Namespace(StrictBody):
    """A set of tools."""

    ignored = OF_TOOLS | {"description"}
    type: Literal["namespace"]
    name: Text
    tools: list[PlainTool] = Field(default_factory=list)


Tool = Annotated[
    Annotated[FlatTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[ForeignTool, Tag("other")],
    Discriminator(_tool_kind),
]


class MoreToolsItem(StrictBody):
    """Tools that are offered from here on; they are from the beginning."""

    ignored = OF_ITEMS | {"role"}
    type: Literal["additional_tools"]
    tools: list[Tool] = Field(default_factory=list)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallItem, Tag("custom_tool_call")]
    | Annotated[ComputerCallItem, Tag("computer_call")]
    | Annotated[OutputItem, Tag("computer_call_output")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[OutputItem, Tag("custom_tool_call_output")]
    | Annotated[MoreToolsItem, Tag("additional_tools")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[SilentItem, Tag("web_search_call")]
    | Annotated[OtherItem, Tag("item_reference")]
    | Annotated[OtherItem, Tag("compaction")],
    Discriminator(_kind),
]


class Offering(NamedTuple):
    """A tool as the model knows it, and as its client does."""

    spec: Json
    form: ToolForm


def _offers(tools: Sequence[Any], namespace: str | None = None) -> Iterator[Offering]:
    for tool in tools:
        if isinstance(tool, Namespace):
            yield from _offers(tool.tools, tool.name)
        elif isinstance(tool, FlatTool | CustomTool):
            spec = tool.spec()
            spec["function"]["name"] = offered_name(tool.name, namespace)
            is_freeform = isinstance(tool, CustomTool)
            yield Offering(
                spec, ToolForm(name=tool.name, namespace=namespace, is_freeform=is_freeform)
            )


def _as_choice(given: Any) -> Any:
    return {"type": given} if isinstance(given, str) else given


class AllowedTool(StrictBody):
    ignored = frozenset({"server_label"})
    type: Literal["function", "custom"]
    name: Text


class FlatToolChoice(StrictBody):
    type: Literal["none", "auto", "required", "function", "custom", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[AllowedTool] = Field(default_factory=list)

    def allows(self, form: ToolForm) -> bool:
        """True for a tool that may be called."""
        return self.type != "allowed_tools" or form.name in [tool.name for tool in self.tools]


class TextFormatChoice(StrictBody):
    ignored = frozenset({"description", "name", "strict"})
    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextConfig(StrictBody):
    ignored = frozenset({"verbosity"})
    format: TextFormatChoice | None = None


class ResponseRequest(StrictBody):
    ignored = HARMLESS | {
        *("access_programs", "background_options", "context_management", "image"),
        *("max_tool_calls", "stream_options", "truncation", *DECIDED),
    }
    refused = {  # noqa: RUF012
        "conversation": Refused("nothing is kept by that name; send the items in input"),
        "moderation": Refused("nothing is moderated here; leave it out"),
        "prompt": Refused("no prompts are kept here; send its text in instructions"),
    }
    model: str | None = None
    input: Annotated[list[Item], BeforeValidator(_as_items)] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, strict=True)
    tools: list[Tool] = Field(default_factory=list)
    reasoning: Reasoning = Field(default_factory=Reasoning)
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

    def offers(self) -> list[Offering]:
        """The tools; none where they must not be used."""
        choice = self.tool_choice
        if choice.type == "none":
            return []
        return [offer for offer in _offers(self._tools()) if choice.allows(offer.form)]

    def left_out(self) -> list[str]:
        """Types of tools that are not offered to the model."""
        return sorted({tool.type for tool in self._tools() if isinstance(tool, ForeignTool)})

    def _tools(self) -> list[Any]:
        later = [item.tools for item in self.input if isinstance(item, MoreToolsItem)]
        return [*self.tools, *(tool for tools in later for tool in tools)]

    def forced(self) -> str | None:
        choice = self.tool_choice
        is_named = choice.type in ("function", "custom")
        if is_named and choice.name is None:
            raise ApiError(400, "tool_choice.name: give the name of the function", "tool_choice")
        if choice.type == "allowed_tools" and choice.mode == "auto":
            return None
        if choice.type in ("none", "auto"):
            return None
        specs = [offer.spec for offer in self.offers()]
        return forced_tool(specs, choice.name if is_named else None)

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
    """A turn of the assistant is its reasoning, a message and the calls right behind it, each of
    which may be missing."""
    messages: list[Message] = []
    turn: list[TurnItem] = []
    for item in (*items, None):
        if isinstance(item, SilentItem):
            continue
        is_thought = all(isinstance(one, ReasoningItem) for one in turn)
        if isinstance(item, CallItem | ComputerCallItem) or (is_thought and _is_assistants(item)):
            turn.append(item)  # type: ignore[arg-type]
            continue
        if not is_thought:
            messages.append(_said(turn))
        turn = []
        if isinstance(item, OutputItem):
            content = content_of(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif _is_assistants(item):
            turn.append(item)  # type: ignore[arg-type]
        elif isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": content_of(item.content)})
    return messages


def _is_assistants(item: Item | None) -> bool:
    is_said = isinstance(item, MessageItem) and item.role == "assistant"
    return is_said or isinstance(item, ReasoningItem)


def _said(turn: list[TurnItem]) -> Message:
    text = "".join(_joined(item.content) for item in turn if isinstance(item, MessageItem))
    uses = [item.use() for item in turn if isinstance(item, CallItem | ComputerCallItem)]
    thoughts = [
        part.text for item in turn if isinstance(item, ReasoningItem) for part in item.content
    ]
    return assistant_message(text, uses, "\n".join(thoughts))


def _joined(parts: Sequence[ItemPart]) -> str:
    return "".join(part.text for part in parts)


class ResponsesDialect:
    """Stateless; `tokenizer` writes the texts of log-probs."""

    path = "/v1/responses"

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def read(self, body: Json, pictures: PictureTaker | None = None) -> ApiCall:
        asked = read_json_body(body, ResponseRequest, pictures)
        continues = asked.continues()
        if not asked.input and not continues:
            raise ApiError(400, "input: give a text or at least one item", "input")
        forced = asked.forced()
        grammar = asked.grammar()
        offers = asked.offers()
        return ApiCall(
            messages=asked.conversation(),
            tools=[offer.spec for offer in offers],
            tool_forms={
                offer.spec["function"]["name"]: offer.form
                for offer in offers
                if offer.form.is_freeform or offer.form.namespace
            },
            forced_tool=forced,
            variables=thinking_variables(asked.reasoning.effort, None),
            max_tokens=asked.max_output_tokens,
            grammar=grammar if forced is None else None,
            num_top=asked.top_logprobs if LOGPROBS in asked.include else None,
            is_streamed=asked.stream,
            continues=continues,
            has_instructions=bool(asked.instructions),
            ignored=(
                *(name for name in DECIDED if body.get(name) is not None),
                *asked.left_out(),
            ),
            sampling=given_fields(body, DECIDED),
            is_kept=body.get("store") is not False,
        )

    def write(self, call: ApiCall, answer: ApiAnswer) -> Json:
        (reply,) = answer.replies
        is_cut = reply.is_cut
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
        """The items of an answer. Without calls there is a message, if only an empty one: clients
        count on that."""
        (reply,) = answer.replies
        items: list[Json] = []
        if reply.reasoning:
            items.append(_thought(answer, reply.reasoning))
        if reply.text or not reply.calls:
            said = _message(answer, reply.text, self._logprobs(call, reply))
            if reply.is_cut:
                said["status"] = "incomplete"
            items.append(said)
        return items + [_call_item(use, call.tool_forms.get(use.name)) for use in reply.calls]

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
        if item["type"] in CALL_FIELDS:
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
        field, kind = CALL_FIELDS[item["type"]]
        yield from self._add(item | {field: ""})
        yield self._event(f"response.{kind}.delta", item_id=item["id"], delta=item[field])
        done = {field: item[field]} | ({"name": item["name"]} if field == "arguments" else {})
        yield self._event(f"response.{kind}.done", item_id=item["id"], **done)
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
    """This API knows no null there: a token whose bytes nobody can tell has none."""
    return entry | {"bytes": entry["bytes"] or []}


def _head(call: ApiCall, answer: ApiAnswer) -> Json:
    """The part of a response that is known before the answer, with the fields that clients
    require."""
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


def _call_item(use: ApiToolCall, form: ToolForm | None) -> Json:
    """A call as the client knows its tool."""
    known: Json = {"call_id": use.id, "name": use.name if form is None else form.name}
    if form is not None and form.namespace is not None:
        known["namespace"] = form.namespace
    if form is not None and form.is_freeform:
        text = freeform_text(use.arguments)
        return _item("custom_tool_call", f"ctc_{use.id}", input=text, **known)
    return _item("function_call", f"fc_{use.id}", arguments=use.arguments, **known)


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
