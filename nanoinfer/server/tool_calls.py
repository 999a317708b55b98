"""Calls of functions in a completion: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`,
as Hermes and Qwen write them; and the schema that forces one.

Text before the first call is content. A call that is not such JSON stays content as it was
written: what the model said is never lost. Left out: other models' formats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# As templates write calls. With free blanks a model that is unsure of the next key writes blanks to
# the end of its turn. Read by llguidance.
_AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class FunctionCall:
    name: str
    arguments: str  # JSON, as the OpenAI API wants it


def split_calls(text: str) -> tuple[str, list[FunctionCall]]:
    """Content and calls of a whole completion; no calls if any of them is malformed."""
    content, *parts = text.split(OPEN)
    calls: list[FunctionCall] = []
    for part in parts:
        call = parse_call(part.split(CLOSE)[0])
        if call is None:
            return text, []
        calls.append(call)
    return (content.rstrip() if calls else text), calls


def parse_call(text: str) -> FunctionCall | None:
    """One JSON object with a name and arguments; None if `text` is not that."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    return FunctionCall(
        value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)
    )


def safe_length(text: str) -> int:
    """The length of `text` that is content for sure, though the completion goes on."""
    at = text.find(OPEN)
    if at >= 0:
        return at
    for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-size:]):
            return len(text) - size
    return len(text)


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
