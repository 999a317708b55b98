"""Whole pictures among the spans of a sequence: one span each, or one for each of their tiles.

    by_picture(images)      [[span], [tile, tile, tile], [span]]

Whoever counts pictures counts these. Left out: how a picture is cut (processor.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from nanoengine.spans import ImageSpan


def by_picture(images: Sequence[ImageSpan]) -> list[list[ImageSpan]]:
    """The spans of each picture, in their order. A picture that is shown twice is two."""
    found: list[list[ImageSpan]] = []
    for span in images:
        # tiles share their picture's hash and differ in their key, so it begins again with a first
        is_new = not found or span.sha256 != found[-1][0].sha256 or span.key == found[-1][0].key
        if is_new:
            found.append([])
        found[-1].append(span)
    return found
