"""The pictures of a chat in somebody's data: as parts of its messages, or in a column beside it.

    [{"role": "user", "content": [{"type": "image", "image": "dots/3.png"}, "Which side?"]}]
    "<image>Which side?"                                      and a column ["dots/3.png"]
    [{"role": "user", "content": [{"type": "image"}, ...]}]   and a column

What names a picture is picture_source.py's. A text says `<image>`, or a chat has a part without a
source, where each picture of the column belongs; one that never does has them all before what the
user first says. Without a column `<image>` is a text like others.
Left out: pictures at addresses, video and sound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from nanoengine.text.chat_template import Message
from nanoengine.vision.picture_source import bytes_of, source_of
from nanoengine.vision.picture_store import PictureStore
from nanoengine.vision.seeing_tokenizer import pictures_of

MARK = "<image>"


def shown_chat(prompt: str | Sequence[Any], images: Any, make: Callable[[Any], Any]) -> list[Any]:
    """The chat with `make(source)` as the part of each picture. `prompt` is a text, a chat, or the
    parts that a user says; `images` are the column's, a list, one, or None.

    `ValueError` where there are more or fewer pictures than marks, and for a part of a kind that is
    not known.
    """
    chat = list(prompt)
    if isinstance(prompt, str) or not all(_is_message(one) for one in prompt):
        chat = [{"role": "user", "content": prompt if isinstance(prompt, str) else chat}]
    if images is not None and images != []:
        given = images if isinstance(images, list | tuple) else [images]
        chat = _placed(chat, given)
    return [
        {**message, "content": [_shown(part, make) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in chat
    ]


def stored_chat(
    messages: Sequence[Message], images: Any, store: PictureStore, folder: Path
) -> list[Message]:
    """The chat with its pictures in a store, by their hash; paths begin in `folder`. `ValueError`
    as of `shown_chat`, and for what is no picture that the model can be shown, or not there."""
    chat = shown_chat(
        messages,
        images,
        lambda source: {"type": "image", "sha256": store.add(bytes_of(source, folder))},
    )
    for sha256 in pictures_of(chat):
        if not store.holds(sha256):
            raise named_by_hash(sha256)
    return chat


def named_by_hash(sha256: Any) -> ValueError:
    """The error of data that name a picture as stored rollouts do, and do not have it."""
    return ValueError(
        f"the picture {sha256!r:.80} is named by its hash alone; give its file, which lies in its "
        "run's folder pictures/ under that name, or its bytes"
    )


def _is_message(one: Any) -> bool:
    return isinstance(one, Mapping) and "role" in one


def _shown(part: Any, make: Callable[[Any], Any]) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not (isinstance(part, Mapping) and isinstance(part.get("type"), str)):
        raise ValueError(
            f'{part!r:.200} in a message: write a text, {{"type": "text", "text": ...}} or '
            '{"type": "image", "image": ...}'
        )
    source = source_of(part)
    if source is not None:
        return make(source)
    if part["type"] not in ("text", "image"):
        raise ValueError(f"a part of type {part['type']!r}: texts and pictures are taken")
    # Tables give all parts the same fields.
    return {name: value for name, value in part.items() if value is not None}


def _placed(chat: list[Any], sources: Sequence[Any]) -> list[Any]:
    """The chat with the k-th picture in place of its k-th mark."""
    cut = [{**one, "content": list(_cut(one.get("content")))} for one in chat]
    num_marks = sum(one["content"].count(None) for one in cut)
    if num_marks == 0:
        place = next((i for i, one in enumerate(chat) if one.get("role") == "user"), 0)
        cut[place]["content"] = [None] * len(sources) + cut[place]["content"]
        num_marks = len(sources)
    if num_marks != len(sources):
        raise ValueError(
            f"{len(sources)} pictures for {num_marks} marks {MARK}: a prompt has one for each, or "
            "none, and then all stand before its text"
        )
    left = iter(sources)
    return [
        {**one, "content": [_filled(part, left) for part in one["content"]]}
        if None in one["content"]
        else before
        for before, one in zip(chat, cut, strict=True)
    ]


def _filled(part: Any, sources: Iterator[Any]) -> Any:
    return {"type": "image", "image": next(sources)} if part is None else part


def _cut(content: Any) -> Iterator[Any]:
    """The parts of a message, None for each mark of a picture."""
    for part in content if isinstance(content, list) else [content or ""]:
        if isinstance(part, str):
            first, *rest = part.split(MARK)
            pieces = chain([first], *((None, piece) for piece in rest))
            yield from (piece for piece in pieces if piece != "")
            continue
        is_mark = isinstance(part, Mapping) and part.get("type") == "image"
        yield None if is_mark and part.get("image") is None and "sha256" not in part else part
