"""`ChatFrames`: reads messages back out of tokens, the inverse of a model's chat template.

Nothing is known by a model's name. The template is given chats whose contents are known, and what
it writes between two contents is the frame between their roles. A chat is then read from frame to
frame. Control tokens are compared as ids, never as text, so what a user or a tool wrote cannot
pass for the end of its message.

Tools are looked for in what the policy read: JSON of the form in which templates list them. They
were listed by the template if rendering the messages with them gives the same text again.

A picture stands among the ids as one `ShownPicture`, and in what is read as a part of a content:

    {"role": "user", "content": [{"type": "text", "text": "Which?"},
                                 {"type": "image", "sha256": "9e1d...", "number": 3}]}

No picture is opened for it.
Left out: calls inside messages, which a parser reads (base.py), and templates that write one frame
for several roles, whose messages are taken for the user's.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.shown_pictures import Items, ShownPicture

Json = dict[str, Any]

ROLES = ("user", "assistant", "system", "tool", "ipython", "developer")
"""Where several fit, the first one wins."""
LEADS = {
    "user": ("user",),
    "assistant": ("user", "assistant"),
    "system": ("system",),
    "tool": ("user", "assistant", "tool"),
    "ipython": ("user", "assistant", "ipython"),
    "developer": ("developer",),
}
"""The shortest chat that ends with a role."""
START, OPEN_TURN = "", "(turn)"
"""What stands before the first message, and where the policy speaks."""
TOOL = re.compile(r'\{\s*"type"\s*:\s*"function"')
_ANY_DATE = r"\d{1,2} [A-Z][a-z]+ \d{4}"
"""Some templates print the day on which they are rendered."""
_DATE = re.compile(_ANY_DATE)
_DATE_ESCAPED = re.compile(_ANY_DATE.replace(" ", r"\\ "))  # as re.escape leaves it
MOST_TOOL_SETS = 64  # whose frames are kept
MOST_TRIES = 8  # to tell the tools that the template lists from others in a chat
Content = str | list[Json]
FIRST_MARK, NUM_MARKS = 0xD800, 0x7FF  # halves of surrogate pairs: no decoded text holds one
PICTURE = chr(FIRST_MARK + NUM_MARKS)
DECODER = json.JSONDecoder()
_QUOTED = 'q"z'


@dataclass(frozen=True, kw_only=True)
class ReadChat:
    """A chat that was read back."""

    messages: list[Message]
    tools: list[Json] = field(default_factory=list)
    """The schemas that it holds, in their order."""
    are_tools_listed: bool = False
    """The chat template lists them; False: a message describes them, or there are none."""
    is_exact: bool = False
    """The template makes the same text of it again."""


@dataclass(frozen=True)
class _Frames:
    """The frames that may follow a role: a pattern of frames, and for each of its groups the roles
    behind."""

    pattern: re.Pattern[str]
    roles: tuple[tuple[str, ...], ...]


class ChatFrames:
    """Reads chats of one tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._marks: dict[int, str] = {}
        self._learned: dict[str, dict[str, _Frames]] = {}
        self._is_json: dict[str, bool] = {}

    def read(self, ids: Items) -> ReadChat:
        """The chat that opens a context, up to where the policy speaks. Where the template's frames
        are not found, it is one message of the user with the text of all ids."""
        chat = self._read(self._marked(ids))
        shown = _parts_of(ids)
        return replace(chat, messages=[self._with_parts(one, shown) for one in chat.messages])

    def _read(self, text: str) -> ReadChat:
        if not text:
            return ReadChat(messages=[], is_exact=True)
        for tools in _runs(_tools_in([self._unmarked(text)])):
            listed = self._messages(text, START, tools)
            # A template that knows of no tools makes the same text without them.
            if listed and self._renders(listed, tools, text):
                if self._renders(listed, [], text):
                    break
                return ReadChat(messages=listed, tools=tools, are_tools_listed=True, is_exact=True)
        plain = self._messages(text, START, [])
        messages = plain or [{"role": "user", "content": self._unmarked(text)}]
        ours = [one["content"] for one in messages[:1] if one["role"] != "user"]
        return ReadChat(
            messages=messages,
            tools=_tools_in(ours),  # what a user wrote offers none
            is_exact=plain is not None and self._renders(plain, [], text),
        )

    def read_reply(self, ids: Items, chat: ReadChat, *, is_ended: bool) -> list[Message]:
        """The messages that follow a turn of the policy in `chat`, from the ids behind it.
        `is_ended`: the turn itself holds its end-of-turn token, which otherwise stands first."""
        rest = self._marked(ids if is_ended else ids[1:])
        if not rest:
            return []
        tools = chat.tools if chat.are_tools_listed else []
        found = self._messages(self._end_of_turn + rest, "assistant", tools)
        if found is None:
            found = [{"role": "user", "content": self._unmarked(rest)}]
        shown = _parts_of(ids)
        return [self._with_parts(one, shown) for one in found]

    def _messages(self, text: str, role: str, tools: list[Json]) -> list[Message] | None:
        """The messages of a text that goes on behind the content of `role`; None where it does not
        go on with a frame."""
        learned = self._frames(tools)
        found: list[dict[str, Any]] = []
        place = 0
        while (frames := learned.get(role)) is not None:
            pattern = frames.pattern
            mark = pattern.search(text, place) if found else pattern.match(text)
            if mark is None:
                break
            if found:
                found[-1]["content"] = self._content(role, text[place : mark.start()])
            place = mark.end()
            assert mark.lastindex is not None, "every frame is a group"
            roles = frames.roles[mark.lastindex - 1]
            if place == len(text) and OPEN_TURN in roles:
                return list(found)
            role = next((one for one in roles if one != OPEN_TURN), "assistant")
            found.append({"role": role, "content": ""})
        if not found:
            return None
        found[-1]["content"] = self._content(role, text[place:])
        return list(found)

    def _content(self, role: str, text: str) -> str:
        """A message's content. Some templates write results as JSON, between quotes of a frame."""
        content = self._unmarked(text)
        if role not in self._is_json:
            told = _chat(LEADS[role][:-1])
            written = self._render([*told, {"role": role, "content": _QUOTED}], []) or ""
            self._is_json[role] = json.dumps(_QUOTED) in written
        if self._is_json[role]:
            with suppress(ValueError):  # cut in the middle
                read: str = json.loads(f'"{content}"')
                read.encode()  # no half of a character
                return read
        return content

    def _renders(self, messages: Sequence[Message], tools: list[Json], text: str) -> bool:
        pictures = iter([{"type": "image", "sha256": ""}] * text.count(PICTURE))  # any will do
        told = [self._with_parts(one, pictures) for one in messages]
        again = self._render(told, tools, is_open=True)
        text = text.replace(PICTURE, self._placeholder)
        return again is not None and _DATE.sub("", again) == _DATE.sub("", text)

    # -- pictures --------------------------------------------------------------------------------

    def _with_parts(self, message: Message, pictures: Iterator[Json]) -> Message:
        """The message with the next of the pictures wherever its text has one, without what the
        template writes around each."""
        if PICTURE not in message["content"]:
            return message
        before, after = self._around_picture
        text = message["content"].replace(f"{before}{PICTURE}{after}", PICTURE)
        return {**message, "content": parted(text, pictures)}

    @functools.cached_property
    def _around_picture(self) -> tuple[str, str]:
        """Return what the template writes before and behind a picture."""
        parts: list[Json] = [
            {"type": "text", "text": _numbered(0)},
            {"type": "image", "sha256": ""},
            {"type": "text", "text": _numbered(1)},
        ]
        written = self._render([{"role": "user", "content": parts}], []) or ""
        _, begun, rest = written.partition(_numbered(0))
        before, found, rest = rest.partition(self._placeholder or PICTURE)
        after, ended, _ = rest.partition(_numbered(1))
        is_found = bool(begun and found and ended)
        return (self._unmarked(before), self._unmarked(after)) if is_found else ("", "")

    @functools.cached_property
    def _placeholder(self) -> str:
        """Return what a template prints for a picture, as marked text; empty where it sees none."""
        store = getattr(self._tokenizer, "store", None)
        token = None if store is None else self._tokenizer.token_to_id(store.processor.placeholder)
        return "" if token is None else self._marked([token])

    # -- what the template writes ----------------------------------------------------------------

    def _frames(self, tools: list[Json]) -> dict[str, _Frames]:
        key = json.dumps(tools)
        if key not in self._learned:
            if len(self._learned) >= MOST_TOOL_SETS:
                self._learned.clear()
            found = {role: self._frames_after(role, tools) for role in (START, *ROLES)}
            self._learned[key] = {role: one for role, one in found.items() if one is not None}
        return self._learned[key]

    def _frames_after(self, role: str, tools: list[Json]) -> _Frames | None:
        by_text: dict[str, list[str]] = {}
        for following in (*ROLES, OPEN_TURN):
            for text in self._between(role, following, tools):
                written = _DATE_ESCAPED.sub(lambda _: _ANY_DATE, re.escape(text))
                roles = by_text.setdefault(written, [])
                if following not in roles:
                    roles.append(following)
        if not by_text:
            return None
        longest_first = sorted(by_text, key=len, reverse=True)
        pattern = "|".join(f"({one})" for one in longest_first)
        return _Frames(re.compile(pattern), tuple(tuple(by_text[one]) for one in longest_first))

    def _between(self, role: str, following: str, tools: list[Json]) -> set[str]:
        """The texts that the template writes between two roles: in the middle of a chat, and at its
        end."""
        lead = LEADS.get(role, ())
        if following == OPEN_TURN:
            text = self._render(_chat(lead), tools, is_open=True) if lead else None
            _, mark, rest = (text or "").rpartition(_numbered(len(lead) - 1))
            return {rest} if mark and rest else set()
        found = set()
        for tail in ((), ("user",)):
            text = self._render(_chat((*lead, following, *tail)), tools) or ""
            before, mark, _ = text.partition(_numbered(len(lead)))
            if lead:
                _, begun, before = before.rpartition(_numbered(len(lead) - 1))
                mark = mark and begun
            if mark and before:
                found.add(before)
        return found

    @functools.cached_property
    def _end_of_turn(self) -> str:
        """The text that the template writes behind a turn, up to its end-of-turn token."""
        ends = {self._mark(token) for token in self._tokenizer.eos_ids}
        for frame in self._between("assistant", "user", []):
            place = next((place for place, char in enumerate(frame) if char in ends), None)
            if place is not None:
                return frame[: place + 1]
        return ""

    def _render(
        self, messages: Sequence[Message], tools: list[Json], *, is_open: bool = False
    ) -> str | None:
        """The chat as marked text; None where the template was not made for such messages."""
        tokenizer = self._tokenizer
        try:
            # Not as a model that sees encodes a chat: that opens its pictures.
            text, masks = ChatTokenizer.render_masked(
                tokenizer, messages, add_generation_prompt=is_open, tools=tools or None
            )
            return self._marked(tokenizer.encode_rendered(text, masks))
        except (ValueError, TypeError):
            return None

    # -- text in which control tokens cannot be spelled ------------------------------------------

    def _marked(self, ids: Items) -> str:
        """The text of ids, with a mark in place of each control token and each picture."""
        special = self._tokenizer.special_ids
        parts: list[str] = []
        for is_plain, run in itertools.groupby(
            ids, lambda one: isinstance(one, int) and one not in special
        ):
            if is_plain:
                parts.append(self._tokenizer.decode([one for one in run if isinstance(one, int)]))
            else:
                parts += [self._mark(one) if isinstance(one, int) else PICTURE for one in run]
        return "".join(parts)

    def _mark(self, token: int) -> str:
        assert len(self._marks) < NUM_MARKS, "a chat template has few control tokens"
        return self._marks.setdefault(token, chr(FIRST_MARK + len(self._marks)))

    def _unmarked(self, text: str) -> str:
        """The text with its control tokens as they are written."""
        names = {ord(mark): self._tokenizer.decode([one]) for one, mark in self._marks.items()}
        return text.translate(names)


