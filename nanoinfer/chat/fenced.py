"""Calls as code between two markers: what a model that was taught to chat writes unasked.

    ```python
    print(6 * 7)
    ```

Each `Fence` stands for one tool with one argument, which is the text between its markers.
Left out: code that holds the closing marker, which cannot be written in this form.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from nanoengine.model.chat_template import Message
from nanoinfer.chat.base import Described, ToolCall, ToolCallError
from nanoinfer.chat.reading import Found, Marks, WalkingParser


@dataclass(frozen=True, kw_only=True)
class Fence:
    """The markers of one tool's code. They are written as they stand, and looked for without the
    blanks at their ends."""

    tool: str
    argument: str
    open: str
    close: str = "\n```"

    def __post_init__(self) -> None:
        for name in ("open", "close"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name}={getattr(self, name)!r}: a marker must not be blank")


PYTHON_FENCE = Fence(tool="python", argument="code", open="```python\n")
BASH_FENCE = Fence(tool="bash", argument="command", open="```bash\n")


@dataclass(frozen=True, kw_only=True)
class FencedParser(WalkingParser):
    """The parser. With `is_one_at_a_time` a turn of several blocks is one error.

    Results come back as messages of `role`, after `prefix`; those for a user in one message.
    """

    name: ClassVar[str] = "fenced"
    fences: tuple[Fence, ...] = (PYTHON_FENCE,)
    is_one_at_a_time: bool = False
    role: str = "user"
    prefix: str = "Output:\n"

    def __post_init__(self) -> None:
        if not self.fences:
            raise ValueError("fences=(): a parser without fences reads no call")

    @functools.cached_property
    def _by_mark(self) -> dict[str, Fence]:
        return {fence.open.strip(): fence for fence in self.fences}

    @functools.cached_property
    def marks(self) -> Marks:
        # Where one marker begins another, the regex has to try the longer one first.
        longest_first = sorted(self._by_mark, key=len, reverse=True)
        return Marks.of("|".join(map(re.escape, longest_first)), *longest_first)

    def read(self, text: str) -> Found:
        found = super().read(text)
        if self.is_one_at_a_time and len(found) > 1:
            return [ToolCallError("more than one block, write one at a time")]
        return found

    def read_one(self, text: str, mark: re.Match[str]) -> tuple[Found, int]:
        fence = self._by_mark[mark.group()]
        close = fence.close.strip()
        end = text.find(close, mark.end())
        # Read to the end of the text: what follows an open block is part of it.
        if end < 0:
            return [ToolCallError(f"the block is not closed with {close}")], len(text)
        code = text[mark.end() : end]
        if not code.strip():
            return [ToolCallError("the code block is empty")], end + len(close)
        return [ToolCall(fence.tool, {fence.argument: code.strip("\n")})], end + len(close)

    def write(self, call: ToolCall) -> str:
        """`ValueError` for a call that no fence can hold."""
        fence = next((fence for fence in self.fences if fence.tool == call.name), None)
        if fence is None or set(call.arguments) != {fence.argument}:
            forms = ", ".join(f"{fence.tool}({fence.argument})" for fence in self.fences)
            raise ValueError(f"{call.name}({', '.join(call.arguments)}): the fences are of {forms}")
        code = call.arguments[fence.argument]
        if fence.close.strip() in code:
            raise ValueError(f"the code holds {fence.close.strip()}, which would end its block")
        return f"{fence.open}{code}{fence.close}"

    def describe(self, tools: Sequence[Described]) -> str:
        known = {tool.name: tool.schema["function"].get("description", "") for tool in tools}
        lines = [
            f"To call {fence.tool}, write its {fence.argument} in a block:\n"
            f"{fence.open}...{fence.close}\n{known[fence.tool]}".rstrip()
            for fence in self.fences
            if fence.tool in known
        ]
        return "\n\n".join(lines)

    def observation(self, results: Sequence[str]) -> list[Message]:
        texts = [self.prefix + result for result in results]
        # Many templates refuse two messages of a user in a row.
        if self.role == "user":
            texts = ["\n\n".join(texts)]
        return [{"role": self.role, "content": text} for text in texts]
