"""Images, sound and files in a conversation: what becomes of them where models read text.

In a tool's result one becomes a text that says so, since the agent cannot help what its tool
found. In what a person or program says it is refused: the model would answer without having seen
it. Left out: models that read images.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, ValidationError
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


class MediaPart(BaseModel):
    """A part of a content that is no text. What it holds is not read."""

    type: MediaKind

    @property
    def noun(self) -> str:
        return next(noun for noun in _NOUNS if noun in self.type)

    @property
    def text(self) -> str:
        """The words that the model reads in its place."""
        return f"[{self.noun} left out: this model reads text]"


def refuse_media(parts: Sequence[object], *where: str) -> None:
    """`ValidationError` that names each part at `where` which is no text."""
    media = [(place, part) for place, part in enumerate(parts) if isinstance(part, MediaPart)]
    if media:
        raise refusals(((*where, place), _why(part), part.type) for place, part in media)


def refusals(faults: Iterable[tuple[tuple[str | int, ...], str, object]]) -> ValidationError:
    """An error of several (place, reason, value)."""
    details: list[InitErrorDetails] = [
        {"type": PydanticCustomError(REFUSED, why), "loc": loc, "input": value}  # type: ignore[arg-type]
        for loc, why, value in faults
    ]
    return ValidationError.from_exception_data("body", details)


def _why(part: MediaPart) -> str:
    return f"{part.type}: this model reads text; leave it out, or say in words what it shows"
