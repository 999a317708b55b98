"""`ToolChat`: how the tools of an environment are told to a model, and how it calls them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from nanoinfer.chat.base import Parser

_REASONING = re.compile(r"^\s*<think>.*?(?:</think>|$)\s*", re.DOTALL)
_CLOSED = "</think>"  # alone where the prompt opened it


@dataclass(frozen=True, kw_only=True)
class ToolChat:
    """Either `schemas`, which the chat template lists, or a `description` in the system message."""

    parser: Parser
    description: str = ""
    schemas: list[dict[str, Any]] | None = None

    def system(self, own: str) -> str:
        """The system message of an environment that says `own`."""
        return "\n\n".join(part for part in (own, self.description) if part)


def visible(text: str) -> str:
    """What a turn says when its reasoning is left out."""
    without = _REASONING.sub("", text, count=1)
    return without.partition(_CLOSED)[2].lstrip() if _CLOSED in without else without
