"""Calls in tags, an argument a pair: as Qwen3-Coder and as GLM-4.5 write them.

    <tool_call>                                <tool_call>add
    <function=add>                             <arg_key>a</arg_key>
    <parameter=a>                              <arg_value>1</arg_value>
    1                                          </tool_call>
    </parameter>
    </function>
    </tool_call>

A value ends at the closing tag behind which the next argument or the end of the call stands, so
other tags inside of it are text. The tool's schema says of which type it is (typed.py).
Left out: a value that holds its closing tag and the next one behind it, and one of Qwen's that
begins or ends with an empty line; neither can be written in these forms.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from nanoinfer.chat.base import Described, ToolCall, ToolCallError
from nanoinfer.chat.json_calls import checked_call, list_tools
from nanoinfer.chat.reading import Found, Marks, WalkingParser, beginnings
from nanoinfer.chat.typed import Schemas, parameter_schemas, text_of, value_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Tags:
    """The tags of a form, as regexes."""

    marks: Marks
    name: re.Pattern[str]
    """What follows a mark; group 1 is the tool's name."""
    key: re.Pattern[str]
    """What opens an argument; group 1 is its name."""
    value_end: re.Pattern[str]
    end: re.Pattern[str]
    """Of the call, behind its last argument."""
    shape: str
    """For the model, where the call is none."""


BEGUN = rf"<tool_call>\s*(?:{beginnings('<function=')})?"
FUNCTION = Tags(
    marks=Marks.of(r"(?:<tool_call>\s*)?<function=", OPEN, "<function=", begun=BEGUN),
    name=re.compile(r"([^<>\n]+)>"),
    key=re.compile(r"\s*<parameter=([^<>\n]+)>\n?"),
    value_end=re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))"),
    end=re.compile(r"\s*</function>(?:\s*</tool_call>)?"),
    shape="<function=NAME><parameter=KEY>VALUE</parameter></function>",
)
ARGUMENTS = Tags(
    marks=Marks.of(re.escape(OPEN), OPEN),
    name=re.compile(r"\s*([^<>\s]+)"),
    key=re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>"),
    value_end=re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))"),
    end=re.compile(r"\s*</tool_call>"),
    shape="<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
)


@dataclass(frozen=True, kw_only=True)
class _TaggedParser(WalkingParser):
    role: str = "tool"
    schemas: Schemas = field(default_factory=dict)
    """Of each tool's parameters (`parameter_schemas`)."""
    tags: ClassVar[Tags]

    @classmethod
    def of(cls, role: str, tools: Sequence[Described]) -> Self:
        return cls(role=role, schemas=parameter_schemas(tools))

    @property
    def marks(self) -> Marks:
        return self.tags.marks

    def read_one(self, text: str, mark: re.Match[str]) -> tuple[Found, int]:
        tags = self.tags
        name = tags.name.match(text, mark.end())
        if name is None:
            return [ToolCallError(f"a call is written as {tags.shape}")], mark.end()
        known = self.schemas.get(name[1], {})
        arguments: dict[str, Any] = {}
        place = name.end()
        while (key := tags.key.match(text, place)) is not None:
            value = tags.value_end.search(text, key.end())
            if value is None:
                return [ToolCallError(f"the value of {key[1]!r} is not closed")], key.end()
            written = text[key.end() : value.start()]
            arguments[key[1]] = value_of(written, known.get(key[1]))
            place = value.end()
        end = tags.end.match(text, place)
        if end is None:
            error = ToolCallError(f"the call of {name[1]!r} is not written as {tags.shape}")
            return [error], place
        return [checked_call(name[1], arguments)], end.end()

    def _checked(self, call: ToolCall, written: str) -> str:
        """`written`, which is that call. `ValueError` where it would be read as another one."""
        texts = {key: text_of(value) for key, value in call.arguments.items()}
        plain = type(self)(schemas={call.name: {key: {"type": "string"} for key in texts}})
        if plain.read(written) != [ToolCall(call.name, texts)]:
            raise ValueError(
                f"{call.name}({', '.join(call.arguments)}): cannot be written as {self.tags.shape}"
            )
        return written


@dataclass(frozen=True, kw_only=True)
class QwenCoderParser(_TaggedParser):
    """Qwen3-Coder's form."""

    name: ClassVar[str] = "qwen3_coder"
    tags: ClassVar[Tags] = FUNCTION

    def write(self, call: ToolCall) -> str:
        """`ValueError` for a call that this form cannot hold."""
        values = "".join(
            f"<parameter={key}>\n{text_of(value)}\n</parameter>\n"
            for key, value in call.arguments.items()
        )
        return self._checked(call, f"{OPEN}\n<function={call.name}>\n{values}</function>\n{CLOSE}")

    def describe(self, tools: Sequence[Described]) -> str:
        return (
            "# Tools\n\nYou have access to the following functions:\n\n"
            f"<tools>\n{list_tools(tools)}\n</tools>\n\n"
            "If you choose to call a function, reply in the following format:\n\n"
            f"{OPEN}\n<function=example_function_name>\n<parameter=example_parameter>\nvalue\n"
            f"</parameter>\n</function>\n{CLOSE}"
        )


@dataclass(frozen=True, kw_only=True)
class GlmParser(_TaggedParser):
    """GLM-4.5's form."""

    name: ClassVar[str] = "glm45"
    tags: ClassVar[Tags] = ARGUMENTS

    def write(self, call: ToolCall) -> str:
        """`ValueError` for a call that this form cannot hold."""
        values = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{text_of(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        return self._checked(call, f"{OPEN}{call.name}\n{values}{CLOSE}")

    def describe(self, tools: Sequence[Described]) -> str:
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{list_tools(tools)}\n</tools>\n\n"
            "For each function call, output the function name and arguments within the following "
            f"XML format:\n{OPEN}{{function-name}}\n<arg_key>{{arg-key-1}}</arg_key>\n"
            f"<arg_value>{{arg-value-1}}</arg_value>\n...\n{CLOSE}"
        )
