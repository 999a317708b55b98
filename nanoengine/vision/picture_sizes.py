"""The size that a processor gives a picture: the rules of `transformers`, in plain arithmetic.

`smart_resize` is Qwen's (models/qwen2_vl), `tile_sizes` that of SmolVLM and Idefics 3
(models/smolvlm). Both round as Python does, and `int` cuts.
Next: processor.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_MAX_RATIO = 200  # Qwen's
_MAX_EDGE = 4096  # SmolVLM's, whatever its options say


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width as multiples of `factor`, near the given ones, with a number of pixels from
    `min_pixels` to `max_pixels`. `ValueError` for a side over 200 times the other."""
    if max(height, width) > _MAX_RATIO * min(height, width):
        raise ValueError(
            f"a picture of {width}x{height} pixels: one side may be at most {_MAX_RATIO} times the "
            "other; crop it"
        )
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


class TileSizes(NamedTuple):
    """A picture is first made `fitted` (height, width), then `whole`, whose sides are multiples of
    a tile's. It is cut into `rows` times `columns` tiles; none, where it is one tile itself."""

    fitted: tuple[int, int]
    whole: tuple[int, int]
    rows: int
    columns: int


def tile_sizes(height: int, width: int, *, longest_edge: int, tile: int) -> TileSizes:
    """The sizes on the way to tiles of `tile` times `tile` pixels."""
    fitted = fit_longest_edge(height, width, longest_edge)
    whole = _whole_tiles(*fitted, tile)
    rows, columns = whole[0] // tile, whole[1] // tile
    if rows * columns == 1:
        rows = columns = 0
    return TileSizes(fitted, whole, rows, columns)


def fit_longest_edge(height: int, width: int, longest_edge: int) -> tuple[int, int]:
    """Height and width with the longer side at `longest_edge`, the other even, at most 4096."""
    ratio = width / height
    if width >= height:
        width = longest_edge
        height = int(width / ratio)
        height += height % 2
    else:
        height = longest_edge
        width = int(height * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _MAX_EDGE:
        height, width = int(_MAX_EDGE / ratio), _MAX_EDGE
    elif height > width and height > _MAX_EDGE:
        height, width = _MAX_EDGE, int(_MAX_EDGE * ratio)
    return max(height, 1), max(width, 1)


def _whole_tiles(height: int, width: int, tile: int) -> tuple[int, int]:
    """The longer side up to a multiple of `tile`, the other as it follows, up to another."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return height, width
