"""The tokens of a chat's prompt: up to the opening of an answer, or into the middle of a turn.

A turn that goes on is rendered with a mark behind its text, and the prompt ends at the mark: so
whatever a template prints before, around and behind a text, nothing that ends the turn is left.
Where a model sees, a prompt is its tokens and the pictures among them.
Left out: prompts that begin with sampled tokens (turns.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nanoengine.spans import ImageSpan
from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer


class ChatPrompt(NamedTuple):
    """The tokens of a prompt, and the pictures that some of them stand for, in order."""

    ids: list[int]
    images: tuple[ImageSpan, ...] = ()


def chat_prompt(tokenizer: ChatTokenizer, messages: Sequence[Message], **given: Any) -> ChatPrompt:
    """`chat_ids`, and the pictures of the messages. `ValueError` as there, and for pictures where
    the model reads text."""
    ids = chat_ids(tokenizer, messages, **given)
    return ChatPrompt(ids, tuple(tokenizer.images_in(ids, messages, 0)))


def chat_ids(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    has_opening: bool = True,
    is_continued: bool = False,
) -> list[int]:
    """Ids of a prompt: with `is_continued` the answer goes on where the last message ends, else it
    begins behind all of them. `ValueError` where the template refuses the messages, or does not
    say where the last one ends."""
    if not is_continued:
        return tokenizer.encode_chat(
            messages, add_generation_prompt=has_opening, tools=tools, variables=variables
        )
    *before, last = messages
    mark = f"x{secrets.token_hex(8)}x"  # nobody can have written it
    text, masks = tokenizer.render_masked(
        [*before, {**last, "content": f"{last['content']}{mark}"}],
        add_generation_prompt=False,
        tools=tools,
        variables=variables,
    )
    if text.count(mark) != 1:
        raise ValueError(
            "continue_final_message: the chat template does not print the last message once; "
            "leave it out"
        )
    return tokenizer.encode_rendered(text.partition(mark)[0], masks)
