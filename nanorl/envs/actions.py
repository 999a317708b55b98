"""The written form of an action: one record writes what a teacher says and reads a policy's text.

    MARKDOWN.write(ToolCall("print(6 * 7)"))          "```python\\nprint(6 * 7)\\n```"
    MARKDOWN.read("```python\\nprint(6 * 7)\\n```")     ToolCall("print(6 * 7)")
    MARKDOWN.read("That makes Answer: 42")            FinalAnswer("42")
    MARKDOWN.read("I give up.")                       None

`read` undoes `write`, and forgives what a model adds: text around the action, other blanks inside
the markers. A malformed call raises `ToolCallError`, whose text becomes the observation, so the
model can repair its call in the next turn.
Left out: calls with a name and arguments in JSON, which nanoinfer's server reads (tool_calls.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class ToolCallError(ValueError):
    """The call cannot be run; the message is written for the model."""


@dataclass(frozen=True)
class ToolCall:
    """A program to run: `ToolCall("print(6 * 7)")`."""

    code: str


@dataclass(frozen=True)
class FinalAnswer:
    """The answer of the agent, which ends its episode: `FinalAnswer("42")`."""

    value: str


@dataclass(frozen=True, kw_only=True)
class ActionFormat:
    """Markers of calls and answers, and how the observation comes back.

    The markers are written as they stand; `read` looks for them without the blanks at their ends.
    """

    name: str
    system: str = ""
    """Opens every chat and asks for this format; empty: there is no system message."""
    open: str
    """Opens a program."""
    close: str
    """Closes it."""
    answer: str
    """Stands in front of the final answer, which ends with its line."""
    observation_role: str = "user"
    """Role of the message that carries an observation; many templates know no "tool"."""
    observation_prefix: str = ""
    """Text before an observation."""

    def __post_init__(self) -> None:
        for name in ("open", "close", "answer"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name}={getattr(self, name)!r}: a marker must not be blank")

    def write(self, action: ToolCall | FinalAnswer) -> str:
        """The text of an action and nothing else; the end-of-turn token is not part of it."""
        if isinstance(action, ToolCall):
            return f"{self.open}{action.code}{self.close}"
        return f"{self.answer}{action.value}"

    def read(self, text: str) -> ToolCall | FinalAnswer | None:
        """The action in a model's text, None without one. `ToolCallError` for a malformed call.

        A call wins over an answer beside it: the answer was written before the output was seen.
        """
        code = self._code_in(text)
        if code is not None:
            return ToolCall(code)
        marker = self.answer.strip()
        for line in reversed(text.splitlines()):  # of several answers the last one counts
            if marker in line:
                return FinalAnswer(line.rpartition(marker)[2].strip())
        return None

    def observation_messages(self, text: str) -> list[dict[str, Any]]:
        """The messages that carry an observation back to the model."""
        return [{"role": self.observation_role, "content": self.observation_prefix + text}]

    def _code_in(self, text: str) -> str | None:
        """The one program in `text`; two programs, an open one and an empty one are errors."""
        opening, closing = self.open.strip(), self.close.strip()
        _, opened, rest = text.partition(opening)
        if not opened:
            return None
        code, closed, after = rest.partition(closing)
        if not closed:
            raise ToolCallError(f"the block is not closed with {closing}")
        if opening in after:
            raise ToolCallError("more than one block, write one at a time")
        if not code.strip():
            raise ToolCallError("the code block is empty")
        return code.strip("\n")


MARKDOWN = ActionFormat(
    name="markdown",
    system="Solve with Python. Write a ```python block that prints; read its output; "
    "then reply `Answer: X`.",
    open="```python\n",
    close="\n```",
    answer="Answer: ",
    observation_prefix="Output:\n",
)
"""For models that were taught to chat: they write such blocks unasked."""

COMPACT = ActionFormat(
    name="compact", open="<run>", close="</run>", answer="<ans>", observation_role="tool"
)
"""For the tiny model, whose tokenizer has one token for each marker."""
