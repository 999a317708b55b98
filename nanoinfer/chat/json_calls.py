"""Calls in JSON: read, checked and written, and the schemas of tools as texts.

A key that stands twice in a JSON object has the value that stands last, as in every JSON reader.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from nanoinfer.chat.base import Described, ToolCall, ToolCallError

MAX_DEPTH = 32
"""Of lists and dicts inside arguments."""

DECODER = json.JSONDecoder(strict=False)  # models write newlines into strings as they are
BLANKS = re.compile(r"\s*")


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
