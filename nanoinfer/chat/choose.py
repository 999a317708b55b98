"""`tool_chat`: how a model is told of tools and calls them, found by rendering its chat template.

Nothing is known by a model's name. The template is given a call, a tool and a result, and what it
makes of them tells: the parser that reads the call back is the model's; a template that shows the
tool can list tools; one that treats the role "tool" in another way than a role which nobody knows
knows it.
Of a family's generations, which one parser reads, the one is taken that writes what the template
writes. Left out: templates that render calls in a form of which there is no parser here (Granite,
Cohere). For them, as for templates without calls, the form is described in the system prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.base import Described, Parser, ToolCall
from nanoinfer.chat.chat import ToolChat
from nanoinfer.chat.fenced import BASH_FENCE, PYTHON_FENCE, Fence, FencedParser
from nanoinfer.chat.harmony import HarmonyParser
from nanoinfer.chat.hermes import HermesParser
from nanoinfer.chat.llama import LlamaParser
from nanoinfer.chat.named import DeepSeekParser, Glm4Parser, MistralParser
from nanoinfer.chat.pythonic import PythonicParser
from nanoinfer.chat.tagged import GlmParser, QwenCoderParser

PROBE = ToolCall("probe_tool", {"probe_argument": 7}, "call00000")
SECOND = ToolCall("probe_tool", {"probe_argument": 8}, "call00001")
PROBE_RESULT = "probe result"
UNKNOWN_ROLE = "qzxw"
FENCES = {fence.tool: fence for fence in (PYTHON_FENCE, BASH_FENCE)}

Make = Callable[[str, Sequence[Described]], Parser]
"""Makes a parser of the role that carries results and the tools that are called."""

# Hermes first: a line of its calls is a call for Llama's parser too.
BY_NAME: Mapping[str, Make] = MappingProxyType(
    {
        "hermes": lambda role, tools: HermesParser(role=role),
        "qwen3_coder": QwenCoderParser.of,
        "glm45": GlmParser.of,
        "mistral": lambda role, tools: MistralParser(role=role),
        "mistral_v11": lambda role, tools: MistralParser(
            name="mistral_v11", role=role, is_list=False
        ),
        "mistral_v13": lambda role, tools: MistralParser(
            name="mistral_v13", role=role, is_list=False, has_ids=False
        ),
        "deepseek": lambda role, tools: DeepSeekParser(role=role),
        "deepseek_v3": lambda role, tools: DeepSeekParser(
            name="deepseek_v3", role=role, is_fenced=True
        ),
        "harmony": lambda role, tools: HarmonyParser(role=role),
        "glm4": lambda role, tools: Glm4Parser(role=role),
        "llama": lambda role, tools: LlamaParser(role=role),
        "pythonic": lambda role, tools: PythonicParser(role=role),
        "fenced": lambda role, tools: FencedParser(role=role, fences=_fences(tools)),
    }
)


def tool_chat(
    tokenizer: ChatTokenizer, tools: Sequence[Described], parser: Parser | str = "auto"
) -> ToolChat:
    """The chat with `tools`: through `parser`, one of that name, or by "auto" the one whose calls
    the model's chat template writes.

    Where the template writes no calls: fenced blocks if all tools are ones whose one argument is
    code (`python`, `bash`), else Hermes. Tools that the template lists are left to it, since it
    says too how they are called. `ValueError` for an unknown name.
    """
    rendered = _rendered_form(tokenizer)
    if isinstance(parser, str):
        if parser == "auto":
            parser = rendered or ("fenced" if _can_be_fenced(tools) else "hermes")
        if parser not in BY_NAME:
            raise ValueError(f"parser={parser!r}: one of auto, {', '.join(BY_NAME)}")
        calling = CALLING if parser == rendered else SPEAKING
        roles = (one for one in ROLES if _knows_role(tokenizer, one, calling))
        parser = BY_NAME[parser](next(roles, "user"), tools)
    writes = parser.name == rendered
    is_single = writes and not _writes_several(tokenizer, parser)
    if writes and PROBE.name in _render(tokenizer, [USER], [SCHEMA]):
        schemas = [tool.schema for tool in tools]
        return ToolChat(parser=parser, schemas=schemas, writes_calls=True, is_single=is_single)
    description = parser.describe(tools)
    return ToolChat(
        parser=parser, description=description, writes_calls=writes, is_single=is_single
    )


@dataclass(frozen=True)
class ClientTool:
    """A tool of which only the schema is known: whoever offers it runs it."""

    schema: dict[str, Any]

    @property
    def name(self) -> str:
        name: str = self.schema["function"]["name"]
        return name


def client_tool_chat(tokenizer: ChatTokenizer, schemas: Sequence[dict[str, Any]]) -> ToolChat:
    """The chat with tools that a client of an API offers and runs itself. Where the template writes
    no calls they are Hermes' even if all are code, since the client knows arguments by name."""
    tools = [ClientTool(schema) for schema in schemas]
    return tool_chat(tokenizer, tools, _rendered_form(tokenizer) or "hermes")


def _rendered_form(tokenizer: ChatTokenizer) -> str | None:
    """The name of the parser that reads what the template makes of a call."""
    text = _render(tokenizer, [USER, CALLING])
    parsers = {name: make("tool", []) for name, make in BY_NAME.items() if name != "fenced"}
    fits = [name for name, parser in parsers.items() if parser.read(text) == [PROBE]]
    dense = "".join(text.split())
    exact = (name for name in fits if "".join(parsers[name].write(PROBE).split()) in dense)
    return next(exact, next(iter(fits), None))


def _writes_several(tokenizer: ChatTokenizer, parser: Parser) -> bool:
    """True if the template writes each of two calls of one turn."""
    return parser.read(_render(tokenizer, [USER, _calling(PROBE, SECOND)])) == [PROBE, SECOND]


def _can_be_fenced(tools: Sequence[Described]) -> bool:
    return {tool.name for tool in tools} <= FENCES.keys()


def _fences(tools: Sequence[Described]) -> tuple[Fence, ...]:
    others = [tool.name for tool in tools if tool.name not in FENCES]
    if others:
        raise ValueError(
            f"parser='fenced': {', '.join(others)} cannot be called by a block of code, only "
            f"{', '.join(FENCES)} can; use 'auto'"
        )
    return tuple(FENCES[tool.name] for tool in tools)


def _calling(*calls: ToolCall) -> Message:
    written = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": dict(call.arguments)},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": written}


ROLES = ("tool", "ipython", "observation")
"""Roles that templates have for results; a user brings them where there is none."""
USER: Message = MappingProxyType({"role": "user", "content": "a"})
CALLING: Message = MappingProxyType(_calling(PROBE))
SPEAKING: Message = MappingProxyType({"role": "assistant", "content": "b"})
"""A call in a form that the template does not know is what the assistant said."""
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


def _knows_role(tokenizer: ChatTokenizer, role: str, calling: Message) -> bool:
    """True if the template shows the message and does not merely print the role's name."""

    def shown(role: str) -> str:
        result = {"role": role, "content": PROBE_RESULT, "tool_call_id": "call00000"}
        return _render(tokenizer, [USER, calling, result])

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
