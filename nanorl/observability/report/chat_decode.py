"""`ChatDecode`: tokens as a person reads them, without the marks of a chat template.

A template frames every message with control tokens and the name of a role: ChatML has
`<|im_start|>user`, Llama `<|start_header_id|>user<|end_header_id|>`. To leave the control tokens
out is not enough, since the names stay behind as lines of their own. A name counts as a mark only
where a control token stands right before it, so that a program may print "user".
Left out: roles of templates that write them as plain text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from nanoengine.text.tokenizer import ChatTokenizer

ROLES = frozenset(
    ("system", "developer", "user", "assistant", "model", "tool", "ipython", "environment")
)


@dataclass(frozen=True, kw_only=True)
class ChatPiece:
    """A stretch of one message. `role` is empty where it began before these tokens."""

    role: str
    text: str


class ChatDecode:
    """Called with ids, it gives their text; `pieces` keeps messages apart."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, ids: Sequence[int]) -> str:
        """The text of the messages, each on a line of its own."""
        return "\n".join(piece.text for piece in self.pieces(ids))

    def pieces(self, ids: Sequence[int]) -> list[ChatPiece]:
        """The messages that the ids hold, or parts of them, in order; none is blank."""
        role, said, found = "", "", []
        for text, is_after_mark in self._runs(ids):
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

    def _runs(self, ids: Sequence[int]) -> Iterator[tuple[str, bool]]:
        """The text between control tokens, and whether one of them stands before it."""
        special = self._tokenizer.special_ids
        is_after_mark = False
        for is_mark, run in groupby(ids, lambda one: one in special):
            if not is_mark:
                yield self._tokenizer.decode(list(run), skip_special=True), is_after_mark
            is_after_mark = is_mark
