"""What an action says: a call of a tool, a final answer, or neither.

A format is a small frozen record, so that a preset can have markers of one token each. Parsers are
looked up by name in a read-only table. Malformed calls raise `ToolCallError`, whose text becomes
the observation: the model can repair its call in the next turn.
A call wins over an answer in the same action: the answer was written before the output was seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


class ToolCallError(ValueError):
    """A call that cannot be run; the message is written for the model."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How actions are written and how observations come back."""

    parser: str = "fenced"
    """Name of a parser: "fenced" or "hermes"."""
    open: str = "```python"
    """Opens a code block ("fenced") or a JSON call ("hermes")."""
    close: str = "```"
    """Closes it."""
    answer: str = "Answer:"
    """Stands in front of the final answer, which ends with its line."""
    observation_role: str = "user"
    """Role of the message that carries an observation; many templates know no "tool"."""
    observation_prefix: str = "Output:\n"
    """Text before an observation."""
    timed_out: str = "timed out"
    out_of_memory: str = "out of memory"
    too_much_output: str = "too much output"
    killed: str = "killed"
    no_output: str = "(no output)"
    unavailable: str = "tool unavailable"
    """The only observation when the tool is switched off."""
    no_more_calls: str = "no calls left, give the final answer"
    """The observation when the calls of a rollout are used up."""

    def __post_init__(self) -> None:
        if self.parser not in PARSERS:
            raise ValueError(f"parser={self.parser!r}: choose one of {', '.join(PARSERS)}")
        for name in ("open", "close", "answer"):
            if not getattr(self, name):
                raise ValueError(f"{name}='': a marker must not be empty")


def hermes_format() -> ToolFormat:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and Hermes write it."""
    return ToolFormat(
        parser="hermes",
        open="<tool_call>",
        close="</tool_call>",
        observation_role="tool",
        observation_prefix="",
    )


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call to run; `arguments["code"]` is the program of a code tool."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Action:
    """At most one of the two is set."""

    call: ToolCall | None = None
    answer: str | None = None


Parser = Callable[[str, ToolFormat], ToolCall | None]


def parse_action(text: str, form: ToolFormat) -> Action:
    """The call or the answer in `text`. `ToolCallError` where a call is malformed."""
    call = PARSERS[form.parser](text, form)
    if call is not None:
        return Action(call=call)
    return Action(answer=parse_answer(text, form.answer))


def parse_answer(text: str, marker: str) -> str | None:
    """The rest of the last line that holds the marker, after its last marker; None without one."""
    for line in reversed(text.splitlines()):
        if marker in line:
            return line.rpartition(marker)[2].strip()
    return None


def parse_fenced(text: str, form: ToolFormat) -> ToolCall | None:
    """One code block. Two blocks or an open one are errors, no block is no call."""
    body = _one_block(text, form)
    if body is None:
        return None
    if not body.strip():
        raise ToolCallError("the code block is empty")
    return ToolCall(name="python", arguments={"code": body.strip("\n")})


def parse_hermes(text: str, form: ToolFormat) -> ToolCall | None:
    """One JSON object with a name and arguments (an object, or a string that holds one)."""
    body = _one_block(text, form)
    if body is None:
        return None
    try:
        call = json.loads(body)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ToolCallError(f"the call is not valid JSON: {error}") from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ToolCallError('the call needs a "name" that is a string')
    if not isinstance(arguments, dict):
        raise ToolCallError('the "arguments" must be an object')
    return ToolCall(name=call["name"], arguments=arguments)


def _one_block(text: str, form: ToolFormat) -> str | None:
    _, opened, rest = text.partition(form.open)
    if not opened:
        return None
    body, closed, after = rest.partition(form.close)
    if not closed:
        raise ToolCallError(f"the block is not closed with {form.close}")
    if form.open in after:
        raise ToolCallError("more than one block, write one at a time")
    return body


PARSERS: Mapping[str, Parser] = MappingProxyType({"fenced": parse_fenced, "hermes": parse_hermes})
"""Read-only. A new format is a new entry here."""


# How a teacher writes an action: a program to run, or the final answer. One format a preset.
#
# Reading actions is the agent's business: the `ToolFormat` of a preset (nanorl.envs.actions) must
# have the same markers.


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
