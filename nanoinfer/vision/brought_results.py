"""Results of calls that have pictures among their texts, in the messages in which a parser brings
them.

A parser knows texts. So a mark stands in the place of each picture while the parser writes its
messages, and the picture takes the place of its mark.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from nanoengine.text.chat_template import Message

Part = dict[str, Any]


def brought(
    observation: Callable[[Sequence[str]], list[Message]], contents: Sequence[str | list[Part]]
) -> list[Message]:
    """The messages of `Parser.observation` for results, some of which are lists of texts and
    pictures. `ValueError` for a parser that leaves out what it brings."""
    pictures: dict[str, Part] = {}
    texts = [_marked(one, pictures) for one in contents]
    messages: list[Message] = [
        {**one, "content": _parted(one["content"], pictures)} for one in observation(texts)
    ]
    shown = sum(part["type"] == "image" for one in messages for part in _parts(one["content"]))
    if shown != len(pictures):
        raise ValueError(
            f"of {len(pictures)} pictures in results of calls the model's form shows {shown}"
        )
    return messages


def _marked(content: str | list[Part], pictures: dict[str, Part]) -> str:
    if isinstance(content, str):
        return content
    said = []
    for part in content:
        if part["type"] == "text":
            said.append(part["text"])
            continue
        mark = f"x{secrets.token_hex(8)}x"  # nobody can have written it
        pictures[mark] = part
        said.append(mark)
    return "".join(said)


def _parted(text: str, pictures: dict[str, Part]) -> str | list[Part]:
    pieces = re.split(f"({'|'.join(pictures)})", text)
    if len(pieces) == 1:
        return text
    parts = [pictures.get(one) or {"type": "text", "text": one} for one in pieces]
    return [one for one in parts if one.get("text") != ""]


def _parts(content: str | list[Part]) -> list[Part]:
    return content if isinstance(content, list) else []
