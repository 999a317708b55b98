"""How an action is written as text: a program to run, or the final answer.

The teacher writes with `program` and `final`; an environment reads with `parse`. One format per
preset. Left out: JSON tool calls, which are an agent's business (nanorl.agents.tools).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Parsed:
    """What an action asks for."""

    what: Literal["program", "answer", "nothing"]
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class ActionFormat:
    """The written form of programs, answers and observations of one preset.

    The first group of each pattern is the program or the answer. When an action holds both, the
    program counts: an answer given before its program's output was read is a guess.
    """

    name: str
    system: str
    program_open: str
    program_close: str
    answer_open: str
    program_pattern: str
    answer_pattern: str
    observation_role: str

    def program(self, code: str) -> str:
        return f"{self.program_open}{code}{self.program_close}"

    def final(self, answer: str) -> str:
        return f"{self.answer_open}{answer}"

    def parse(self, action: str) -> Parsed:
        """The first program of an action, else its answer, else nothing."""
        if match := re.search(self.program_pattern, action, re.DOTALL):
            return Parsed("program", match.group(1).strip("\n"))
        if match := re.search(self.answer_pattern, action):
            return Parsed("answer", match.group(1).strip())
        return Parsed("nothing")

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """The chat that opens a rollout."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, {"role": "user", "content": prompt}]


MARKDOWN = ActionFormat(
    name="markdown",
    system="Solve with Python. Write a ```python block that prints; read its output; "
    "then reply `Answer: X`.",
    program_open="```python\n",
    program_close="\n```",
    answer_open="Answer: ",
    program_pattern=r"```(?:python|py)?[ ]*\n(.*?)```",
    answer_pattern=r"(?i:answer):[ ]*([^\n]*)",
    observation_role="user",
)

COMPACT = ActionFormat(
    name="compact",
    system="",
    program_open="<run>",
    program_close="</run>",
    answer_open="<ans>",
    program_pattern=r"<run>(.*?)</run>",
    answer_pattern=r"<ans>([^<\n]*)",
    observation_role="tool",
)
