"""The limits of the pictures in a context: how many, and how many tokens (`Limits`)."""

from __future__ import annotations

from collections.abc import Sequence

from nanoengine.spans import ImageSpan
from nanorl.agents.limits import Limits


def num_pictures(images: Sequence[ImageSpan]) -> int:
    """Count the pictures among some tokens; one in tiles is one picture."""
    if not images:
        return 0
    from nanoengine.vision.whole_pictures import by_picture  # here: text needs none of it

    return len(by_picture(images))


def broken_by(limits: Limits, images: Sequence[ImageSpan]) -> str:
    """As `broken_limit`, of the pictures among some tokens."""
    return broken_limit(limits, num_pictures(images), sum(one.length for one in images))


def broken_limit(limits: Limits, num_images: int, num_tokens: int) -> str:
    """Say which limit a context with so many pictures would break; empty: none."""
    counts = {"max_images": num_images, "max_image_tokens": num_tokens}
    for name, count in counts.items():
        most = getattr(limits, name)
        if most is not None and count > most:
            return f"{num_images} pictures of {num_tokens} tokens, {name} is {most}"
    return ""
