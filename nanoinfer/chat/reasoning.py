"""Reasoning: what a turn begins with, between its marks, and what it says behind that.

Left out: Harmony's turns, whose reasoning is a channel (reply.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import MappingProxyType

from nanoengine.model.tokenizer import ChatTokenizer

REASONING = MappingProxyType({"<think>": "</think>", "[THINK]": "[/THINK]"})
"""What opens and closes the reasoning of a turn."""
CLOSINGS = frozenset(REASONING.values())
THINKS = re.compile(rf"\s*({'|'.join(map(re.escape, REASONING))})")
TAIL = 8
"""Tokens at the end of a prompt that may open the reasoning."""


def opened_reasoning(tokenizer: ChatTokenizer, prompt: Sequence[int]) -> str:
    """The mark of reasoning that a prompt ends with, which the turn goes on from; or empty."""
    # Of a few tokens: a prompt may be long, and this is asked after every turn.
    end = tokenizer.decode(prompt[-TAIL:]).rstrip()
    return next((mark for mark in REASONING if end.endswith(mark)), "")


def split_reasoning(text: str, opened: str = "") -> tuple[str, str]:
    """The reasoning of a turn that is not Harmony's, and what it says behind that."""
    begun = THINKS.match(text)
    mark = opened or (begun[1] if begun else "")
    if not mark:
        return "", text
    # A turn may repeat the mark that its prompt has opened.
    start = begun.end() if begun is not None and begun[1] == mark else 0
    reasoning, _, said = text[start:].partition(REASONING[mark])
    return reasoning.strip(), said.lstrip()
