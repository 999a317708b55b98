"""What the parsers share: the walk through a turn from call to call, and calls in JSON.

Text inside `<think>` is not read, closed or not; nor is what stands before a `</think>` that was
opened in the prompt (`[THINK]` is Mistral's). The walk goes from mark to mark, so a `<think>`
inside an argument is text. It reads no turn twice: whatever a model writes, the time grows with
the length of the text.

A parser of ours is a `WalkingParser`: it says what opens a call (`Marks`) and reads one.
A key that stands twice in a JSON object has the value that stands last, as in every JSON reader.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

from nanoengine.text.chat_template import Message
from nanoinfer.chat.base import Described, ToolCall, ToolCallError

MAX_CALLS = 64
"""Calls that are read in one turn; more are one error in the place of the rest."""
MAX_DEPTH = 32
"""Of lists and dicts inside arguments."""

REASONING = MappingProxyType({"<think>": "</think>", "[THINK]": "[/THINK]"})
"""What opens and closes the reasoning of a turn."""
CLOSINGS = frozenset(REASONING.values())

Found = list[ToolCall | ToolCallError]
Place = tuple[int, int, Found]
"""Where something was found in a text, its start and its end, and what."""

DECODER = json.JSONDecoder(strict=False)  # models write newlines into strings as they are
BLANKS = re.compile(r"\s*")


@dataclass(frozen=True)
class Marks:
    """What opens a call, and what may become that at the end of a text that goes on."""

    whole: re.Pattern[str]
    """Reasoning too: everything at which the walk stops."""
    begun: re.Pattern[str]

    @classmethod
    def of(cls, opening: str, *literals: str, begun: str = "") -> Marks:
        """Of the regex `opening`. Its beginnings are those of `literals`, and the regex `begun`,
        which matches the rest of the text."""
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
        """What the match of a mark opens, and where to go on: behind the match's start."""

    def find(self, text: str) -> list[Place]:
        """The calls of a turn, each with its place."""
        return find_calls(text, self)

    def read(self, text: str) -> Found:
        return [call for _, _, found in self.find(text) for call in found]

    def beside(self, text: str) -> str:
        """What a turn says before, between and behind its calls, the blanks around left out."""
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
    """What `parser` finds in a turn, a part at a time."""
    found: list[Place] = []
    pattern = parser.marks.whole
    place = num_calls = 0
    while (mark := pattern.search(text, place)) is not None:
        if (closing := REASONING.get(mark.group())) is not None:
            end = text.find(closing, mark.end())
            if end < 0:
                break
            place = end + len(closing)
        elif mark.group() in CLOSINGS:  # the prompt opened it: all of this was reasoning
            found.clear()
            place, num_calls = mark.end(), 0
        else:
            one, place = parser.read_one(text, mark)
            num_read = min(len(one), MAX_CALLS - num_calls)
            if num_read < len(one):
                return [*found, (mark.start(), len(text), [*one[:num_read], too_many()])]
            found.append((mark.start(), place, one))
            num_calls += num_read
    return found


def too_many() -> ToolCallError:
    """What stands in the place of the calls that are not read."""
    return ToolCallError(f"more than {MAX_CALLS} calls in one turn, the rest was not read")


def read_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and its end. `ToolCallError` if there is none."""
    place = _after_blanks(text, start)
    try:
        return DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos - place}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:  # a number of thousands of digits
        reason = str(error)
    raise ToolCallError(f"the call is not valid JSON: {reason}")


def call_of(value: Any) -> ToolCall | ToolCallError:
    """The call that a JSON value describes, with its arguments under either usual name."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]  # the outer form of OpenAI's API
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCallError('a call is a JSON object with a "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # JSON inside of JSON
        try:
            arguments, _ = read_json(arguments, 0)
        except ToolCallError as error:
            return error
    return checked_call(value["name"], {} if arguments is None else arguments)


def checked_call(name: str, arguments: Any) -> ToolCall | ToolCallError:
    """A call whose arguments everybody can take: a dict, not deep, of finite numbers and text."""
    if not isinstance(arguments, dict):
        return ToolCallError(f"the arguments of {name!r} must be an object with a name for each")
    pending: list[tuple[Any, int]] = [(name, 0), (arguments, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            return ToolCallError(f"the arguments are nested more than {MAX_DEPTH} deep")
        if isinstance(value, dict):
            pending += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list):
            pending += [(part, depth + 1) for part in value]
        elif isinstance(value, float) and not math.isfinite(value):
            return ToolCallError(f"{value} is not a number")
        elif isinstance(value, str) and not _is_text(value):
            return ToolCallError("a string holds half of a surrogate pair")
    return ToolCall(name, arguments)


def written_json(call: ToolCall, key: str = "arguments") -> str:
    """A call as a JSON object with its arguments under `key`."""
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{{"name": {name}, "{key}": {written_arguments(call)}}}'


def written_arguments(call: ToolCall) -> str:
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def results_as(role: str, results: Sequence[str]) -> list[dict[str, Any]]:
    """A message for each result; as one user message in Qwen's marks where only users may write."""
    if role != "user":
        return [{"role": role, "content": result} for result in results]
    texts = [f"<tool_response>\n{result}\n</tool_response>" for result in results]
    return [{"role": "user", "content": "\n".join(texts)}]


def list_tools(tools: Sequence[Described], indent: int | None = None) -> str:
    """The schemas of `tools`, one after the other."""
    return "\n".join(json.dumps(tool.schema, ensure_ascii=False, indent=indent) for tool in tools)


def _after_blanks(text: str, place: int) -> int:
    match = BLANKS.match(text, place)
    return match.end() if match else place


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
