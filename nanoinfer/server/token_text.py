"""What a client is shown of one token: its bytes, and a name that no other token beside it has.

A token is bytes, and those of some are no text: half of a character, or one byte that a tokenizer
falls back to. The tokenizer's piece says which they are: GPT-2's alphabet has one character for
each byte, SentencePiece writes `<0xE4>`. SentencePiece's pieces also begin words with `▁`, which
decoding drops at the start of a text; beside other tokens it is a space.
Left out: what several tokens are together (nanoinfer/options/text.py).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

from nanoengine.text.tokenizer import ChatTokenizer

_UNREADABLE = "\ufffd"  # what bytes that are no character decode to
_SPACE = "\u2581"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
# In GPT-2's alphabet these bytes are their own characters, the others come in turn from U+0100 on.
_PLAIN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
_BYTES = {chr(b): b for b in _PLAIN} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


def token_bytes(tokenizer: ChatTokenizer, token: int) -> bytes | None:
    """The bytes that a token adds to a text; None where its piece does not tell them."""
    said = _said(tokenizer, token)
    return said.encode() if isinstance(said, str) else said


def _said(tokenizer: ChatTokenizer, token: int) -> str | bytes | None:
    """The text that a token is beside others, or bytes that are none."""
    text, piece = tokenizer.decode([token]), tokenizer.id_to_token(token) or ""
    if _UNREADABLE not in text and piece[:1] not in ("<", _SPACE):
        return text
    fallback = _BYTE.fullmatch(piece)
    if fallback and text != piece:
        return _as_text(bytes([int(fallback[1], 16)]))
    spaced = piece.replace(_SPACE, " ")
    if piece.startswith(_SPACE) and spaced.lstrip(" ") == text.lstrip(" "):
        return spaced
    if _UNREADABLE not in text or text == piece:
        return text
    raw = bytes(_BYTES.get(char, 0) for char in piece)
    return _as_text(raw) if raw.decode(errors="replace") == text else None


def _as_text(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def token_names(tokenizer: ChatTokenizer, tokens: Iterable[int]) -> dict[int, str]:
    """A name for each, no two of them the same: its text; as in OpenAI's API `bytes:\\xe4\\xb8` for
    bytes that are none; and as vLLM's `token_id:N` where an earlier one has that name already."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for token in tokens:
        if token in names:
            continue
        name = _said(tokenizer, token)
        if isinstance(name, bytes):
            name = "bytes:" + name.decode("ascii", "backslashreplace")
        if name is None or name in taken:
            name = f"token_id:{token}"
        taken.add(name)
        names[token] = name
    return names


class TextOffsets:
    """The places at which tokens begin in the text that they become. Half of a character stands
    where the whole will be, and control tokens, which the text is shown without, take no room."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._end = 0
        self._has_begun = False

    def push(self, token: int) -> int:
        """The place of the next token."""
        begin = self._end
        if token not in self._tokenizer.special_ids:
            shown, raw = self._tokenizer.decode([token]), token_bytes(self._tokenizer, token)
            if raw is None or (not self._has_begun and raw.endswith(b" " + shown.encode())):
                raw = shown.encode()  # as decoding begins a text
            self._has_begun = True
            self._end += len(self._characters.decode(raw))
        return begin
