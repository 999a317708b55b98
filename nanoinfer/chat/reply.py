"""A turn of the model as a client reads it: reasoning, text and calls; whole, or as it comes.

    ReplyReader(HermesParser()).read("<think>Hm.</think>Let me see.<tool_call>{...}</tool_call>")
    SplitReply(reasoning="Hm.", content="Let me see.", calls=(ToolCall(...),))

Reasoning is what a turn begins with, between its marks or on Harmony's channel for it; `opened` is
the mark with which the prompt opened it already. Calls are those that the trainer reads, with the
same parser. A turn that was cut, and one of which a call cannot be read, calls nothing: it stays
text as it was written, so nothing is lost.
What a `ReplyStream` has handed out is always the beginning of what the whole turn says: a call, and
what may become one, is held back to the end.
Left out: what stands between Harmony's messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat import harmony
from nanoinfer.chat.base import Parser, ToolCall, ToolCallError
from nanoinfer.chat.harmony import HarmonyMessage, HarmonyParser, messages_in
from nanoinfer.chat.llama import PYTHON_TAG
from nanoinfer.chat.named import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
    TOOL_CALLS,
)
from nanoinfer.chat.reading import WalkingParser, beginnings, parts_beside
from nanoinfer.chat.reasoning import CLOSINGS, REASONING, THINKS, split_reasoning

CALL_TOKENS = frozenset(
    {"<tool_call>", "</tool_call>", PYTHON_TAG, TOOL_CALLS, "[CALL_ID]", "[ARGS]"}
    | {CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR}
)
"""Tokens of which calls are made."""
REASONING_TOKENS = frozenset({*REASONING, *CLOSINGS})

MAY_BEGIN = re.compile(
    rf"\s*(?:{'|'.join(map(beginnings, (*REASONING, '<|channel|>', '<|start|>assistant')))}"
    r"|t|to|to=\S*\s*(?:<\|?[a-z]*\|?)?)?"
)
"""What may become the beginning of reasoning, or of Harmony."""
MAY_STOP = re.compile(rf"(?:{'|'.join(beginnings(stop) for stop in sorted(harmony.TOKENS))})\Z")
LONGEST_STOP = max(map(len, harmony.TOKENS))
Mode = Literal["opening", "reasoning", "between", "content", "harmony"]


@dataclass(frozen=True, kw_only=True)
class SplitReply:
    """A turn, split into its reasoning, its text and its calls."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ReplyReader:
    """Reads the turns of one request."""

    parser: Parser | None = None
    """Of calls; None where no tools are offered."""
    opened: str = ""
    """What the prompt ends with, where that is a mark of reasoning: "<think>"."""
    hidden: tuple[str, ...] = ()
    """Control tokens that the text may hold, and what a client reads may not."""

    def read(self, text: str, *, is_cut: bool = False) -> SplitReply:
        """The turn; one that `is_cut` goes on, but for a limit."""
        parser = None if is_cut else self.parser
        if not self.opened and harmony.OPENS.match(text):
            read = _read_harmony(text, parser)
        else:
            reasoning, said = split_reasoning(text, self.opened)
            content, calls = _split_calls(said, parser)
            read = SplitReply(reasoning=reasoning, content=content, calls=calls)
        return SplitReply(
            reasoning=self.shown(read.reasoning), content=self.shown(read.content), calls=read.calls
        )

    def shown(self, text: str) -> str:
        """`text` without control tokens."""
        for token in self.hidden:
            text = text.replace(token, "")
        return text


def mark_tokens(tokenizer: ChatTokenizer, *, has_tools: bool) -> dict[int, str]:
    """Control tokens of which the marks of a turn are made: a reader needs them in its text."""
    names = REASONING_TOKENS | (CALL_TOKENS if has_tools else frozenset())
    if tokenizer.token_to_id(harmony.CHANNEL) is not None:
        names |= harmony.TOKENS  # others have an `<|end|>` too
    ids = {tokenizer.token_to_id(name): name for name in names}
    return {token: name for token, name in ids.items() if token in tokenizer.special_ids}


def spoken_ids(tokenizer: ChatTokenizer, ids: Sequence[int], marks: Mapping[int, str]) -> list[int]:
    """The sampled `ids` that belong to a turn's text: all but the token that ended it and the
    control tokens that are no `marks`."""
    said = ids[:-1] if ids and ids[-1] in tokenizer.eos_ids else ids
    hidden = tokenizer.special_ids - marks.keys()
    return [token for token in said if token not in hidden]


def _split_calls(said: str, parser: Parser | None) -> tuple[str, tuple[ToolCall, ...]]:
    if not isinstance(parser, WalkingParser):  # an outside one tells no places
        found = [] if parser is None else parser.read(said)
        calls = tuple(one for one in found if isinstance(one, ToolCall))
        return ("", calls) if calls and len(calls) == len(found) else (said, ())
    places = parser.find(said)
    found = [one for _, _, calls in places for one in calls]
    if not found or any(isinstance(one, ToolCallError) for one in found):
        return said, ()
    before, *others = parts_beside(said, places)
    parts = [before.rstrip(), *(part.strip() for part in others)]
    content = "\n".join(part for part in parts if part)
    return content, tuple(one for one in found if isinstance(one, ToolCall))


