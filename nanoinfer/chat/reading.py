"""What the parsers share: the walk through a turn from call to call.

Text inside `<think>` is not read, closed or not; nor is what stands before a `</think>` that was
opened in the prompt (`[THINK]` is Mistral's). The walk goes from mark to mark, so a `<think>`
inside an argument is text. It reads no turn twice: whatever a model writes, the time grows with
the length of the text.

A parser of ours is a `WalkingParser`: it says what opens a call (`Marks`) and reads one.
Next: fenced.py, the plainest. Left out: calls in JSON (json_calls.py).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from nanoengine.text.chat_template import Message
from nanoinfer.chat.base import ToolCall, ToolCallError
from nanoinfer.chat.reasoning import CLOSINGS, REASONING

MAX_CALLS = 64
"""Calls that are read in one turn; more are one error in the place of the rest."""

Found = list[ToolCall | ToolCallError]
Place = tuple[int, int, Found]
"""Where something was found in a text, its start and its end, and what."""


@dataclass(frozen=True)
class Marks:
    """The patterns of the marks that open a call, and of their beginnings at the end of a text that
    goes on."""

    whole: re.Pattern[str]
    """Reasoning too: everything at which the walk stops."""
    begun: re.Pattern[str]

    @classmethod
    def of(cls, opening: str, *literals: str, begun: str = "") -> Marks:
        """The marks that match the regex `opening`. Its beginnings are those of `literals`, and the
        regex `begun`, which matches the rest of the text."""
        thinking = "|".join(re.escape(mark) for pair in REASONING.items() for mark in pair)
        parts = [*([begun] if begun else []), *map(beginnings, literals)]
        return cls(
            re.compile(f"{thinking}|{opening}", re.MULTILINE),
            re.compile(f"(?:{'|'.join(parts)})\\Z", re.MULTILINE),
        )


def beginnings(literal: str) -> str:
    """A regex of every beginning of `literal` that is not all of it."""
    return "|".join(re.escape(literal[:size]) for size in range(len(literal) - 1, 0, -1))


class WalkingParser(ABC):
    """The part of a parser that goes from mark to mark; others are in the subclasses."""

    role: str
    """Of the messages that bring results back."""

    @property
    @abstractmethod
    def marks(self) -> Marks: ...

    @abstractmethod
    def read_one(self, text: str, mark: re.Match[str]) -> tuple[Found, int]:
        """Read the call that the match of a mark opens, and return it with the place to go on from:
        behind the match's start."""

    def find(self, text: str) -> list[Place]:
        """The calls of a turn, each with its place."""
        return find_calls(text, self)

    def read(self, text: str) -> Found:
        return [call for _, _, found in self.find(text) for call in found]

    def beside(self, text: str) -> str:
        """The text before, between and behind the calls of a turn, without the blanks around it."""
        parts = (part.strip() for part in parts_beside(text, self.find(text)))
        return "\n".join(part for part in parts if part)

    def may_open(self, text: str, start: int) -> int:
        """The first place from `start` on where a call opens, or may open when the text goes on;
        the text's end where there is none."""
        found = self.marks.whole.search(text, start)
        while found is not None and (found.group() in REASONING or found.group() in CLOSINGS):
            found = self.marks.whole.search(text, found.end())
        if found is not None:
            return found.start()
        begun = self.marks.begun.search(text, start)
        return len(text) if begun is None else begun.start()

    def observation(self, results: Sequence[str]) -> list[Message]:
        return list(results_as(self.role, results))


def parts_beside(text: str, places: Sequence[Place]) -> list[str]:
    """The text before, between and behind `places`."""
    ends = [0, *(place for start, end, _ in places for place in (start, end))]
    return [text[i:j] for i, j in zip_longest(ends[::2], ends[1::2])]


def find_calls(text: str, parser: WalkingParser) -> list[Place]:
    """Find the calls of a turn with `parser`, one part of the text at a time."""
    found: list[Place] = []
    pattern = parser.marks.whole
    place = num_calls = 0
    while (mark := pattern.search(text, place)) is not None:
        if (closing := REASONING.get(mark.group())) is not None:
            end = text.find(closing, mark.end())
            # Reasoning that was not closed was cut off: no call can follow it.
            if end < 0:
                break
            place = end + len(closing)
        elif mark.group() in CLOSINGS:  # the prompt opened it: all of this was reasoning
            found.clear()
            place, num_calls = mark.end(), 0
        else:
            one, place = parser.read_one(text, mark)
            # A model that repeats itself writes thousands of calls; each would be a program.
            num_read = min(len(one), MAX_CALLS - num_calls)
            if num_read < len(one):
                return [*found, (mark.start(), len(text), [*one[:num_read], too_many()])]
            found.append((mark.start(), place, one))
            num_calls += num_read
    return found


def too_many() -> ToolCallError:
    """The error that stands in the place of the calls that are not read."""
    return ToolCallError(f"more than {MAX_CALLS} calls in one turn, the rest was not read")


def results_as(role: str, results: Sequence[str]) -> list[dict[str, Any]]:
    """A message for each result; as one user message in Qwen's marks where only users may write."""
    if role != "user":
        return [{"role": role, "content": result} for result in results]
    texts = [f"<tool_response>\n{result}\n</tool_response>" for result in results]
    return [{"role": "user", "content": "\n".join(texts)}]
