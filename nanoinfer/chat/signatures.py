"""`signature`: a tool as the head of a Python function, in a third of the tokens of its schema.

    def look(word: str, num_lines: int = 3)
      Find a word in the dictionary.
      word: the word as it is written

Left out: schemas that no annotation says in short (nested objects, references, lengths); they are
written as JSON.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

TYPES: Mapping[str, str] = MappingProxyType(
    {
        "string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None",
        "array": "list", "object": "dict",
    }
)  # fmt: skip
SAID = frozenset({"type", "description", "default", "title", "items", "enum", "const", "anyOf"})
"""What a signature can say of a parameter."""
INDENT = "  "


def signature(schema: Mapping[str, Any]) -> str:
    """The function of an OpenAI function schema; the schema itself where it does not fit."""
    function = schema["function"]
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties", {})
    required = set(parameters.get("required", ()))
    try:
        heads = {name: _head(name, one, name in required) for name, one in properties.items()}
    except _NotSaid:
        return json.dumps(schema, ensure_ascii=False)
    in_order = sorted(heads, key=lambda name: name not in required)  # as Python wants it
    said = {name: properties[name].get("description") for name in in_order}
    notes = [f"{name}: {text}" for name, text in said.items() if text]
    text = "\n".join(part for part in (function.get("description", ""), *notes) if part)
    lines = [f"def {function['name']}({', '.join(heads[name] for name in in_order)})"]
    return "\n".join([*lines, *(INDENT + line for line in text.splitlines() if line.strip())])


class _NotSaid(Exception):  # noqa: N818 - a way out, not an error
    """A schema says what a signature cannot."""


def _head(name: str, schema: Mapping[str, Any], is_required: bool) -> str:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise _NotSaid
    head = f"{name}: {_annotation(schema)}".removesuffix(": Any")
    default = repr(schema["default"]) if "default" in schema else "..."
    return head if is_required else f"{head} = {default}"


def _annotation(schema: Mapping[str, Any]) -> str:
    if not schema.keys() <= SAID:
        raise _NotSaid
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return f"Literal[{', '.join(map(repr, values))}]"
    if "anyOf" in schema:
        return " | ".join(map(_annotation, schema["anyOf"]))
    kind = schema.get("type")
    if kind is None:
        return "Any"
    if not isinstance(kind, str) or kind not in TYPES:
        raise _NotSaid
    items = f"[{_annotation(schema['items'])}]" if schema.get("items") else ""
    return TYPES[kind] + items
