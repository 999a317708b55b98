"""The positions of tokens among pictures, for models that turn queries and keys by three of them.

A token of text stands at one position of time, row and column alike. The tokens of a picture that
begins at p all have the time p, and the row and column p plus their own in the merged grid; text
goes on behind the larger of the two sides. So a picture of 3 x 2 tokens takes three positions:

    text  text  r0c0   r0c1   r1c0   r1c1   r2c0   r2c1   text
    0     1     2,2,2  2,2,3  2,3,2  2,3,3  2,4,2  2,4,3  5

As in transformers (`get_rope_index`). Families whose rope has no axes need none of this: all their
tokens stand at their index.
Left out: frames of a video, whose time would go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nanoengine.spans import ImageSpan


def merged_grid(span: ImageSpan) -> tuple[int, int]:
    """Rows and columns of a picture's tokens, each a square of patches. `ValueError` where its
    patches make no such grid."""
    frames, rows, columns = span.grid
    side = math.isqrt(max(rows * columns // max(span.length, 1), 1))
    if frames != 1 or rows % side or columns % side or rows * columns != span.length * side**2:
        raise ValueError(
            f"the picture at token {span.start} has {span.length} tokens, and a grid {span.grid} "
            "of patches, which are not merged into so many squares"
        )
    return rows // side, columns // side


def rope_positions(first: int, end: int, images: Sequence[ImageSpan]) -> np.ndarray:
    """The positions of tokens `first` to `end` of a sequence, [end - first, 3] int64: time, row
    and column."""
    index = np.arange(first, end)
    positions = np.repeat(index[:, None], 3, axis=1)
    shift = 0  # what the pictures so far took less, or more, than a position a token
    for span in images:
        if span.start >= end:
            break
        rows, columns = merged_grid(span)
        lo, hi = max(span.start, first), min(span.end, end)
        if lo < hi:
            place = np.arange(lo, hi) - span.start
            own = np.stack([np.zeros_like(place), place // columns, place % columns], axis=1)
            positions[lo - first : hi - first] = own + (span.start + shift)
        shift += max(rows, columns) - span.length
        behind = max(span.end, first) - first
        positions[behind:] = index[behind:, None] + shift
    return positions
