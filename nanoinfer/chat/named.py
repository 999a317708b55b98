"""Calls that open with the tool's name and go on with its arguments in JSON.

    [TOOL_CALLS]add[ARGS]{"a": 1}                                      Mistral since v11
    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "..."}] Mistral v3 to v7
    <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>      DeepSeek V3.1
    add\\n{"a": 1}                                                      GLM-4

Every generation of a family is read by its parser; what it writes is the generation that the
model's template writes (choose.py). Mistral's v3 to v11 print an id with a call, which is kept.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from nanoinfer.chat.base import Described, ToolCall, ToolCallError
from nanoinfer.chat.json_calls import (
    call_of,
    checked_call,
    list_tools,
    read_json,
    written_arguments,
    written_json,
)
from nanoinfer.chat.reading import Found, Marks, WalkingParser, beginnings

TOOL_CALLS = "[TOOL_CALLS]"
MISTRAL_NAME = re.compile(
    r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]([A-Za-z0-9]*)\s*)?(?:\[ARGS\])?(?=\s*\{)"
)
MISTRAL_MARKS = Marks.of(re.escape(TOOL_CALLS), TOOL_CALLS)

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK_MARKS = Marks.of(
    rf"(?:{CALLS_BEGIN}\s*)?{CALL_BEGIN}",
    CALLS_BEGIN,
    CALL_BEGIN,
    begun=rf"{CALLS_BEGIN}\s*(?:{beginnings(CALL_BEGIN)})?",
)
DEEPSEEK_NAME = re.compile(rf"\s*(?:function{SEPARATOR}([^\n<]+)\n```json|([^\n<]+){SEPARATOR})")
DEEPSEEK_END = re.compile(rf"\s*(?:```\s*)?(?:{CALL_END}|\Z)(?:\s*{CALLS_END})?")

GLM_NAME = r"[A-Za-z_][\w.\-]*"
GLM_MARKS = Marks.of(
    rf"(?:\A|<\|assistant\|>)[ \t\n]*({GLM_NAME})[ \t]*\n(?=\{{)",
    "<|assistant|>",
    begun=rf"(?:\A|<\|assistant\|>)[ \t\n]*(?:{GLM_NAME}[ \t]*\n?)?",
)


@dataclass(frozen=True, kw_only=True)
class MistralParser(WalkingParser):
    """Mistral's forms; `write` writes the one with `[ARGS]`, or a list where it `is_list`."""

    name: str = "mistral"
    role: str = "tool"
    is_list: bool = True
    has_ids: bool = True
    """Each call is written with an id: its own, or one that follows from what it says."""

    @property
    def marks(self) -> Marks:
        return MISTRAL_MARKS

    def read_one(self, text: str, mark: re.Match[str]) -> tuple[Found, int]:
        name = MISTRAL_NAME.match(text, mark.end())
        place = mark.end() if name is None else name.end()
        try:
            value, end = read_json(text, place)
        except ToolCallError as error:
            return [error], place
        if name is not None:
            return [_with_id(checked_call(name[1], value), name[2])], end
        calls = value if isinstance(value, list) and value else [value]
        return [_with_id(call_of(one), _id_of(one)) for one in calls], end

    def write(self, call: ToolCall) -> str:
        arguments = written_arguments(call)
        named = call.id or hashlib.sha256(f"{call.name}{arguments}".encode()).hexdigest()[:9]
        if self.is_list:
            told = f', "id": "{named}"' if self.has_ids else ""
            return f"{TOOL_CALLS} [{written_json(call)[:-1]}{told}}}]"
        told = f"[CALL_ID]{named}" if self.has_ids else ""
        return f"{TOOL_CALLS}{call.name}{told}[ARGS]{arguments}"

    def describe(self, tools: Sequence[Described]) -> str:
        shape = self.write(ToolCall("name"))
        return f"You may call these functions:\n\n{list_tools(tools)}\n\nWrite a call as {shape}"


@dataclass(frozen=True, kw_only=True)
class DeepSeekParser(WalkingParser):
    """DeepSeek's forms: V3.1's, or with `is_fenced` that of V3 and R1, JSON in a fence."""

    name: str = "deepseek"
    role: str = "tool"
    is_fenced: bool = False

    @property
    def marks(self) -> Marks:
        return DEEPSEEK_MARKS

    def read_one(self, text: str, mark: re.Match[str]) -> tuple[Found, int]:
        name = DEEPSEEK_NAME.match(text, mark.end())
        if name is None:
            return [ToolCallError(f"a call begins with its name and {SEPARATOR}")], mark.end()
        try:
            value, place = read_json(text, name.end())
        except ToolCallError as error:
            return [error], name.end()
        end = DEEPSEEK_END.match(text, place)
        if end is None:
            return [ToolCallError(f"the call must end with {CALL_END} after the JSON")], place
        return [checked_call((name[1] or name[2]).strip(), value)], end.end()

    def write(self, call: ToolCall) -> str:
        arguments = written_arguments(call)
        one = f"{call.name}{SEPARATOR}{arguments}"
        if self.is_fenced:
            one = f"function{SEPARATOR}{call.name}\n```json\n{arguments}\n```"
        return f"{CALLS_BEGIN}{CALL_BEGIN}{one}{CALL_END}{CALLS_END}"

    def describe(self, tools: Sequence[Described]) -> str:
        shape = self.write(ToolCall("name"))
        return f"## Tools\n\n{list_tools(tools)}\n\nWrite a call as {shape}"


@dataclass(frozen=True, kw_only=True)
class Glm4Parser(WalkingParser):
    """GLM-4's form: a turn that is nothing but a name, and its arguments in the next line."""

    name: ClassVar[str] = "glm4"
    role: str = "observation"

    @property
    def marks(self) -> Marks:
        return GLM_MARKS

    def read_one(self, text: str, mark: re.Match[str]) -> tuple[Found, int]:
        try:
            value, end = read_json(text, mark.end())
        except ToolCallError as error:
            return [error], mark.end()
        return [checked_call(mark[1], value)], end

    def write(self, call: ToolCall) -> str:
        return f"{call.name}\n{written_arguments(call)}"

    def describe(self, tools: Sequence[Described]) -> str:
        return (
            f"You may call these functions:\n\n{list_tools(tools)}\n\nTo call one, reply with "
            "nothing but its name and, in the next line, its arguments as a JSON object."
        )


def _with_id(call: ToolCall | ToolCallError, given: str | None) -> ToolCall | ToolCallError:
    return replace(call, id=given) if isinstance(call, ToolCall) and given else call


def _id_of(value: Any) -> str:
    given = value.get("id") if isinstance(value, dict) else None
    return given if isinstance(given, str) else ""
