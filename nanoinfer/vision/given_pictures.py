"""The pictures of a request, as clients of every API send them, on their way into a picture store.

    given = GivenPictures(store)
    body = Body.model_validate(json, context=given)    # server/media.py hands it each part
    given.num_tokens                                   # of all, before one is decoded
    given.keep(sha256)                                 # decodes one, and keeps it
    given.faults                                       # why some could not be

Three things are looked at for each part before anything is decoded: that it is a whole base64 text,
that its bytes are of the format which the client names, and that its header stays within the
limits. A picture that turns out to be damaged when it is decoded is noted, and taking it once more
is the error: so a body that is read again names every part that cannot be, in its own words.
A picture is known by its bytes: one that is sent again has the same name, and is decoded once.

Left out: pictures at addresses and in another server's files, which nobody fetches here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from nanoengine.vision.picture_header import picture_header
from nanoengine.vision.picture_source import data_url, of_base64
from nanoengine.vision.picture_store import PictureStore

_TYPES = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
}
_SENDS = "send the picture itself, as base64 in a data URL"


class GivenPictures:
    """The pictures of one request. Threads may use it one after the other."""

    def __init__(self, store: PictureStore) -> None:
        self.files: dict[str, bytes] = {}
        """By their SHA-256, each once."""
        self.faults: dict[str, str] = {}
        """Why a picture cannot be decoded, by its SHA-256."""
        self.num_pictures = 0
        """Parts that were taken, equal ones too."""
        self.num_tokens = 0
        """The placeholders that stand for all of them."""
        self._store = store

    def take(self, part: Mapping[str, Any]) -> str:
        """Look at a part of any API and return the SHA-256 of its picture. `ValueError` says what
        is wrong with it."""
        media_type, text = _source(part)
        kind = _TYPES.get(media_type.lower())
        if kind is None:
            raise ValueError(
                f"{media_type[:80]!r} is no type of picture that is read; choose from "
                f"{', '.join(_TYPES)}"
            )
        data = of_base64(text)
        header = picture_header(data)
        if header.kind != kind:
            raise ValueError(
                f"a {header.kind} that is called {media_type}: name the type that the bytes have"
            )
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 in self.faults:
            raise ValueError(self.faults[sha256])
        num_tokens = self._store.processor.num_tokens(header.height, header.width)
        self.num_pictures += 1
        self.num_tokens += num_tokens
        self.files[sha256] = data
        return sha256

    def keep(self, sha256: str) -> None:
        """Decode a picture that was taken, and keep it in the store; one that the store has is not
        decoded again. A damaged one is noted in `faults`."""
        try:
            self._store.add(self.files[sha256])
        except ValueError as error:
            self.faults[sha256] = str(error)


def _source(part: Mapping[str, Any]) -> tuple[str, str]:
    """The media type and the base64 text of a part: of Anthropic's `source`, of OpenAI's
    `image_url` as an object or a text. `ValueError` for all that is somewhere else."""
    source = part.get("source")
    if isinstance(source, Mapping):
        kind = source.get("type")
        if kind == "base64":
            return _text(source, "media_type"), _text(source, "data")
        raise ValueError(
            f"source.type {kind!r}: this server fetches nothing; give base64, with media_type and "
            "data"
        )
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url = url.get("url")
    if not isinstance(url, str):
        elsewhere = "file_id: no files are kept here; " if part.get("file_id") else ""
        raise ValueError(f"{elsewhere}{_SENDS} under image_url")
    try:
        return data_url(url)
    except ValueError as error:
        raise ValueError(f"{error}, and this server fetches nothing; {_SENDS}") from None


def _text(source: Mapping[str, Any], name: str) -> str:
    value = source.get(name)
    if not isinstance(value, str):
        raise ValueError(f"source.{name}: must be a text, not {type(value).__name__}")
    return value
