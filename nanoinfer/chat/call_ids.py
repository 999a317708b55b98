"""Ids of calls: nine letters or digits, as Mistral's templates want them, unique in a conversation.

They follow from the conversation, so that a model whose template prints them reads the same ones
when it is trained and when it is served.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from nanoengine.model.chat_template import Message
from nanoinfer.chat.base import ToolCall, ToolCallError

SPEAKERS = frozenset({"system", "developer", "user", "assistant"})
"""Roles that say something by themselves; messages of any other role are results of calls."""


def next_ids(messages: Sequence[Message], num: int) -> list[str]:
    """Ids of the next `num` calls in a conversation that has held `messages` so far."""
    known = {call.get("id") for message in messages for call in message.get("tool_calls") or ()}
    known |= {message.get("tool_call_id") for message in messages}
    names = (f"call{number:05d}" for number in range(len(known) + num))
    return [name for name in names if name not in known][:num]


def ids_of(calls: Sequence[ToolCall], messages: Sequence[Message]) -> list[str]:
    """Ids of a turn's calls in a conversation of `messages`: those that the model wrote, where no
    call has them yet, and else the next ones."""
    following = next_ids(messages, len(calls))
    known = {call.get("id") for message in messages for call in message.get("tool_calls") or ()}
    ids: list[str] = []
    for call, other in zip(calls, following, strict=True):
        ids.append(other if not call.id or call.id in known else call.id)
        known.add(call.id)
    return ids


def short_id(given: str) -> str:
    """An id of nine letters or digits for one that a client made up."""
    is_short = len(given) == 9 and given.isascii() and given.isalnum()
    return given if is_short else hashlib.sha256(given.encode()).hexdigest()[:9]


def with_ids(new: Sequence[Message], history: Sequence[Message]) -> list[Message]:
    """`new` messages, which follow `history`, with an id for each call's result that has none."""
    ids = iter(next_ids([*history, *new], len(new)))
    return [
        {**message, "tool_call_id": next(ids)}
        if message["role"] not in SPEAKERS and not message.get("tool_call_id")
        else message
        for message in new
    ]


def as_results(
    messages: Sequence[Message], calls: Sequence[ToolCall | ToolCallError]
) -> list[Message]:
    """The `messages` in which a parser brings the results of `calls` back, each with the name of
    its call, and with its id where the model wrote one. Those that a user says stay as they are."""
    # One message for several results cannot name its call; templates print those as they are.
    if len(messages) != len(calls) or any(one["role"] in SPEAKERS for one in messages):
        return list(messages)
    return [_as_result(message, call) for message, call in zip(messages, calls, strict=True)]


def _as_result(message: Message, call: ToolCall | ToolCallError) -> Message:
    if isinstance(call, ToolCallError):
        return message
    return {**message, "name": call.name} | ({"tool_call_id": call.id} if call.id else {})
