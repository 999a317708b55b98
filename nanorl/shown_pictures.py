"""Pictures among tokens as people read them: what stands in place of their placeholders.

    pictures = RunPictures.of(tokenizer)               # None, where the model reads text
    for piece in pieces(sequence, 0, 40, pictures):    # ids, or a ShownPicture
        ...
    [picture 3: 48 x 48, 9 tokens, sha256 9e1d5f0c2b3a]

A store of rollouts may be anybody's, so nothing that a span says is believed: a grid is only words,
and a hash is a name of 64 hexadecimal digits or it names nothing. Files are read where they are
shown (nanoengine/vision/picture_files.py).
Left out: markup (html.py and the viewer write what they need).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from nanoengine.spans import ImageSpan
from nanorl.types import Branch, Rollout

HASH_CHARS = 12  # of a hash, where people read it
MOST_PATCHES = 1 << 20  # of a side; a grid that says more is none


@dataclass(frozen=True)
class RunPictures:
    """The folder of a run's pictures, and how large its model sees them."""

    folder: Path
    size_of: Callable[[tuple[int, int, int]], tuple[int, int]]
    """Width and height in pixels of a grid of patches."""

    @classmethod
    def of(cls, tokenizer: Any) -> RunPictures | None:
        """Those of a tokenizer that sees; None of another."""
        store = getattr(tokenizer, "store", None)
        return None if store is None else cls(store.folder, store.processor.size_of)

    def data(self, sha256: str) -> bytes:
        """The file. `KeyError` names one that is not there, or is not what its name says."""
        from nanoengine.vision.picture_files import picture_file  # here: few runs have pictures

        return picture_file(self.folder, sha256)


@dataclass(frozen=True, kw_only=True)
class ShownPicture:
    """A picture of a sequence, or a tile of one. `number` counts from 1 in its sequence."""

    span: ImageSpan
    number: int
    size: tuple[int, int] | None = None
    """Width and height in pixels, as the model sees it; None where that is not known."""

    @property
    def sha256(self) -> str:
        return str(self.span.sha256)

    @property
    def line(self) -> str:
        """For a text: `[picture 3: 48 x 48, 9 tokens, sha256 9e1d5f0c2b3a]`."""
        size = "" if self.size is None else f"{_times(self.size)}, "
        words = f"{size}{_tokens(self.span)}, sha256 {self.sha256[:HASH_CHARS]}"
        return f"[picture {self.number}: {words}]"

    @property
    def title(self) -> str:
        """For what is a picture anyway: `picture 3, 9 tokens, 48 x 48`."""
        size = "" if self.size is None else f", {_times(self.size)}"
        return f"picture {self.number}, {_tokens(self.span)}{size}"


Items = Sequence[int | ShownPicture]
"""Tokens, with one item for all those of a picture."""


class SeeingDecode:
    """Tokens to text, by a function that decodes ids, with a line for each picture."""

    def __init__(self, decode: Callable[[list[int]], str], pictures: RunPictures | None) -> None:
        self._decode = decode
        self.pictures = pictures
        """The run's; None of a model that reads text."""

    def __call__(self, items: Items) -> str:
        """The text."""
        return "".join(
            self._decode([one for one in run if isinstance(one, int)])
            if is_ids
            else "".join(one.line for one in run if isinstance(one, ShownPicture))
            for is_ids, run in groupby(items, lambda one: isinstance(one, int))
        )


def known_pictures(decode: Callable[[list[int]], str]) -> RunPictures | None:
    """The run's pictures, where `decode` knows them."""
    return decode.pictures if isinstance(decode, SeeingDecode) else None


def shown_pictures(images: Sequence[ImageSpan], pictures: RunPictures | None) -> list[ShownPicture]:
    """The pictures of a sequence, in order."""
    return [
        ShownPicture(span=span, number=number, size=_size(span, pictures))
        for number, span in enumerate(images, 1)
    ]


def pieces(
    sequence: Rollout | Branch, start: int, end: int, pictures: RunPictures | None
) -> Iterator[list[int] | ShownPicture]:
    """The tokens `start` to `end`: ids between pictures, and pictures in place of theirs. A picture
    belongs to where it starts; the rest of one that started before is left out."""
    place = start
    for shown in shown_pictures(sequence.images, pictures):
        span = shown.span
        if span.end <= start or span.start >= end:
            continue
        if span.start > place:
            yield sequence.tokens[place : span.start]
        if span.start >= start:
            yield shown
        place = min(span.end, end)
    if place < end:
        yield sequence.tokens[place:end]


def items(sequence: Rollout | Branch, start: int, end: int, pictures: RunPictures | None) -> Items:
    """The tokens `start` to `end`, with one item for each picture that starts there."""
    if not sequence.images:
        return sequence.tokens[start:end]
    found: list[int | ShownPicture] = []
    for piece in pieces(sequence, start, end, pictures):
        found += [piece] if isinstance(piece, ShownPicture) else piece
    return found


def told(
    sequence: Rollout | Branch, start: int, end: int, decode: Callable[[list[int]], str]
) -> str:
    """The tokens `start` to `end` as a text, with a line for each picture."""
    if not sequence.images:
        return decode(sequence.tokens[start:end])
    seeing = decode if isinstance(decode, SeeingDecode) else SeeingDecode(decode, None)
    return seeing(items(sequence, start, end, seeing.pictures))


def _size(span: ImageSpan, pictures: RunPictures | None) -> tuple[int, int] | None:
    is_grid = len(span.grid) == 3 and all(
        isinstance(one, int) and 0 <= one < MOST_PATCHES for one in span.grid
    )
    return pictures.size_of(span.grid) if pictures is not None and is_grid else None


def _times(size: tuple[int, int]) -> str:
    return " x ".join(map(str, size))


def _tokens(span: ImageSpan) -> str:
    return f"{span.length} token{'s' * (span.length != 1)}"
