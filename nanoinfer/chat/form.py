"""`ChatForm`: a client's messages in the form that the model's chat template reads, and back.

Tools are listed by the template where it can, else described in the system message; calls and
results are written as the model writes them (nanoinfer/chat/). A reply is split into reasoning,
text and calls; one whose calls cannot all be read is text as the model wrote it, so nothing is
lost. Left out: images.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoengine.model.chat_template import Message
from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.chat.base import Parser, ToolCall, ToolCallError
from nanoinfer.chat.call_ids import SPEAKERS, next_ids
from nanoinfer.chat.choose import client_tool_chat
from nanoinfer.dialects.exchange import ApiCall, ApiReply, ApiToolCall, Json
from nanoinfer.params import Output
from nanoinfer.server.tool_calls import OPEN, parse_call

_REASONING = re.compile(r"\s*<think>(.*?)(?:</think>\s*|$)", re.DOTALL)
_CLOSED = "</think>"  # alone where the prompt opened it


@dataclass(frozen=True)
class ChatForm:
    """How a model is told of `tools`, the ones that a client offers."""

    parser: Parser
    description: str
    """For the system message; empty where the template lists the tools."""
    schemas: list[Json] | None
    """For the template, where it lists them."""

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, tools: Sequence[Json]) -> ChatForm:
        """The form of the model of `tokenizer`."""
        chat = client_tool_chat(tokenizer, tools)
        if not tools:
            return cls(chat.parser, "", None)
        return cls(chat.parser, chat.description, chat.schemas)

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
        brought = self.parser.observation([result["content"] for result in results])
        if len(brought) != len(results) or any(one["role"] in SPEAKERS for one in brought):
            return brought
        return [{**result, **one} for result, one in zip(results, brought, strict=True)]

    def _spoken(self, message: Message) -> Message:
        role = "system" if message["role"] == "developer" else message["role"]
        calls = message.get("tool_calls")
        if not calls or self.schemas is not None:
            return {**message, "role": role}
        written = [self.parser.write(_as_call(call)) for call in calls]
        content = "\n".join(part for part in (message["content"], *written) if part)
        return {"role": role, "content": content}

    def reply(self, text: str, output: Output, call: ApiCall, stop_text: str | None) -> ApiReply:
        """A reply from the text of the sampled tokens, without the one that ended the turn."""
        reasoning, said = _without_reasoning(text)
        uses: tuple[ApiToolCall, ...] = ()
        if call.has_bare_calls:
            only = parse_call(said)
            if only is not None and only.name in _names(call.tools):
                (call_id,) = next_ids(call.messages, 1)
                uses, said = (_use(call_id, only.name, only.arguments),), ""
        elif call.tools:
            found = self.parser.read(said)
            if found and not any(isinstance(one, ToolCallError) for one in found):
                written = [one for one in found if isinstance(one, ToolCall)]
                ids = next_ids(call.messages, len(written))
                uses = tuple(map(_written, ids, written))
                said = said.partition(OPEN)[0].rstrip() if OPEN in said else ""
        return ApiReply(
            text=said, reasoning=reasoning, calls=uses, output=output, stop_text=stop_text
        )


def _without_reasoning(text: str) -> tuple[str, str]:
    match = _REASONING.match(text)
    if match is not None:
        return match[1].strip(), text[match.end() :]
    before, closed, after = text.partition(_CLOSED)
    return (before.strip(), after.lstrip()) if closed else ("", text)


def _names(tools: Sequence[Json]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _as_call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = function["arguments"]
    return ToolCall(function["name"], arguments if isinstance(arguments, dict) else {})


def _written(call_id: str, call: ToolCall) -> ApiToolCall:
    return _use(call_id, call.name, json.dumps(dict(call.arguments), ensure_ascii=False))


def _use(call_id: str, name: str, arguments: str) -> ApiToolCall:
    return ApiToolCall(id=call_id, name=name, arguments=arguments)
