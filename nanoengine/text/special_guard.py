"""Control tokens that text cannot spell: a twin of a tokenizer whose added tokens are renamed.

A tool that prints `<|im_end|>` must not end the model's turn. `SpecialGuard` has a twin of the
tokenizer that knows every added token only under an unguessable name, so ordinary text can never
become one (not through the added-token matcher, not through a vocabulary that lists the string, not
through merges), while the template's own control tokens are renamed on purpose before encoding. One
`encode` call sees the whole text, so the result is the very ids that the original tokenizer gives
for harmless text. Whitespace-only added tokens (runs of spaces in some vocabularies) are ordinary
text and stay.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from tokenizers import Tokenizer

_FENCE = "\U0010fffd"  # last private-use code point: no pre-tokenizer treats it as a letter


_LARGE_CHARS = 1 << 14  # `encode` of as many takes milliseconds, and keeps the interpreter
_FIRST_MASK = 0x100000  # start of private-use plane 16


class SpecialGuard:
    """Encodes text in which control tokens are allowed nowhere, or only outside masked parts."""

    def __init__(self, tokenizer_json: str) -> None:
        spec: dict[str, Any] = json.loads(tokenizer_json)
        tokens = [t for t in spec.get("added_tokens") or [] if t["content"].strip()]
        # Random on purpose: the name must not be known to a program whose output is encoded. The
        # ids do not depend on it.
        nonce = secrets.token_hex(16)
        self._names = {t["content"]: f"{_FENCE}{nonce}.{t['id']}{_FENCE}" for t in tokens}
        self._pattern = _match_any(tokens)
        self._first_chars = sorted({content[0] for content in self._names})
        self._tokenizer = _renamed(spec, self._names)
        for token in tokens:
            held = self._tokenizer.token_to_id(self._names[token["content"]])
            assert held == token["id"], f"{token['content']!r}: id {token['id']} became {held}"

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` read as ordinary text: never a control token."""
        if len(text) > _LARGE_CHARS:  # the same ids; meanwhile other threads have the interpreter
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
            return encoding.ids
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def masks(self, text: str) -> dict[str, str]:
        """Stand-ins, absent from `text`, for every character that can open a control token."""
        free = (chr(i) for i in range(_FIRST_MASK, _FIRST_MASK + 0xFFFD) if chr(i) not in text)
        return dict(zip(self._first_chars, free, strict=False))

    def encode_masked(self, text: str, masks: dict[str, str]) -> list[int]:
        """Ids of `text`: control tokens are recognised, but none that opens at a masked character.

        Masked characters are put back before encoding, so they tokenise as themselves.
        """
        renamed = self._pattern.sub(lambda match: self._names[match.group()], text)
        unmask = {ord(mask): char for char, mask in masks.items()}
        return self.encode_plain(renamed.translate(unmask))


def mask_strings(value: Any, masks: dict[str, str]) -> Any:
    """`value` with every string inside it masked; keys of dicts and other types are kept."""
    if isinstance(value, str):
        return value.translate({ord(char): mask for char, mask in masks.items()})
    if isinstance(value, dict):
        return {key: mask_strings(item, masks) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask_strings(item, masks) for item in value]
    return value


def _match_any(tokens: list[dict[str, Any]]) -> re.Pattern[str]:
    """Leftmost-longest, as the tokenizers library matches; flags are applied by the library."""
    ordered = sorted(tokens, key=lambda token: -len(token["content"]))
    parts = []
    for token in ordered:
        part = re.escape(token["content"])
        parts.append(rf"(?<!\w){part}(?!\w)" if token.get("single_word") else part)
    return re.compile("|".join(parts) or "(?!)")


def _renamed(spec: dict[str, Any], names: dict[str, str]) -> Tokenizer:
    model = spec["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in vocab.items()}
    else:  # Unigram: [piece, score] pairs
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if model.get("merges"):  # a merge that spells a control token would have no result any more
        model["merges"] = [merge for merge in model["merges"] if _merged(merge) not in names]
    spec["added_tokens"] = [
        {**token, "content": names.get(token["content"], token["content"])}
        for token in spec.get("added_tokens") or []
    ]
    spec["post_processor"] = None  # adds control tokens by name; encoding here adds none
    spec["truncation"] = spec["padding"] = None
    return Tokenizer.from_str(json.dumps(spec))


def _merged(merge: str | list[str]) -> str:
    return merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)
