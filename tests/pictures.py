"""Spans of pictures for tests: of one size, so that only the key tells them apart."""

from __future__ import annotations

from nanoengine.spans import ImageSpan

PLACEHOLDER = 9


def picture(name: str, start: int, length: int = 4) -> ImageSpan:
    """A picture of `length` tokens (one row of merged patches) that begins at `start`."""
    return ImageSpan(start=start, length=length, key=name, grid=(1, 2, 2 * length), sha256=name * 8)
