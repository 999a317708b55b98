"""`choose_parser`: how a model writes calls, found by rendering its chat template.

Nothing is known by a model's name. The template is given a call, a tool and a result, and what it
makes of them tells: the parser that reads the call back is the model's; a template that shows the
tool can list tools; one that treats the role "tool" in another way than a role which nobody knows
knows it.
Left out: templates that render calls in a form of which there is no parser here (Mistral, DeepSeek,
XML). For them, as for templates without calls, the form is described in the system prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nanoengine.model.chat_template import Message
from nanoengine.model.tokenizer import ChatTokenizer
from nanorl.parsers.base import Parser, ToolCall
from nanorl.parsers.fenced import BASH_FENCE, PYTHON_FENCE, FencedParser
from nanorl.parsers.hermes import HermesParser
from nanorl.parsers.llama import LlamaParser
from nanorl.parsers.pythonic import PythonicParser
from nanorl.tools.base import Tool

PROBE = ToolCall("probe_tool", {"probe_argument": 7})
PROBE_RESULT = "probe result"
UNKNOWN_ROLE = "qzxw"
FENCES = (PYTHON_FENCE, BASH_FENCE)

# Hermes first: a line of its calls is a call for Llama's parser too.
BY_NAME: Mapping[str, Callable[[str], Parser]] = MappingProxyType(
    {
        "hermes": lambda role: HermesParser(role=role),
        "llama": lambda role: LlamaParser(role=role),
        "pythonic": lambda role: PythonicParser(role=role),
        "fenced": lambda role: FencedParser(fences=FENCES, role=role),
    }
)


@dataclass(frozen=True, kw_only=True)
class ParserChoice:
    """A parser, and what the chat template does by itself."""

    parser: Parser
    is_listing_tools: bool
    """True if the template lists tools; else the system prompt must hold `parser.describe`."""
    role: str
    """Of messages that carry results: "tool" or "ipython" where the template knows one of them."""


def choose_parser(
    tokenizer: ChatTokenizer, tools: Sequence[Tool], name: str = "auto"
) -> ParserChoice:
    """The parser called `name`, or by "auto" the one that the model's chat template writes.

    Where the template writes no calls: fenced blocks if all tools are ones whose one argument is
    code (`python`, `bash`), else Hermes. `ValueError` for an unknown name.
    """
    if name != "auto" and name not in BY_NAME:
        raise ValueError(f"parser={name!r}: one of auto, {', '.join(BY_NAME)}")
    written = _render(tokenizer, [USER, CALLING])
    rendered = next(
        (key for key, make in BY_NAME.items() if written and make("tool").read(written) == [PROBE]),
        None,
    )
    if name == "auto":
        are_fenced = bool(tools) and {tool.name for tool in tools} <= {f.tool for f in FENCES}
        name = rendered or ("fenced" if are_fenced else "hermes")
    role = next((role for role in ("tool", "ipython") if _knows_role(tokenizer, role)), "user")
    # A template that lists tools also says in which form to call them.
    is_listing = rendered == name and PROBE.name in _render(tokenizer, [USER], [SCHEMA])
    return ParserChoice(parser=BY_NAME[name](role), is_listing_tools=is_listing, role=role)


USER: Message = MappingProxyType({"role": "user", "content": "a"})
CALLING: Message = MappingProxyType(
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00000",
                "type": "function",
                "function": {"name": PROBE.name, "arguments": dict(PROBE.arguments)},
            }
        ],
    }
)
SCHEMA: Mapping[str, Any] = MappingProxyType(
    {
        "type": "function",
        "function": {
            "name": PROBE.name,
            "description": "A probe.",
            "parameters": {"type": "object", "properties": {"probe_argument": {"type": "integer"}}},
        },
    }
)


def _knows_role(tokenizer: ChatTokenizer, role: str) -> bool:
    """True if the template shows the message and does not merely print the role's name."""

    def shown(role: str) -> str:
        result = {"role": role, "content": PROBE_RESULT, "tool_call_id": "call00000"}
        return _render(tokenizer, [USER, CALLING, result])

    text = shown(role)
    return PROBE_RESULT in text and shown(UNKNOWN_ROLE).replace(UNKNOWN_ROLE, role) != text


def _render(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The rendered chat; empty where the template was not made for such messages."""
    copies = [dict(tool) for tool in tools] if tools else None
    try:
        return tokenizer.render(messages, add_generation_prompt=False, tools=copies)
    except (ValueError, TypeError):
        return ""
