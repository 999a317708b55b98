"""Calls of functions in the bodies of HTTP answers, and the schema that forces one.

A completion is read by the model's parser, as the trainer reads it (nanoinfer/chat/reply.py).
`split_calls` reads Hermes' form where no model is at hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoinfer.chat.base import ToolCall, ToolCallError
from nanoinfer.chat.hermes import HermesParser
from nanoinfer.chat.json_calls import call_of, read_json, written_arguments
from nanoinfer.chat.reasoning import REASONING
from nanoinfer.chat.reply import ReplyReader

# As templates write calls. With free blanks a model that is unsure of the next key writes blanks to
# the end of its turn. Read by llguidance.
_AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class FunctionCall:
    name: str
    arguments: str  # JSON, as the OpenAI API wants it


def split_calls(text: str) -> tuple[str, list[FunctionCall]]:
    """Content and calls of a whole completion; no calls if any of them is malformed."""
    opened = next((mark for mark, end in REASONING.items() if end in text and mark not in text), "")
    reply = ReplyReader(HermesParser(), opened).read(text)
    return reply.content, [function_call(call) for call in reply.calls]


def parse_call(text: str) -> FunctionCall | None:
    """The call that is all of `text`, as JSON without a frame; None if it is not that."""
    try:
        value, end = read_json(text, 0)
    except ToolCallError:
        return None
    call = call_of(value)
    if text[end:].strip() or isinstance(call, ToolCallError):
        return None
    return function_call(call)


def function_call(call: ToolCall) -> FunctionCall:
    return FunctionCall(call.name, written_arguments(call))


def call_schema(
    tools: Sequence[Mapping[str, Any]], name: str | None = None, answer: str | None = None
) -> str:
    """The JSON schema of a call of one of `tools`, or of the one named; or, where `answer` is a
    schema, of what that allows too. `ValueError` if there is no tool of that name."""
    functions = [tool["function"] for tool in tools]
    if name is not None:
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise ValueError(f"tool_choice: no tool is called {name!r}")
    options = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": _moved(
                    function.get("parameters") or {"type": "object"},
                    f"#/anyOf/{place}/properties/arguments",
                ),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for place, function in enumerate(functions)
    ]
    if answer is not None:
        options.append(_moved(json.loads(answer), f"#/anyOf/{len(options)}"))
    return json.dumps({"anyOf": options, "x-guidance": _AS_WRITTEN})


def _moved(schema: Any, place: str) -> Any:
    """A schema for use inside another, at that JSON pointer: references to its root go there."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        moved["$ref"] = place + ref[1:]
    return moved
