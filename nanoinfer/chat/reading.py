"""What the parsers share: the walk through a turn from call to call, and calls in JSON.

Text inside `<think>` is not read, closed or not; nor is what stands before a `</think>` that was
opened in the prompt. The walk goes from mark to mark, so a `<think>` inside an argument is text.
It reads no turn twice: whatever a model writes, the time grows with the length of the text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from nanoinfer.chat.base import Described, ToolCall, ToolCallError

MAX_CALLS = 64
"""Calls that are read in one turn; more are one error in the place of the rest."""
MAX_DEPTH = 32
"""Of lists and dicts inside arguments."""

Found = list[ToolCall | ToolCallError]
ReadOne = Callable[[str, re.Match[str]], tuple[Found, int]]

DECODER = json.JSONDecoder(strict=False)  # models write newlines into strings as they are
BLANKS = re.compile(r"\s*")


def marks(opening: str) -> re.Pattern[str]:
    """A pattern of everything at which the walk stops: reasoning, and a call's regex `opening`."""
    return re.compile(rf"<think>|</think>|{opening}", re.MULTILINE)


def read_calls(text: str, pattern: re.Pattern[str], read_one: ReadOne) -> Found:
    """The calls of a turn. `read_one` is given the text and the match that opens a call, and
    returns what it found there and where to go on, which lies behind the match's start."""
    return [call for _, _, found in find_calls(text, pattern, read_one) for call in found]


def beside_calls(text: str, pattern: re.Pattern[str], read_one: ReadOne) -> str:
    """What a turn says before, between and behind its calls, the blanks around them left out."""
    places = [0]
    for start, end, _ in find_calls(text, pattern, read_one):
        places += [start, end]
    parts = (text[i:j].strip() for i, j in zip_longest(places[::2], places[1::2]))
    return "\n".join(part for part in parts if part)


def find_calls(
    text: str, pattern: re.Pattern[str], read_one: ReadOne
) -> list[tuple[int, int, Found]]:
    """What `read_calls` finds, a part at a time, each with its start and end in the text."""
    found: list[tuple[int, int, Found]] = []
    place = num_calls = 0
    while (mark := pattern.search(text, place)) is not None:
        if mark.group() == "<think>":
            end = text.find("</think>", mark.end())
            if end < 0:
                break
            place = end + len("</think>")
        elif mark.group() == "</think>":  # the prompt opened it: all of this was reasoning
            found.clear()
            place, num_calls = mark.end(), 0
        else:
            one, place = read_one(text, mark)
            num_read = min(len(one), MAX_CALLS - num_calls)
            if num_read < len(one):
                rest = ToolCallError(
                    f"more than {MAX_CALLS} calls in one turn, the rest was not read"
                )
                return [*found, (mark.start(), len(text), [*one[:num_read], rest])]
            found.append((mark.start(), place, one))
            num_calls += num_read
    return found


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
