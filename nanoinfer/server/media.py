"""Images, sound and files in a conversation: pictures for models that see, and what becomes of the
rest.

A body is read with a `PictureTaker` where the model sees: it takes each picture and says its name,
and the part then stands in a message for the chat template. What a model cannot read becomes, in a
tool's result, a text that says so, since the agent cannot help what its tool found. In what a
person or program says it is refused: the model would answer without having seen it.
Left out: how pictures are checked and kept (nanoinfer/vision/given_pictures.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ValidationError, ValidationInfo, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from nanoinfer.http.strict_body import REFUSED

MediaKind = Literal[
    "audio",
    "audio_url",
    "computer_screenshot",
    "document",
    "file",
    "image",
    "image_url",
    "input_audio",
    "input_file",
    "input_image",
    "video",
    "video_url",
]
"""Types of such parts in the APIs that are spoken here."""
_NOUNS = ("audio", "screenshot", "document", "file", "image", "video")
_PICTURES = ("screenshot", "image")
_SHOWN_BY = ("user", "tool")
"""Roles whose messages may show pictures."""


class PictureTaker(Protocol):
    """Takes the pictures of a body that is being read, for a model that sees."""

    def take(self, part: Mapping[str, Any]) -> str:
        """The name of the picture of a part as a client sends it: its SHA-256. `ValueError` says
        what is wrong with it."""
        ...


class MediaPart(BaseModel):
    """A part of a content that is no text. But for pictures what it holds is not read."""

    type: MediaKind
    is_seeing: bool
    """The model reads pictures."""
    sha256: str
    """The picture's; empty for what the model cannot read."""

    @model_validator(mode="before")
    @classmethod
    def _taken(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict):
            return given
        kind, taker = given.get("type"), info.context
        is_picture = isinstance(kind, str) and any(noun in kind for noun in _PICTURES)
        sha256 = taker.take(given) if taker is not None and is_picture else ""
        return {"type": kind, "is_seeing": taker is not None, "sha256": sha256}

    @property
    def noun(self) -> str:
        return next(noun for noun in _NOUNS if noun in self.type)

    @property
    def reads(self) -> str:
        """The things that the model does with a conversation."""
        return "reads text and sees pictures" if self.is_seeing else "reads text"

    @property
    def text(self) -> str:
        """The words that the model reads in its place."""
        return f"[{self.noun} left out: this model {self.reads}]"


class Spoken(Protocol):
    """A part of a content that has a text."""

    @property
    def text(self) -> str: ...


def content_of(parts: Sequence[Spoken], before: str = "") -> str | list[dict[str, str]]:
    """The content of a message as chat templates read it: its texts as one, `before` in front;
    where there are pictures among them, a list of texts and pictures."""
    content: list[dict[str, str]] = [{"type": "text", "text": before}]
    for part in parts:
        if isinstance(part, MediaPart) and part.sha256:
            content.append({"type": "image", "sha256": part.sha256})
        elif content[-1]["type"] == "text":
            content[-1] = {"type": "text", "text": content[-1]["text"] + part.text}
        else:
            content.append({"type": "text", "text": part.text})
    if len(content) == 1:
        return content[0]["text"]
    return [one for one in content if one.get("text") != ""]


def refuse_media(parts: Sequence[object], *where: str, role: str = "user") -> None:
    """`ValidationError` that names each part at `where` which a message of `role` cannot have."""
    media = [
        (place, part)
        for place, part in enumerate(parts)
        if isinstance(part, MediaPart) and not (part.sha256 and role in _SHOWN_BY)
    ]
    if media:
        raise refusals(((*where, place), _why(part, role), part.type) for place, part in media)


def refusals(faults: Iterable[tuple[tuple[str | int, ...], str, object]]) -> ValidationError:
    """An error of several (place, reason, value)."""
    details: list[InitErrorDetails] = [
        {"type": PydanticCustomError(REFUSED, why), "loc": loc, "input": value}  # type: ignore[arg-type]
        for loc, why, value in faults
    ]
    return ValidationError.from_exception_data("body", details)


def _why(part: MediaPart, role: str) -> str:
    if part.sha256:
        return f"{part.type}: a user and a tool show pictures, and {role} does not; move it there"
    rest = "leave it out, or say in words what it shows"
    return f"{part.type}: this model {part.reads}; {rest}"
