"""Calls as Llama 3 writes them: a JSON object that opens a line, several separated by `;`.

    {"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "add", "parameters": {"a": 3, "b": 4}}

`<|python_tag|>` may stand before the first one. A JSON object is taken for a call if its first key
is one of a call's.
Left out: the tools built into Llama 3.1 (`brave_search.call(...)`, bare Python after the tag).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from nanoinfer.chat.base import Described, ToolCall, ToolCallError
from nanoinfer.chat.json_calls import call_of, list_tools, read_json, written_json
from nanoinfer.chat.reading import Found, Marks, WalkingParser

PYTHON_TAG = "<|python_tag|>"
KEYS = "name|parameters|arguments|function|type"
MARKS = Marks.of(
    rf'{re.escape(PYTHON_TAG)}|(?:^|;)[ \t]*(?=\{{\s*"(?:{KEYS})")',
    PYTHON_TAG,
    begun=r'(?:^|;)[ \t]*(?:\{\s*(?:"[a-z]*)?)?',
)


@dataclass(frozen=True, kw_only=True)
class LlamaParser(WalkingParser):
    """The parser; results come back as messages of `role`."""

    name: ClassVar[str] = "llama"
    role: str = "ipython"

    @property
    def marks(self) -> Marks:
        return MARKS

    def read_one(self, text: str, mark: re.Match[str]) -> tuple[Found, int]:
        try:
            value, end = read_json(text, mark.end())
        except ToolCallError as error:
            return [error], mark.end() + 1
        return [call_of(value)], end

    def write(self, call: ToolCall) -> str:
        return written_json(call, "parameters")

    def describe(self, tools: Sequence[Described]) -> str:
        """The words of Llama 3's chat template."""
        return (
            "Given the following functions, please respond with a JSON for a function call with "
            "its proper arguments that best answers the given prompt.\n\nRespond in the format "
            '{"name": function name, "parameters": dictionary of argument name and its value}. '
            f"Do not use variables.\n\n{list_tools(tools, indent=4)}"
        )
