"""Pictures that a task or an environment shows: `nanorl.Image`, and the messages that carry them.

    nanorl.Task(["Where is the door?", nanorl.Image("room.png")], answer="left")

    def reset(self):
        return ["Where is the door?", nanorl.Image(pixels)]     # uint8 [H, W, 3], or a file

A task holds its pictures beside its prompt until it is played; then the bytes go to the run's
picture store (nanoengine/vision/picture_store.py), and from there on everything holds their hash.
Equal pictures are one file.
Left out: pictures at addresses, video, sound.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoengine.extras import MissingPackageError
from nanoengine.text.chat_template import Message
from nanorl.envs.tools.base import Shown
from nanorl.task import words_of
from nanorl.types import InfrastructureError

if TYPE_CHECKING:
    import numpy as np

    from nanorl.task import Task


@dataclass(frozen=True, eq=False)
class Image:
    """A picture: the bytes of a file (PNG; others with the extra `vision`), its path or a data URL,
    or pixels, uint8 [H, W] or [H, W, 3]. A relative path is of the folder that one works in."""

    source: bytes | str | Path | np.ndarray | Mapping[str, Any]
    folder: Path | None = field(default=Path(), kw_only=True)
    """The folder of relative paths; None: no path is opened."""

    def data(self) -> bytes:
        """The bytes of its file. `ValueError` for what is no picture."""
        from nanoengine.vision.picture_source import bytes_of  # here: text needs none of it

        return bytes_of(self.source, self.folder)

    def checked(self) -> tuple[str, Image]:
        """The SHA-256 of its file, whose header was read, and the picture as it is kept: a file
        where it lies, for data sets of pictures are larger than memory. `ValueError` as `data`."""
        # here: text needs none of it
        from nanoengine.vision.picture_header import picture_header
        from nanoengine.vision.picture_source import path_of

        data, path = self.data(), path_of(self.source, self.folder)
        picture_header(data)
        return hashlib.sha256(data).hexdigest(), Image(data if path is None else path.resolve())


@dataclass(frozen=True, eq=False)
class StoredImage(Image):
    """A picture of the run's store, read when somebody asks for it."""

    source: Any
    """What reads its file."""

    def data(self) -> bytes:
        """The file as it came. `KeyError` names a picture that is not there, or is damaged."""
        data: bytes = self.source()
        return data

    def __reduce__(self) -> tuple[type[Image], tuple[bytes]]:
        return Image, (self.data(),)  # another process may not reach the store


class MadeImage(Image):
    """A picture that a tool, or a program of the policy, made of what the policy asked for. What is
    wrong with it is told to the model, as what is wrong with a call is, and ends no rollout."""


def take_pictures(task: Task) -> None:
    """Make a chat of a task's prompt that shows pictures: each of its parts names one by the
    SHA-256 of its file, and `task.pictures` has it. Called before anybody else sees the task.
    A chat of texts stays as it is. `ValueError` for what is no picture, by its first bytes and the
    sizes that they say."""
    pictures = dict(task.pictures)

    def taken(part: Any) -> Any:
        if not isinstance(part, Image):
            return {"type": "text", "text": part} if isinstance(part, str) else part
        sha256, kept = part.checked()
        pictures[sha256] = kept
        return {"type": "image", "sha256": sha256}

    try:
        chat = [
            {**one, "content": [taken(part) for part in one["content"]]}
            if isinstance(_message(one).get("content"), list)
            else one
            for one in _as_chat(task.prompt)
        ]
    except ValueError as error:
        raise ValueError(f"Task: field 'prompt': {error}") from None
    object.__setattr__(task, "prompt", chat)  # frozen for everybody else
    object.__setattr__(task, "pictures", pictures)


def keep_pictures(task: Task, tokenizer: Any) -> None:
    """Have the run's picture store hold a task's pictures. `ValueError` where the model reads text
    alone, and for a file that has changed since the task was made; InfrastructureError for one that
    is damaged further back than its header, or that the model cannot be shown."""
    store = _store_of(tokenizer, "the task")
    for sha256, image in task.pictures.items():
        if not store.holds(sha256) and _added(store, image, f"task {task.task_id}") != sha256:
            raise ValueError(
                f"the picture {image.source!r:.200} of task {task.task_id} is another than when "
                "the task was made: leave the files of a run alone while it lasts"
            )


def observed(messages: Sequence[Message]) -> str | list[Any]:
    """Tell a script of the messages that it reads: their text, or where they show pictures the list
    of all their parts."""
    contents = [message["content"] for message in messages]
    if not pictures_in(messages):
        return "\n".join(map(words_of, contents))
    return [part for one in contents for part in (one if isinstance(one, list) else [one])]


def as_shown(observation: str | list[Any], tokenizer: Any) -> str | list[Any]:
    """An observation as whoever shows it writes it: texts, and pictures as `nanorl.Image`s."""
    if isinstance(observation, str):
        return observation
    return [
        StoredImage(partial(tokenizer.store.data, part["sha256"]))
        if "sha256" in part
        else part.get("text", "")
        for part in ({"text": one} if isinstance(one, str) else one for one in observation)
    ]


def with_text(message: Message, text: str, between: str = "\n\n") -> Message:
    """The message with `text` at its end."""
    content = message.get("content") or ""
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": between + text}]}
    return {**message, "content": content + between + text}


