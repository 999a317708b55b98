"""Calls as Hermes and Qwen write them: JSON between `<tool_call>` and `</tool_call>`.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

Read too are a list of such objects in one pair of tags (SmolLM2 writes it so), several of them, a
code fence around them, and a last call that the model did not close.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nanoinfer.chat.base import Described, ToolCall, ToolCallError
from nanoinfer.chat.json_calls import call_of, list_tools, read_json, written_json
from nanoinfer.chat.reading import Found, Marks, WalkingParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKS = Marks.of(re.escape(OPEN), OPEN)
FENCE = re.compile(r"\s*```[a-z]*\s*")
END = re.compile(rf"\s*(?:```\s*)?(?:{re.escape(CLOSE)}|(?={re.escape(OPEN)})|\Z)")
NEXT = re.compile(r"\s*[,;]?\s*(?=\{)")


@dataclass(frozen=True, kw_only=True)
class HermesParser(WalkingParser):
    """The parser; results come back as messages of `role`."""

    name: ClassVar[str] = "hermes"
    role: str = "tool"

    @property
    def marks(self) -> Marks:
        return MARKS

    def read_one(self, text: str, mark: re.Match[str]) -> tuple[Found, int]:
        fence = FENCE.match(text, mark.end())
        place = mark.end() if fence is None else fence.end()
        found: Found = []
        while True:
            try:
                value, place = read_json(text, place)
            except ToolCallError as error:
                return [*found, error], place
            found += _calls_of(value)
            close = END.match(text, place)
            if close is not None:
                return found, close.end()
            following = NEXT.match(text, place)
            if following is None:
                open_end = ToolCallError(f"the call must end with {CLOSE} after the JSON object")
                return [open_end], place
            place = following.end()

    def write(self, call: ToolCall) -> str:
        return f"{OPEN}\n{written_json(call)}\n{CLOSE}"

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


def _calls_of(value: Any) -> Found:
    return [call_of(one) for one in (value if isinstance(value, list) and value else [value])]
