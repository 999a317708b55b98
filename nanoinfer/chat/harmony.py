"""Harmony, the form of gpt-oss: a turn is one or several messages, each on a channel.

    <|channel|>analysis<|message|>Two numbers.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>

`analysis` is reasoning, `final` is what the turn says, `commentary` with a recipient is a call and
without one a word about what follows. Whom a message is for may stand before its channel too.
Left out: the tools that are built into gpt-oss (python, browser).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from nanoinfer.chat.base import Described, ToolCall, ToolCallError
from nanoinfer.chat.json_calls import checked_call, list_tools, read_json, written_arguments
from nanoinfer.chat.reading import MAX_CALLS, Found, Marks, Place, WalkingParser, too_many

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TOKENS = frozenset({START, CHANNEL, MESSAGE, END, CALL, RETURN, "<|constrain|>"})
TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
FOR_WHOM = re.compile(r"\s*(?:to=\S+\s*)?")
STOP = re.compile("|".join(map(re.escape, (END, CALL, RETURN, START, CHANNEL))))
OPENS = re.compile(rf"\s*(?:to=\S+\s*)?{re.escape(CHANNEL)}|\s*{re.escape(START)}assistant")
"""How a turn in this form begins: its prompt ends with `<|start|>assistant`."""
MARKS = Marks.of(
    rf"(?:{re.escape(START)}assistant)?[ \t]*(?:to=[^\s<]+\s*)?{re.escape(CHANNEL)}",
    START + "assistant",
    CHANNEL,
)


@dataclass(frozen=True)
class HarmonyMessage:
    """One message of a turn, and where it stands in the text."""

    channel: str
    recipient: str
    """The tool that it calls; empty for none."""
    start: int
    body: int
    body_end: int
    end: int

    @property
    def is_reasoning(self) -> bool:
        return self.channel == "analysis" and not self.recipient


def messages_in(text: str, start: int = 0) -> Iterator[HarmonyMessage]:
    """The messages of a turn from `start` on, where one begins; the last may have no end yet."""
    while (channel := text.find(CHANNEL, start)) >= 0:
        body = text.find(MESSAGE, channel)
        if body < 0:
            return
        begin = text.rfind(START, start, channel)
        if begin < 0:  # the prompt has it, or nobody
            begin = start if FOR_WHOM.fullmatch(text, start, channel) else channel
        body += len(MESSAGE)
        stop = STOP.search(text, body)
        body_end = len(text) if stop is None else stop.start()
        end = body_end if stop is None or stop.group() in (START, CHANNEL) else stop.end()
        to = TO.search(text, begin, body)
        words = text[channel + len(CHANNEL) : body].replace("<", " ").split()
        yield HarmonyMessage(
            channel=words[0] if words else "",
            recipient="" if to is None or to[1] == "assistant" else to[1],
            start=begin,
            body=body,
            body_end=body_end,
            end=end,
        )
        start = end


@dataclass(frozen=True, kw_only=True)
class HarmonyParser(WalkingParser):
    """The parser; reasoning and text of a turn are read by reply.py."""

    name: ClassVar[str] = "harmony"
    role: str = "tool"

    @property
    def marks(self) -> Marks:
        return MARKS

    def find(self, text: str) -> list[Place]:
        """Every call of a turn; those for users and for us have no tool's name."""
        found: list[Place] = []
        for one in messages_in(text):
            if one.recipient and len(found) == MAX_CALLS:
                return [*found, (one.start, len(text), [too_many()])]
            if one.recipient:
                found.append((one.start, one.end, [self._call(text, one)]))
        return found

    def read_one(self, text: str, mark: re.Match[str]) -> tuple[Found, int]:
        one = next(messages_in(text, mark.start()), None)
        if one is None or not one.recipient:
            return [], mark.end() if one is None else one.end
        return [self._call(text, one)], one.end

    def _call(self, text: str, one: HarmonyMessage) -> ToolCall | ToolCallError:
        body = text[one.body : one.body_end]
        if not body.strip():
            return ToolCall(one.recipient)
        try:
            value, end = read_json(body, 0)
        except ToolCallError as error:
            return error
        if body[end:].strip():
            return ToolCallError("the call must end after the JSON object")
        return checked_call(one.recipient, value)

    def write(self, call: ToolCall) -> str:
        to = f"commentary to=functions.{call.name} <|constrain|>json"
        return f"{CHANNEL}{to}{MESSAGE}{written_arguments(call)}{CALL}"

    def describe(self, tools: Sequence[Described]) -> str:
        return (
            "# Tools\n\n## functions\n\n"
            f"{list_tools(tools)}\n\nCalls to these tools must go to the commentary channel: "
            "'functions'."
        )
