"""How many tokens of a prompt are its tools, and what would make them fewer.

Every turn of every rollout reads them, and so does every supervised step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.base import Described
from nanoinfer.chat.choose import ClientTool
from nanoinfer.chat.pythonic import PythonicParser
from nanorl.envs.base import Opening
from nanorl.envs.env_kind import EnvKind
from nanorl.observability.alarms.finding import Finding, Severity

MANY_TOKENS = 128
LARGE_SHARE = 0.5


def described_tools(kind: EnvKind) -> Sequence[Described]:
    """The tools of an environment, whatever is wrapped around it."""
    while not hasattr(kind, "tools") and hasattr(kind, "kind"):
        kind = kind.kind
    return getattr(kind, "tools", ())


def tools_finding(
    tokenizer: ChatTokenizer, opening: Opening, tools: Sequence[Described]
) -> Finding | None:
    """A prompt that consists of tools for the most part."""
    if opening.parser is None or not tools:
        return None
    prompt = _Prompt(tokenizer, opening, tools)
    whole, without = prompt.count(opening.messages, opening.tools), prompt.count(prompt.bare)
    dear = whole - without
    if dear < MANY_TOKENS or dear < LARGE_SHARE * whole:
        return None
    options = []
    if opening.parser.name != PythonicParser.name:
        fewer = prompt.described(PythonicParser().describe(tools))
        options.append((fewer, f"`parser = 'pythonic'` makes it {fewer}"))
    fewer = prompt.without_words()
    options.append((fewer, f"shorter docstrings make it {fewer} at the least"))
    helpful = [text for count, text in options if count < whole]
    return Finding(
        name="dear_tools",
        severity=Severity.NOTE,
        seen=f"{dear} of {whole} prompt tokens are the tools",
        why="every turn reads them, and every supervised step too",
        remedy=", ".join(helpful) or "offer fewer tools, or fewer parameters",
    )


class _Prompt:
    """An opening, and the same with other words about its tools."""

    def __init__(
        self, tokenizer: ChatTokenizer, opening: Opening, tools: Sequence[Described]
    ) -> None:
        assert opening.parser is not None
        self._tokenizer, self._opening, self._tools = tokenizer, opening, tools
        is_listed = opening.tools is not None
        words = "" if is_listed else opening.parser.describe(tools)
        self.bare = [_replaced(message, words) for message in opening.messages]

    def count(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> int:
        chat = [one for one in messages if one["role"] != "system" or one["content"]]
        return len(self._tokenizer.encode_chat(chat, add_generation_prompt=True, tools=tools))

    def described(self, words: str) -> int:
        """Tokens of the prompt whose system message ends with these words about the tools."""
        has_system = bool(self.bare) and self.bare[0]["role"] == "system"
        own = self.bare[0]["content"] if has_system else ""
        system = {"role": "system", "content": f"{own}\n\n{words}".strip()}
        return self.count([system, *self.bare[has_system:]])

    def without_words(self) -> int:
        """Tokens of the prompt whose tools have names and parameters and no docstring."""
        assert self._opening.parser is not None
        schemas = [_without_descriptions(copy.deepcopy(dict(one.schema))) for one in self._tools]
        if self._opening.tools is not None:
            return self.count(self._opening.messages, schemas)
        return self.described(self._opening.parser.describe(list(map(ClientTool, schemas))))


def _replaced(message: Message, words: str) -> Message:
    content = message["content"]
    if not words or not isinstance(content, str):
        return message
    return {**message, "content": content.replace(words, "").strip()}


def _without_descriptions(schema: dict[str, Any]) -> dict[str, Any]:
    function = schema["function"]
    function["description"] = ""
    for one in function.get("parameters", {}).get("properties", {}).values():
        one.pop("description", None)
    return schema
