"""`ChatForm`: a client's messages in the form that the model's chat template reads, and back.

Tools are listed by the template where it can, else described in the system message; calls and
results are written as the model writes them, and so is reasoning that a client sends back. A reply
is split into reasoning, text and calls (reply.py).
Trainer, recording endpoint and server make their prompts of this, so that a model is served in the
context in which it was trained. Results with pictures: vision/brought_results.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.base import Parser, ToolCall
from nanoinfer.chat.call_ids import SPEAKERS, ids_of, next_ids, short_id
from nanoinfer.chat.choose import client_tool_chat
from nanoinfer.chat.harmony import HarmonyParser
from nanoinfer.chat.json_calls import written_arguments
from nanoinfer.chat.named import MistralParser
from nanoinfer.chat.reply import ReplyReader, mark_tokens, spoken_ids
from nanoinfer.dialects.exchange import ApiCall, ApiReply, ApiToolCall, Json
from nanoinfer.options.text import TextStream
from nanoinfer.params import Output
from nanoinfer.server.tool_calls import parse_call

MAX_FORMS = 32  # lists of tools that are kept


@dataclass(frozen=True)
class ChatForm:
    """The form in which a model is told of `tools`, the ones that a client offers."""

    parser: Parser
    description: str
    """For the system message; empty where the template lists the tools."""
    schemas: list[Json] | None
    """For the template, where it lists them."""
    writes_calls: bool = False
    """The template writes calls, as one that lists tools does; else they are text of the turn."""
    is_single: bool = False
    """It writes one a turn: several of one turn are text."""
    prints_reasoning: bool = True
    """The template prints the reasoning of a message; else it is text of the turn."""
    marks: Mapping[int, str] = field(default_factory=dict)
    """Control tokens that a turn is read by (`mark_tokens`)."""

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, tools: Sequence[Json]) -> ChatForm:
        """The form of the model of `tokenizer`."""
        chat = client_tool_chat(tokenizer, tools)
        form = cls(
            chat.parser,
            chat.description,
            chat.schemas,
            writes_calls=chat.writes_calls,
            is_single=chat.is_single,
            prints_reasoning=_prints_reasoning(tokenizer),
            marks=mark_tokens(tokenizer, has_tools=bool(tools)),
        )
        return form if tools else replace(form, description="", schemas=None)

    def opening(self, messages: Sequence[Message]) -> list[Message]:
        """A whole conversation for the template."""
        written = self.written(messages)
        if not self.description:
            return written
        if written and written[0]["role"] == "system":
            system, rest = written[0], written[1:]
            content = f"{system['content']}\n\n{self.description}"
            return [{**system, "content": content}, *rest]
        return [{"role": "system", "content": self.description}, *written]

    def written(self, messages: Sequence[Message]) -> list[Message]:
        """Messages for the template: results of one turn's calls as the model's parser brings them,
        and calls as text where the template does not know the tools."""
        if isinstance(self.parser, MistralParser):
            messages = [_with_short_ids(message) for message in messages]
        if isinstance(self.parser, HarmonyParser):
            messages = _one_call_a_turn(messages)
        written: list[Message] = []
        results: list[Message] = []
        for message in messages:
            if message["role"] == "tool":
                results.append(message)
                continue
            written += self._brought(results)
            results = []
            written.append(self._spoken(message))
        return written + self._brought(results)

    def _brought(self, results: list[Message]) -> list[Message]:
        if not results:
            return []
        contents = [result["content"] for result in results]
        if any(isinstance(one, list) for one in contents):
            from nanoinfer.vision.brought_results import brought as bring  # here: few models see

            brought = bring(self.parser.observation, contents)
        else:
            brought = self.parser.observation(contents)
        if len(brought) != len(results) or any(one["role"] in SPEAKERS for one in brought):
            return brought
        return [{**result, **one} for result, one in zip(results, brought, strict=True)]

    def _spoken(self, message: Message) -> Message:
        role = "system" if message["role"] == "developer" else message["role"]
        said = self._with_reasoning({**message, "role": role})
        calls = [_with_arguments(call) for call in said.get("tool_calls") or ()]
        if not calls:
            return said
        is_known = self.writes_calls or self.schemas is not None
        if is_known and not (self.is_single and len(calls) > 1):
            return {**said, "tool_calls": calls}
        written = [self.parser.write(_as_call(call)) for call in calls]
        content = "\n".join(part for part in (said["content"], *written) if part)
        return {key: value for key, value in said.items() if key != "tool_calls"} | {
            "content": content
        }

    def _with_reasoning(self, message: Message) -> Message:
        thought = message.get("reasoning_content")
        if not thought or self.prints_reasoning:
            return message
        rest = {key: value for key, value in message.items() if key != "reasoning_content"}
        is_mistral = isinstance(self.parser, MistralParser)
        opening, closing = (
            ("[THINK]", "[/THINK]") if is_mistral else ("<think>\n", "\n</think>\n\n")
        )
        return {**rest, "content": f"{opening}{thought}{closing}{message['content'] or ''}"}

    def reader(self, *, has_tools: bool, opened: str = "") -> ReplyReader:
        """A reader of the turns that answer a request, which offers tools or none."""
        return ReplyReader(
            self.parser if has_tools else None, opened, tuple(sorted(self.marks.values()))
        )

    def reply(
        self, text: str, output: Output, call: ApiCall, stop_text: str | None, opened: str = ""
    ) -> ApiReply:
        """A reply from the text of the sampled tokens, without the one that ended the turn.
        `opened` is the mark of reasoning that the prompt ends with (`opened_reasoning`)."""
        is_cut = output.finish_reason != "stop"
        has_tools = bool(call.tools) and not call.has_bare_calls
        if call.has_bare_calls or call.grammar is not None:
            opened = ""  # the schema rules the turn from its first token on
        read = self.reader(has_tools=has_tools, opened=opened).read(text, is_cut=is_cut)
        said, calls = read.content, read.calls
        uses = tuple(
            ApiToolCall(id=name, name=one.name, arguments=written_arguments(one))
            for name, one in zip(ids_of(calls, call.messages), calls, strict=True)
        )
        if call.has_bare_calls and not is_cut:
            only = parse_call(said)
            if only is not None and only.name in _names(call.tools):
                (name,) = next_ids(call.messages, 1)
                uses = (ApiToolCall(id=name, name=only.name, arguments=only.arguments),)
                said = ""
        return ApiReply(
            text=said, reasoning=read.reasoning, calls=uses, output=output, stop_text=stop_text
        )

    def spoken(
        self,
        tokenizer: ChatTokenizer,
        ids: Sequence[int],
        stop: Sequence[str],
        *,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> tuple[str, str | None]:
        """The text of sampled tokens, which `reply` reads, and the stop text that ended it, which
        is looked for behind the first `min_tokens`."""
        is_ended = bool(ids) and ids[-1] in stop_ids
        said = spoken_ids(tokenizer, ids[:-1] if is_ended else ids, self.marks)
        text = _as_streamed(tokenizer, said) if self.marks else tokenizer.decode(said)
        start = len(tokenizer.decode(ids[:min_tokens], skip_special=True)) if min_tokens else 0
        places = [(text.find(one, start), one) for one in stop if text.find(one, start) >= 0]
        if not places:
            return text, None
        place, found = min(places)
        return text[:place], found


class ChatForms:
    """The forms of one model, by the tools that are offered; an agent has one or two lists."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, ChatForm] = {}

    def of(self, tools: Sequence[Json]) -> ChatForm:
        key = json.dumps(tools, sort_keys=True)
        form = self._known.get(key)
        if form is None:
            form = ChatForm.of(self._tokenizer, tools)
            while len(self._known) >= MAX_FORMS:
                self._known.pop(next(iter(self._known)))
            self._known[key] = form
        return form


