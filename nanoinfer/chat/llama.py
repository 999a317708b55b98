"""Calls as Llama 3 writes them: a JSON object that opens a line, several separated by `;`.

    {"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "add", "parameters": {"a": 3, "b": 4}}

`<|python_tag|>` may stand before the first one. A JSON object is taken for a call if its first key
is one of a call's.
Left out: the tools built into Llama 3.1 (`brave_search.call(...)`, bare Python after the tag).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from nanoengine.model.chat_template import Message
from nanoinfer.chat.base import Described, ToolCall, ToolCallError
from nanoinfer.chat.reading import (
    Found,
    beside_calls,
    call_of,
    list_tools,
    marks,
    read_calls,
    read_json,
    results_as,
)

PYTHON_TAG = "<|python_tag|>"
KEYS = "name|parameters|arguments|function|type"
MARKS = marks(rf'{re.escape(PYTHON_TAG)}|(?:^|;)[ \t]*(?=\{{\s*"(?:{KEYS})")')


@dataclass(frozen=True, kw_only=True)
class LlamaParser:
    """The parser; results come back as messages of `role`."""

    name: ClassVar[str] = "llama"
    role: str = "ipython"

    def read(self, text: str) -> Found:
        return read_calls(text, MARKS, _read_one)

    def beside(self, text: str) -> str:
        return beside_calls(text, MARKS, _read_one)

    def write(self, call: ToolCall) -> str:
        name = json.dumps(call.name, ensure_ascii=False)
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        return f'{{"name": {name}, "parameters": {arguments}}}'

    def describe(self, tools: Sequence[Described]) -> str:
        """The words of Llama 3's chat template."""
        return (
            "Given the following functions, please respond with a JSON for a function call with "
            "its proper arguments that best answers the given prompt.\n\nRespond in the format "
            '{"name": function name, "parameters": dictionary of argument name and its value}. '
            f"Do not use variables.\n\n{list_tools(tools, indent=4)}"
        )

    def observation(self, results: Sequence[str]) -> list[Message]:
        return list(results_as(self.role, results))


def _read_one(text: str, mark: re.Match[str]) -> tuple[Found, int]:
    try:
        value, end = read_json(text, mark.end())
    except ToolCallError as error:
        return [error], mark.end() + 1
    return [call_of(value)], end
