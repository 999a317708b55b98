"""Calls as Hermes and Qwen write them: JSON between `<tool_call>` and `</tool_call>`.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

A list of such objects in one pair of tags is read too (SmolLM2 writes it so), and a last call that
the model did not close. nanoinfer/server/tool_calls.py reads the same form for a server's clients,
to whom a malformed call is content.
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
from nanoinfer.server.tool_calls import CLOSE, OPEN

MARKS = marks(re.escape(OPEN))
END = re.compile(rf"\s*(?:{re.escape(CLOSE)}|(?={re.escape(OPEN)})|\Z)")


@dataclass(frozen=True, kw_only=True)
class HermesParser:
    """The parser; results come back as messages of `role`."""

    name: ClassVar[str] = "hermes"
    role: str = "tool"

    def read(self, text: str) -> Found:
        return read_calls(text, MARKS, _read_one)

    def beside(self, text: str) -> str:
        return beside_calls(text, MARKS, _read_one)

    def write(self, call: ToolCall) -> str:
        name = json.dumps(call.name, ensure_ascii=False)
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        return f'{OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{CLOSE}'

    def describe(self, tools: Sequence[Described]) -> str:
        """The words of Qwen's chat template."""
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{list_tools(tools)}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            f'{OPEN}{CLOSE} XML tags:\n{OPEN}\n{{"name": <function-name>, '
            f'"arguments": <args-json-object>}}\n{CLOSE}'
        )

    def observation(self, results: Sequence[str]) -> list[Message]:
        return list(results_as(self.role, results))


def _read_one(text: str, mark: re.Match[str]) -> tuple[Found, int]:
    try:
        value, end = read_json(text, mark.end())
    except ToolCallError as error:
        return [error], mark.end()
    close = END.match(text, end)
    if close is None:
        return [ToolCallError(f"the call must end with {CLOSE} after the JSON object")], end
    calls = value if isinstance(value, list) and value else [value]
    return [call_of(call) for call in calls], close.end()
