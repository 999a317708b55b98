"""How a teacher writes an action: a program to run, or the final answer. One format a preset.

Reading actions is the agent's business: the `ToolFormat` of a preset (nanorl.agents.tools) must
have the same markers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ActionFormat:
    """The written form of programs and answers, and the system text that asks for it."""

    name: str
    system: str
    "Opens every chat; empty: there is no system message."
    program_open: str
    program_close: str
    answer_open: str

    def program(self, code: str) -> str:
        return f"{self.program_open}{code}{self.program_close}"

    def final(self, answer: str) -> str:
        return f"{self.answer_open}{answer}"


MARKDOWN = ActionFormat(
    name="markdown",
    system="Solve with Python. Write a ```python block that prints; read its output; "
    "then reply `Answer: X`.",
    program_open="```python\n",
    program_close="\n```",
    answer_open="Answer: ",
)

COMPACT = ActionFormat(
    name="compact",
    system="",
    program_open="<run>",
    program_close="</run>",
    answer_open="<ans>",
)