def with_pictures(said: Any, tokenizer: Any, who: str = "the environment") -> Any:
    """Return what an environment, `who`, says as messages, with pictures by their hash, or as it
    is. `ValueError` where the model reads text alone, InfrastructureError for a picture that cannot
    be shown."""
    said = _as_chat(said)
    if not (isinstance(said, list) and all(isinstance(one, Mapping) for one in said)):
        return said
    return [
        {**message, "content": [_part(one, tokenizer, who) for one in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in said
    ]


def behind_prompt(task: Task, text: str) -> str | list[Message]:
    """Return the opening of an episode that says more than its task: the prompt, then the text."""
    if isinstance(task.prompt, str) or not pictures_in(task.prompt):
        return "\n".join((task.prompt_text, text))
    *before, last = task.prompt
    return [*before, with_text(last, text, "\n")]


def said_anew(message: Message, said: str) -> Message:
    """The message with other words, which name its pictures as `words_of` does: each stands where
    it is named, and before all of it where it is not."""
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": said}
    if said == words_of(content):
        return message
    pictures = {words_of([part]): part for part in pictures_in([message])}
    pieces = re.split(f"({'|'.join(map(re.escape, pictures))})", said) if pictures else [said]
    before = [part for part in pictures_in([message]) if words_of([part]) not in pieces]
    told = [pictures.get(one) or {"type": "text", "text": one} for one in pieces if one]
    return {**message, "content": [*before, *told]}


def split_result(result: Any) -> Shown | None:
    """What a tool returned, if that is a picture or a list of texts and pictures; else None."""
    parts = result if isinstance(result, list | tuple) else [result]
    pictures = [_as_made(one) for one in parts if isinstance(one, Image)]
    if not pictures or not all(isinstance(one, str | Image) for one in parts):
        return None
    return Shown("\n".join(one for one in parts if isinstance(one, str)), pictures)


def _as_made(image: Image) -> Image:
    """The picture as one that the policy asked for: a part of another that has no pixels, say."""
    return MadeImage(image.source, folder=image.folder) if type(image) is Image else image


def with_pictures_behind(message: Message, pictures: Sequence[Any]) -> Message:
    """The message with pictures, or parts that name some, at its end."""
    content = message["content"]
    parts = content if isinstance(content, list) else [content] if content else []
    return {**message, "content": [*parts, *pictures]} if pictures else message


def without_pictures(message: Message) -> Message:
    """The message with its texts alone."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(one["text"] for one in content if "text" in one)}


def pictures_in(messages: Sequence[Message]) -> list[Any]:
    """The parts of messages that name pictures by their hash, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for one in contents if isinstance(one, list) for part in one]
    return [part for part in parts if isinstance(part, Mapping) and "sha256" in part]


def with_results(messages: Sequence[Message], shown: Sequence[Any]) -> list[Message]:
    """The messages that bring results of calls, each with the pictures of its call (`shown` has
    those of all calls, in order) behind its text; one that brings several, with all of them."""
    told = list(messages)
    for place, pictures in enumerate(shown):
        at = place if len(told) == len(shown) else -1
        told[at] = with_pictures_behind(told[at], pictures)
    return told


def with_urls(messages: Sequence[Message], tokenizer: Any) -> list[Message]:
    """The messages as a client of an API sends them: each picture in a data URL, with the bytes of
    its file, so that it is the same one when it comes back."""
    return [
        {**message, "content": [_url_part(one, tokenizer) for one in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _as_chat(said: Any) -> Any:
    """A picture, or a list of texts and pictures, as what a user says; all else as it is."""
    if isinstance(said, Image):
        said = [said]
    if isinstance(said, list | tuple) and any(isinstance(one, str | Image) for one in said):
        return [{"role": "user", "content": list(said)}]
    return said


def _url_part(part: Any, tokenizer: Any) -> Any:
    if part.get("type") != "image":
        return part
    from nanoengine.vision.picture_header import picture_kind  # here: text has none of it

    data = tokenizer.store.data(part["sha256"])
    head = f"data:image/{picture_kind(data).lower()};base64,"
    return {"type": "image_url", "image_url": {"url": head + base64.b64encode(data).decode()}}


def _message(one: Any) -> Mapping[str, Any]:
    if not isinstance(one, Mapping):
        raise ValueError(f"{one!r:.200} is no message; give texts, nanorl.Images, or a chat")
    return one


def _part(part: Any, tokenizer: Any, who: str) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Image):
        return part
    store = _store_of(tokenizer, who)
    try:
        return {"type": "image", "sha256": _added(store, part, who)}
    except InfrastructureError as error:
        if not isinstance(part, MadeImage):
            raise
        return {"type": "text", "text": f"\n(a picture is not shown: {error.__cause__})"}


def _added(store: Any, image: Image, whose: str) -> str:
    """The SHA-256 of a picture that the store keeps now. InfrastructureError says what is wrong
    with it, for nobody who plays is to blame."""
    try:
        sha256: str = store.add(image.data())
        return sha256
    except MissingPackageError:
        raise
    except ValueError as error:
        is_file = isinstance(image.source, str | Path) and not str(image.source).startswith("data:")
        name = f"the picture {image.source!s:.200}" if is_file else "a picture"
        raise InfrastructureError(f"{name} of {whose} cannot be shown: {error}") from error


def _store_of(tokenizer: Any, who: str) -> Any:
    store = getattr(tokenizer, "store", None)
    if store is None:
        raise ValueError(
            f"{who} shows a picture, and the model reads text alone: take one with a vision tower "
            "(--model)"
        )
    return store