def parted(text: str, pictures: Iterator[Json]) -> Content:
    """A text with pictures as the parts of a message: the next one for each PICTURE."""
    if PICTURE not in text:
        return text
    first, *rest = text.split(PICTURE)
    parts = [{"type": "text", "text": first}]
    for after in rest:
        parts += [next(pictures), {"type": "text", "text": after}]
    return [part for part in parts if part.get("text") != ""]


def joined(content: Content) -> tuple[str, Iterator[Json]]:
    """The inverse of `parted`: the text with a PICTURE for each picture, and the pictures."""
    if isinstance(content, str):
        return content, iter(())
    texts = [PICTURE if part["type"] == "image" else part["text"] for part in content]
    return "".join(texts), iter([part for part in content if part["type"] == "image"])


def _parts_of(ids: Items) -> Iterator[Json]:
    """The pictures among ids, as parts of a message."""
    return (
        {"type": "image", "sha256": one.sha256, "number": one.number}
        for one in ids
        if isinstance(one, ShownPicture)
    )


def _chat(roles: Sequence[str]) -> list[Message]:
    return [{"role": role, "content": _numbered(place)} for place, role in enumerate(roles)]


def _numbered(place: int) -> str:
    return f"qz{place}zq"


def _runs(tools: list[Json]) -> Iterator[list[Json]]:
    """All of them, then without the last and so on, then without the first: what a user or a system
    message holds beside those that the template lists may look like tools, too."""
    size = len(tools)
    yield from (tools[:end] for end in range(size, max(0, size - MOST_TRIES), -1))
    yield from (tools[start:] for start in range(1, min(size, MOST_TRIES)))


def _tools_in(texts: Sequence[str]) -> list[Json]:
    """The schemas of tools in the first of the texts that holds any, in the form of OpenAI's API,
    in which chat templates list them."""
    for text in texts:
        found: list[Json] = []
        place = 0
        while (mark := TOOL.search(text, place)) is not None:
            try:
                value, place = DECODER.raw_decode(text, mark.start())
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            except (ValueError, RecursionError):  # no JSON, or half of a character in it
                place = max(place, mark.end())
                continue
            function = value.get("function")
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                found.append(value)
        if found:
            return found
    return []
