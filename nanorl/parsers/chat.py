"""`ToolChat`: how the tools of an environment are told to a model, and how it calls them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanoengine.model.tokenizer import ChatTokenizer
from nanorl.parsers.base import Parser
from nanorl.parsers.choose import choose_parser
from nanorl.tools.base import Tool

_REASONING = re.compile(r"^\s*<think>.*?(?:</think>|$)\s*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ToolChat:
    """Either `schemas`, which the chat template lists, or a `description` in the system message."""

    parser: Parser
    description: str = ""
    schemas: list[dict[str, Any]] | None = None

    def system(self, own: str) -> str:
        """The system message of an environment that says `own`."""
        return "\n\n".join(part for part in (own, self.description) if part)


def tool_chat(
    tokenizer: ChatTokenizer, tools: Sequence[Tool], parser: str | Parser = "auto"
) -> ToolChat:
    """How this model is told of the tools: as its chat template has it, or by the parser given."""
    if not isinstance(parser, str):
        return ToolChat(parser=parser, description=parser.describe(tools))
    choice = choose_parser(tokenizer, tools, parser)
    if choice.is_listing_tools:
        return ToolChat(parser=choice.parser, schemas=[tool.schema for tool in tools])
    return ToolChat(parser=choice.parser, description=choice.parser.describe(tools))


def visible(text: str) -> str:
    """What a turn says when its reasoning is left out."""
    return _REASONING.sub("", text, count=1)
