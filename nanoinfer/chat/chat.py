"""`ToolChat`: how the tools of an environment are told to a model, and how it calls them."""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from nanoinfer.chat.base import Parser
from nanoinfer.chat.reasoning import REASONING, split_reasoning

HARMONY = ("<|channel|>", "<|start|>assistant")
"""What a turn of Harmony's holds, whose reasoning is a channel."""
READER = "nanoinfer.chat.reply:ReplyReader"


@dataclass(frozen=True, kw_only=True)
class ToolChat:
    """Either `schemas`, which the chat template lists, or a `description` in the system message."""

    parser: Parser
    description: str = ""
    schemas: list[dict[str, Any]] | None = None
    writes_calls: bool = False
    """The template writes calls in the parser's form."""
    is_single: bool = False
    """It writes one a turn and not more."""

    def system(self, own: str) -> str:
        """The system message of an environment that says `own`."""
        return "\n\n".join(part for part in (own, self.description) if part)


def visible(text: str) -> str:
    """The text of a turn without its reasoning."""
    said = split_reasoning(text)[1]
    if any(mark in text for mark in HARMONY):
        said = resolve_name(READER)().read(text).content
    for closing in REASONING.values():  # alone where the prompt opened it
        if closing in said:
            said = said.partition(closing)[2].lstrip()
    return said
