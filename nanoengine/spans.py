"""Pictures among tokens: where they stand, and what to compare in place of tokens.

A picture is a run of equal placeholder tokens whose rows the model fills with what its tower sees.
So two sequences may have equal tokens and different pictures, and whoever asks whether they begin
alike (a cache, a tree of rows, a router, a replay) compares `content_ids`: an id for each position
that says what stands there.

    tokens       5  9  9  9  9  6        content_ids   5  -71..  -20..  -88..  -46..  6
                    `--------'           of another picture of that size   5  -13..  -90..  ...
                 ImageSpan(start=1, length=4, ...)

Nobody looks for a picture by the id of its placeholder: a policy may sample that id, and then it is
a token like others. Left out: pixels (a span names its picture by the hash of its bytes), video and
sound, which would be further kinds of spans.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ImageSpan:
    """The tokens `start` to `start + length` of a sequence stand for one picture, or one tile.

    ImageSpan(start=4, length=9, key="5f0c...", grid=(1, 6, 6), sha256="9e1d...")
    """

    start: int
    length: int
    key: str
    """Equal where the rows are: of the picture, and of all that decides how they are made of it."""
    grid: tuple[int, int, int]
    """Frames, and rows and columns of patches, before any are merged."""
    sha256: str
    """Of the picture's file, by which it is stored."""

    @property
    def end(self) -> int:
        return self.start + self.length

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ImageSpan:
        """The span of `dataclasses.asdict`, which has been JSON."""
        return cls(**{**fields, "grid": tuple(fields.get("grid", ()))})


def content_ids(tokens: list[int], images: Sequence[ImageSpan]) -> list[int]:
    """An id for each position: its token, or within a picture a negative number of 63 bits that
    depends on the picture's key and the place in it. Without pictures `tokens` itself."""
    if not images:
        return tokens
    ids = list(tokens)
    for span in images:
        ids[span.start : span.end] = _ids_of(span.key, span.length)
    return ids


@lru_cache(maxsize=4096)
def _ids_of(key: str, length: int) -> tuple[int, ...]:
    # The stream of an extendable hash: what stands at a place does not depend on the length.
    stream = hashlib.shake_128(key.encode()).digest(8 * length)
    return tuple(number | -(1 << 63) for number in struct.unpack(f"<{length}q", stream))
