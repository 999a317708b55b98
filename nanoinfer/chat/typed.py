"""Arguments that a model writes as text between tags, one a parameter: what type each of them has.

The tool's schema tells: `<parameter=count>7</parameter>` is the text "7" where `count` is a string,
and else a number. A parameter of which no type is known is read as JSON if it is JSON, else as
text. What a schema allows only as a string is never read as anything else.
Left out: values that do not fit their type; they stay text, and the tool says what is wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nanoinfer.chat.base import Described, ToolCallError
from nanoinfer.chat.json_calls import read_json

WORDS = MappingProxyType({"True": True, "False": False, "None": None})
"""As templates print them that write a value with Python's `str`."""

Schemas = Mapping[str, Mapping[str, Any]]
"""The schema of each parameter of each tool."""


def parameter_schemas(tools: Sequence[Described]) -> dict[str, Mapping[str, Any]]:
    """The parameters' schemas, by the tools' names."""
    return {
        tool.name: (tool.schema["function"].get("parameters") or {}).get("properties") or {}
        for tool in tools
    }


def value_of(text: str, schema: Any) -> Any:
    """The value that `text` stands for, by the `schema` of its parameter."""
    types = _types(schema)
    if "string" in types:
        is_null = "null" in types and text.strip() in ("null", "None")
        return None if is_null else text
    word = text.strip()
    if word in WORDS:
        return WORDS[word]
    try:
        value, end = read_json(text, 0)
    except ToolCallError:
        return text
    is_said = not (isinstance(value, str) and not types)  # without a type quotes are text
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_said and is_finite and not text[end:].strip() else text


def text_of(value: Any) -> str:
    """The text that a model writes for `value`."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _types(schema: Any) -> set[str]:
    """The types that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    found = {given} if isinstance(given, str) else set(given or ())
    for one in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        found |= _types(one)
    values = [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())]
    if not found and any(isinstance(value, str) for value in values):
        found.add("string")
    return found