def _read_harmony(text: str, parser: Parser | None) -> SplitReply:
    found = parser.read(text) if isinstance(parser, HarmonyParser) else []
    calls = tuple(one for one in found if isinstance(one, ToolCall))
    is_calling = bool(calls) and len(calls) == len(found)
    thoughts: list[str] = []
    said: list[str] = []
    for one in messages_in(text):
        if not (one.recipient and is_calling):
            (thoughts if one.is_reasoning else said).append(text[one.body : one.body_end])
    return SplitReply(
        reasoning="\n".join(filter(None, thoughts)),
        content="\n".join(filter(None, said)),
        calls=calls if is_calling else (),
    )


class ReplyStream:
    """A turn while it comes: `push` a piece of its text, `finish` with the last one."""

    def __init__(self, reader: ReplyReader) -> None:
        self._reader = reader
        self._pieces: list[str] = []
        self._mode: Mode = "opening"
        self._text = ""  # of the part that is read now
        self._place = 0  # all before it is handed out
        self._closing = REASONING.get(reader.opened, "")
        self._message: HarmonyMessage | None = None  # that is open
        self._is_new = False  # nothing of it is handed out
        self._reasoning = self._content = ""

    def push(self, piece: str) -> SplitReply:
        """Take a piece, and return the reasoning and text that are sure now and were not before."""
        self._pieces.append(piece)
        self._text += piece
        before = len(self._reasoning), len(self._content)
        self._go_on()
        return self._new(before)

    def finish(self, *, is_cut: bool = False) -> SplitReply:
        """The rest of the turn, with its calls."""
        whole = self._reader.read("".join(self._pieces), is_cut=is_cut)
        return SplitReply(
            reasoning=whole.reasoning[len(self._reasoning) :],
            content=whole.content[len(self._content) :],
            calls=whole.calls,
        )

    def _new(self, before: tuple[int, int]) -> SplitReply:
        return SplitReply(
            reasoning=self._reasoning[before[0] :], content=self._content[before[1] :]
        )

    def _go_on(self) -> None:
        mode: Mode | None = None
        while mode != self._mode:
            mode = self._mode
            if mode == "opening":
                self._open()
            elif mode == "reasoning":
                self._think()
            elif mode == "between":
                self._begin("content" if self._text.strip() else "between", self._text.lstrip())
            elif mode == "content":
                self._say()
            else:
                self._hear()

    def _begin(self, mode: Mode, text: str) -> None:
        self._mode, self._text, self._place = mode, text, 0

    def _open(self) -> None:
        opened = self._reader.opened
        if not opened and harmony.OPENS.match(self._text):
            self._mode = "harmony"
        elif (begun := THINKS.match(self._text)) and begun[1] == (opened or begun[1]):
            self._closing = REASONING[begun[1]]
            self._begin("reasoning", self._text[begun.end() :])
        elif not MAY_BEGIN.fullmatch(self._text):
            self._mode = "reasoning" if opened else "content"

    def _think(self) -> None:
        text, closing, place = self._text, self._closing, self._place
        end = text.find(closing, place)
        if end >= 0:
            sure = text[place:end].rstrip()
            self._tell(sure if self._reasoning else sure.lstrip(), is_reasoning=True)
            self._begin("between", text[end + len(closing) :])
            return
        begun = next((n for n in range(len(closing) - 1, 0, -1) if text.endswith(closing[:n])), 0)
        sure = text[place : len(text) - begun].rstrip()
        self._tell(sure if self._reasoning else sure.lstrip(), is_reasoning=True)
        self._place += len(sure)

    def _say(self) -> None:
        parser, text, place = self._reader.parser, self._text, self._place
        sure = ""
        if parser is None:
            sure = text[place:]
        elif isinstance(parser, WalkingParser):
            sure = text[place : parser.may_open(text, place)].rstrip()
        self._tell(sure, is_reasoning=False)
        self._place += len(sure)

    def _hear(self) -> None:
        text = self._text
        while True:
            if self._message is None:
                self._message = next(messages_in(text, self._place), None)
                if self._message is None:
                    return
                self._place, self._is_new = self._message.body, True
            one = self._message
            if one.recipient:  # a call, or text if it is none
                return
            stop = harmony.STOP.search(text, self._place)
            if stop is None:
                begun = MAY_STOP.search(text, max(self._place, len(text) - LONGEST_STOP))
                self._hear_more(one, len(text) if begun is None else begun.start())
                return
            self._hear_more(one, stop.start())
            self._message = None
            is_next = stop.group() in (harmony.START, harmony.CHANNEL)
            self._place = stop.start() if is_next else stop.end()

    def _hear_more(self, one: HarmonyMessage, end: int) -> None:
        new = self._text[self._place : end]
        self._place = end
        if not new:
            return
        so_far = self._reasoning if one.is_reasoning else self._content
        self._tell("\n" + new if so_far and self._is_new else new, is_reasoning=one.is_reasoning)
        self._is_new = False

    def _tell(self, text: str, *, is_reasoning: bool) -> None:
        text = self._reader.shown(text)
        if is_reasoning:
            self._reasoning += text
        else:
            self._content += text
