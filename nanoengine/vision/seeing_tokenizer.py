"""The tokenizer of a model that sees: a chat's pictures become placeholders.

A picture is one run of them, or one for each of its tiles, with the names of tiles between.

A message's content may be a list of parts, texts and pictures:

    [{"type": "text", "text": "Which is red?"}, {"type": "image", "sha256": "9e1d..."}]

The template prints one placeholder a picture, which is expanded in the text, before it is encoded
(processor.py). What anybody says cannot spell a placeholder, whoever says it, and nobody looks for
one in what was sampled: `images_in` is asked about encoded messages alone.
Left out: pictures at addresses, and parts of other kinds, which raise.
"""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from nanoengine.spans import ImageSpan
from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer, all_text
from nanoengine.vision.picture_store import PictureStore
from nanoengine.vision.processor import PictureProcessor

Hidden = Literal["", "pictures", "first picture"]


class SeeingTokenizer(ChatTokenizer):
    """A `ChatTokenizer` with the pictures of a store; set `store` before chats have any."""

    store: PictureStore
    hidden: Hidden = ""
    _has_shown = False

    def hiding(self, hidden: Hidden) -> SeeingTokenizer:
        """This tokenizer for one episode, in which grey is seen in place of every picture, or of
        the first one, with which a chat that is encoded anew begins as well."""
        hiding = copy.copy(self)
        hiding.hidden, hiding._has_shown = hidden, False
        return hiding

    def render_masked(
        self, messages: Sequence[Message], **given: Any
    ) -> tuple[str, dict[str, str]]:
        """As of `ChatTokenizer`, with placeholders expanded. `ValueError` where the template prints
        another number of them than there are pictures."""
        pictures = [self.store.ready(sha256) for sha256 in pictures_of(messages)]
        placeholder = self.store.processor.placeholder
        # tools and variables, which clients write, too
        spelled = [one for one in ("tools", "variables") if placeholder in all_text(given.get(one))]
        mark = f"x{secrets.token_hex(8)}x" if spelled else ""
        given |= {
            name: json.loads(json.dumps(given[name]).replace(placeholder, mark)) for name in spelled
        }
        text, masks = super().render_masked(messages, **given)
        text = self.store.processor.expand(text, pictures)
        if spelled:
            text = text.replace(mark, masks.get(placeholder[0], "") + placeholder[1:])
        return text, masks

    def images_in(
        self, ids: Sequence[int], messages: Sequence[Message], start: int
    ) -> list[ImageSpan]:
        """The pictures of encoded messages, whose tokens are `ids` from `start` on; of a picture in
        tiles a span for each."""
        places = [place for place, token in enumerate(ids, start) if token == self._placeholder_id]
        spans: list[ImageSpan] = []
        done = 0
        for sha256 in pictures_of(messages):
            num_tokens = self.store.ready(sha256).num_tokens
            if done + num_tokens <= len(places):
                is_first = not spans and (start == 0 or not self._has_shown)
                is_hidden = self.hidden == "pictures" or (self.hidden and is_first)
                shown = self.store.grey(sha256) if is_hidden else sha256
                spans += self.store.spans(shown, places[done : done + num_tokens])
            done += num_tokens
        if done != len(places):
            raise ValueError(
                f"{len(places)} placeholders were encoded for pictures of {done} tokens: the chat "
                "template does not print all pictures, or the tokenizer has no such token"
            )
        self._has_shown = self._has_shown or bool(spans)
        return spans

    @cached_property
    def _placeholder_id(self) -> int:
        found = self.token_to_id(self.store.processor.placeholder)
        if found is None:
            raise ValueError(
                f"tokenizer.json has no token {self.store.processor.placeholder!r}, which stands "
                "for pictures"
            )
        return found

    def _masked(
        self, message: Message, masks: dict[str, str], trusted_roles: frozenset[str]
    ) -> Message:
        masked = super()._masked(message, masks, trusted_roles)
        placeholder = self.store.processor.placeholder  # which nobody spells, trusted or not
        if placeholder[0] in masks:
            masked = _replaced(masked, placeholder, masks[placeholder[0]] + placeholder[1:])
        if not isinstance(message.get("content"), list):
            return masked
        # the kinds of parts are ours, as roles are, and templates compare them
        pairs = zip(masked["content"], message["content"], strict=True)
        return {**masked, "content": [{**one, "type": part["type"]} for one, part in pairs]}


def seeing_tokenizer(
    folder: str | Path, pictures: str | Path, variables: Mapping[str, Any] | None = None
) -> SeeingTokenizer:
    """The tokenizer of a model folder, with a store of pictures in another one. `ValueError` where
    the folder has no processor of pictures."""
    tokenizer = SeeingTokenizer.from_folder(folder, variables)
    assert isinstance(tokenizer, SeeingTokenizer), "of the class that was asked"
    tokenizer.store = PictureStore(pictures, PictureProcessor.from_folder(folder))
    return tokenizer


def pictures_of(messages: Sequence[Message]) -> Iterator[str]:
    """The SHA-256 of each picture of a chat, in order. `ValueError` for a part of another kind than
    text and picture."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type")
            if kind == "image" and isinstance(part.get("sha256"), str):
                yield part["sha256"]
            elif kind != "text":
                raise ValueError(
                    f"a part of type {kind!r} in a message of {message.get('role')!r}: must be "
                    '{"type": "text", "text": ...} or {"type": "image", "sha256": ...}; videos and '
                    "sound are not taken"
                )


def _replaced(value: Any, old: str, new: str) -> Any:
    """`value` with `new` for `old` in every string inside it."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, Mapping):
        return {key: _replaced(one, old, new) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(one, old, new) for one in value]
    return value
