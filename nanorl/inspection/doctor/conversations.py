"""Conversations over which a chat template is proven, in the form in which clients send them.

They are what agents of ours have: turns of two, tools called once, together and one after the
other, reasoning that a client sends back or leaves out, system prompts, empty contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanoengine.text.chat_template import Message

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
THOUGHT = "That is a sum."


@dataclass(frozen=True, kw_only=True)
class ProofChat:
    """Messages that end with what the assistant answers to.

    ProofChat(name="two turns", messages=(user("a"), said("b"), user("c")))
    """

    name: str
    messages: tuple[Message, ...]
    has_tools: bool = False
    is_needed: bool = True
    """Every agent comes to it: a template that rejects it cannot be trained."""


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def said(content: str, *calls: Message, thought: str | None = None) -> Message:
    """A turn of the assistant; with a `thought` that the client sends back."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= {"tool_calls": list(calls)} if calls else {}
    return message | ({"reasoning_content": thought} if thought is not None else {})


def call(number: int, a: int = 17, b: int = 25) -> Message:
    """The call of that number in its conversation, with the id that our server gives it."""
    function = {"name": "add", "arguments": {"a": a, "b": b}}
    return {"id": client_id(number), "type": "function", "function": function}


def result(number: int, content: str) -> Message:
    """The tool's message that answers the call of that number."""
    return {"role": "tool", "tool_call_id": client_id(number), "content": content}


def client_id(number: int) -> str:
    return f"call{number:05d}"


ASKED = user("What is 17 + 25?")
_PLAIN: Sequence[ProofChat] = (
    ProofChat(name="two turns", messages=(ASKED, said("It is 42."), user("And 43?"))),
    ProofChat(
        name="three turns",
        messages=(ASKED, said("It is 42."), user("And 43?"), said("No."), user("Why?")),
    ),
    ProofChat(
        name="system prompt",
        messages=(system("Be brief."), ASKED, said("42"), user("And 43?")),
        is_needed=False,
    ),
    ProofChat(name="empty turn", messages=(ASKED, said(""), user("Well?"))),
    ProofChat(name="empty message", messages=(ASKED, said("42"), user(""))),
    ProofChat(name="blanks around a turn", messages=(ASKED, said("\n 42 \n"), user("And 43?"))),
    ProofChat(
        name="user after user",
        messages=(ASKED, user("Be quick."), said("42"), user("And 43?")),
        is_needed=False,
    ),
    ProofChat(
        name="reasoning kept",
        messages=(ASKED, said("42", thought=THOUGHT), user("And 43?")),
        is_needed=False,
    ),
)
_CALLING: Sequence[ProofChat] = (
    ProofChat(name="a call", messages=(ASKED, said("", call(0)), result(0, "42"))),
    ProofChat(
        name="calls side by side",
        messages=(ASKED, said("", call(0), call(1, 1, 2)), result(0, "42"), result(1, "3")),
    ),
    ProofChat(
        name="call after call",
        messages=(ASKED, said("", call(0)), result(0, "42"), said("", call(1)), result(1, "43")),
    ),
    ProofChat(
        name="call, answer, question",
        messages=(ASKED, said("", call(0)), result(0, "42"), said("It is 42."), user("And 43?")),
    ),
    ProofChat(
        name="text and call",
        messages=(ASKED, said("Let me see.", call(0)), result(0, "42")),
    ),
    ProofChat(name="empty result", messages=(ASKED, said("", call(0)), result(0, ""))),
    ProofChat(
        name="system prompt and call",
        messages=(system("Be brief."), ASKED, said("", call(0)), result(0, "42")),
        is_needed=False,
    ),
    ProofChat(
        name="user after a result",
        messages=(ASKED, said("", call(0)), result(0, "42"), user("Go on.")),
        is_needed=False,
    ),
    ProofChat(
        name="reasoning and call kept",
        messages=(ASKED, said("", call(0), thought=THOUGHT), result(0, "42")),
        is_needed=False,
    ),
)


def conversations() -> list[ProofChat]:
    """All of them: those without tools, then those with them."""
    return [*_PLAIN, *(replace(one, has_tools=True) for one in _CALLING)]
