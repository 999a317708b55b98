"""The written form of a program and of an answer: one record writes what a teacher says and reads
a policy's text.

    MARKDOWN.write(program("print(6 * 7)"))           "```python\\nprint(6 * 7)\\n```"
    MARKDOWN.read("```python\\nprint(6 * 7)\\n```")     [program("print(6 * 7)")]
    MARKDOWN.answer_in("That makes Answer: 42")       "42"
    MARKDOWN.answer_in("I give up.")                  None

`read` undoes `write`, and forgives what a model adds: text around the action, other blanks inside
the markers. A malformed call is a `ToolCallError`, whose text becomes the observation, so the
model can repair its call in the next turn.
Left out: calls with a name and arguments in JSON (nanorl/parsers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoengine.model.chat_template import Message
from nanorl.parsers.base import ToolCall, ToolCallError
from nanorl.tools.base import Tool


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

    def write(self, call: ToolCall) -> str:
        """The text of a call and nothing else; the end-of-turn token is not part of it."""
        return f"{self.open}{call.arguments['code']}{self.close}"

    def write_answer(self, value: str) -> str:
        """The text of a final answer."""
        return f"{self.answer}{value}"

    def read(self, text: str) -> list[ToolCall | ToolCallError]:
        """The one program in a turn, or the reason why it cannot be run; empty without one.

        A call wins over an answer beside it: the answer was written before the output was seen.
        """
        try:
            code = self._code_in(text)
        except ToolCallError as error:
            return [error]
        return [] if code is None else [program(code)]

    def answer_in(self, text: str) -> str | None:
        """The answer that a turn gives; None without one."""
        marker = self.answer.strip()
        for line in reversed(text.splitlines()):  # of several answers the last one counts
            if marker in line:
                return line.rpartition(marker)[2].strip()
        return None

    def describe(self, tools: Sequence[Tool]) -> str:
        """`system` asks for the form."""
        return self.system

    def observation(self, results: Sequence[str]) -> list[Message]:
        """The messages that carry outputs back to the model."""
        return [
            {"role": self.observation_role, "content": self.observation_prefix + text}
            for text in results
        ]

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


def program(code: str) -> ToolCall:
    """The call of the tool `python` that runs `code`."""
    return ToolCall("python", {"code": code})


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
