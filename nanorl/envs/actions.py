"""The written form of a program and of an answer: one record writes what a teacher says and reads
a policy's text.

    MARKDOWN.write(program("print(6 * 7)"))           "```python\\nprint(6 * 7)\\n```"
    MARKDOWN.read("```python\\nprint(6 * 7)\\n```")     [program("print(6 * 7)")]
    MARKDOWN.answer_in("That makes Answer: 42")       "42"
    MARKDOWN.answer_in("I give up.")                  None

`read` undoes `write`, and forgives what a model adds: text around the action, other blanks inside
the markers. A malformed call is a `ToolCallError`, whose text becomes the observation, so the
model can repair its call in the next turn.
Left out: calls with a name and arguments in JSON (nanoinfer/chat).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoengine.text.chat_template import Message
from nanoinfer.chat.base import ToolCall, ToolCallError
from nanoinfer.chat.fenced import Fence, FencedParser
from nanorl.envs.tools.base import Described


@dataclass(frozen=True, kw_only=True)
class ActionFormat:
    """A program's fence, an answer's marker, and the system message that asks for both."""

    name: str
    system: str = ""
    """Opens every chat; empty: there is no system message."""
    programs: FencedParser
    """How programs are written, one at a time, and how their output comes back."""
    answer: str
    """Stands in front of the final answer, which ends with its line. It is written as it stands,
    and looked for without the blanks at its ends."""

    def __post_init__(self) -> None:
        if not self.answer.strip():
            raise ValueError(f"answer={self.answer!r}: a marker must not be blank")

    def write(self, call: ToolCall) -> str:
        """The text of a call and nothing else; the end-of-turn token is not part of it."""
        return self.programs.write(call)

    def write_answer(self, value: str) -> str:
        """The text of a final answer."""
        return f"{self.answer}{value}"

    def read(self, text: str) -> list[ToolCall | ToolCallError]:
        """The one program in a turn, or the reason why it cannot be run; empty without one.

        A call wins over an answer beside it: the answer was written before the output was seen.
        """
        return self.programs.read(text)

    def beside(self, text: str) -> str:
        return self.programs.beside(text)

    def answer_in(self, text: str) -> str | None:
        """The answer that a turn gives; None without one."""
        # Models drop and add blanks around markers, which change nothing.
        marker = self.answer.strip()
        for line in reversed(text.splitlines()):  # of several answers the last one counts
            if marker in line:
                return line.rpartition(marker)[2].strip()
        return None

    def describe(self, tools: Sequence[Described]) -> str:
        """`system` asks for the form."""
        return self.system

    def observation(self, results: Sequence[str]) -> list[Message]:
        """The messages that carry outputs back to the model."""
        return self.programs.observation(results)


def program(code: str) -> ToolCall:
    """The call of the tool `python` that runs `code`."""
    return ToolCall("python", {"code": code})


MARKDOWN = ActionFormat(
    name="markdown",
    system="Solve with Python. Write a ```python block that prints; read its output; "
    "then reply `Answer: X`.",
    programs=FencedParser(is_one_at_a_time=True),
    answer="Answer: ",
)
"""For models that were taught to chat: they write such blocks unasked."""

COMPACT = ActionFormat(
    name="compact",
    programs=FencedParser(
        fences=(Fence(tool="python", argument="code", open="<run>", close="</run>"),),
        is_one_at_a_time=True,
        role="tool",
        prefix="",
    ),
    answer="<ans>",
)
"""For the tiny model, whose tokenizer has one token for each marker."""
