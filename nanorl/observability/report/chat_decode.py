"""`ChatDecode`: tokens as a person reads them, without the marks of a chat template.

A template frames every message with control tokens and the name of a role: ChatML has
`<|im_start|>user`, Llama `<|start_header_id|>user<|end_header_id|>`. To leave the control tokens
out is not enough, since the names stay behind as lines of their own. A name counts as a mark only
where a control token stands right before it, so that a program may print "user". A picture is a
line of its own, and the token that a template writes behind it is no mark.
Left out: roles of templates that write them as plain text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.shown_pictures import (
    Items,
    RunPictures,
    SeeingDecode,
    ShownPicture,
)

ROLES = frozenset(
    ("system", "developer", "user", "assistant", "model", "tool", "ipython", "environment")
)


@dataclass(frozen=True, kw_only=True)
class ChatPiece:
    """A stretch of one message. `role` is empty where it began before these tokens."""

    role: str
    text: str


class ChatDecode(SeeingDecode):
    """Called with tokens, it gives their text; `pieces` keeps messages apart."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__(tokenizer.decode, RunPictures.of(tokenizer))
        self._tokenizer = tokenizer

    def __call__(self, items: Items) -> str:
        """The text of the messages, each on a line of its own."""
        return "\n".join(piece.text for piece in self.pieces(items))

    def pieces(self, items: Items) -> list[ChatPiece]:
        """The messages that the tokens hold, or parts of them, in order; none is blank."""
        role, said, found = "", "", []
        for text, is_after_mark in self._runs(items):
            if isinstance(text, ShownPicture):
                before = said.rstrip("\n")
                said = f"{before}\n{text.line}\n" if before else f"{text.line}\n"
                continue
            name, _, rest = text.partition("\n")
            if is_after_mark and name.strip() in ROLES:
                found.append(ChatPiece(role=role, text=said))
                role, said = name.strip(), rest
            else:
                said += text
        found.append(ChatPiece(role=role, text=said))
        return [
            ChatPiece(role=one.role, text=one.text.strip("\n")) for one in found if one.text.strip()
        ]

    def _runs(self, items: Items) -> Iterator[tuple[str | ShownPicture, bool]]:
        """The text between control tokens, and whether one of them stands before it; pictures."""
        special = self._tokenizer.special_ids
        is_after_mark = is_after_picture = False
        for kind, run in groupby(
            items, lambda one: one in special if isinstance(one, int) else "picture"
        ):
            if kind == "picture":
                yield from ((one, False) for one in run if isinstance(one, ShownPicture))
                is_after_mark, is_after_picture = False, True
                continue
            ids = [one for one in run if isinstance(one, int)]
            if not kind:
                yield self._tokenizer.decode(ids, skip_special=True), is_after_mark
            is_after_mark = bool(kind) and not (is_after_picture and len(ids) == 1)
            is_after_picture = False