def _as_streamed(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    """The text as a stream of it is: broken characters are told from it token by token."""
    stream = TextStream(tokenizer, skip_special=False)
    for token in ids:
        stream.push(token)
    stream.finish()
    return stream.text


def _prints_reasoning(tokenizer: ChatTokenizer) -> bool:
    asked = {"role": "user", "content": "a"}
    said = {"role": "assistant", "content": "b", "reasoning_content": "qzxw"}
    try:
        return "qzxw" in tokenizer.render([asked, said], add_generation_prompt=False)
    except ValueError:
        return False


def _names(tools: Sequence[Json]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object where they are left out."""
    function = call["function"]
    given = function.get("arguments")
    is_empty = given is None or (isinstance(given, str) and not given.strip())
    return {**call, "function": {**function, "arguments": {} if is_empty else given}}


def _as_call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = function["arguments"]
    own = arguments if isinstance(arguments, dict) else {}
    return ToolCall(function["name"], own, call.get("id") or "")


def _with_short_ids(message: Message) -> Message:
    short = dict(message)
    if message.get("tool_call_id"):
        short["tool_call_id"] = short_id(message["tool_call_id"])
    if message.get("tool_calls"):
        short["tool_calls"] = [
            {**call, "id": short_id(call.get("id") or "")} for call in message["tool_calls"]
        ]
    return short


def _one_call_a_turn(messages: Sequence[Message]) -> list[Message]:
    """Several calls of one turn as a turn each, with its result behind it: Harmony's turns end with
    a call, and templates print the first one alone."""
    turns: list[Message] = []
    results = {one["tool_call_id"]: one for one in messages if one.get("tool_call_id")}
    moved: set[str] = set()
    for message in messages:
        calls = message.get("tool_calls") or ()
        if message.get("tool_call_id") in moved:
            continue
        if len(calls) < 2:
            turns.append(message)
            continue
        for place, call in enumerate(calls):
            said = message if place == 0 else {"role": "assistant", "content": ""}
            turns.append({**said, "tool_calls": [call]})
            if call["id"] in results:
                turns.append(results[call["id"]])
                moved.add(call["id"])
    return turns
