"""Digits as a pocket calculator draws them: seven segments, in any size.

 -a-
f   b        a digit is 4 pixels wide and 7 high, a segment one thick and two long, and with
 -g-         `scale` as many times larger
e   c
 -d-
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

Colour = Sequence[int]
WIDTH, HEIGHT = 4, 7
GAP = 2  # columns between two digits
_SEGMENTS: Mapping[str, tuple[slice, slice]] = MappingProxyType(
    {
        **{"a": (slice(0, 1), slice(1, 3)), "g": (slice(3, 4), slice(1, 3))},
        **{"d": (slice(6, 7), slice(1, 3)), "f": (slice(1, 3), slice(0, 1))},
        **{"b": (slice(1, 3), slice(3, 4)), "e": (slice(4, 6), slice(0, 1))},
        "c": (slice(4, 6), slice(3, 4)),
    }
)
_OF_DIGITS = (
    "abcdef",
    "bc",
    "abged",
    "abgcd",
    "fgbc",
    "afgcd",
    "afgedc",
    "abc",
    "abcdefg",
    "abcdfg",
)


def draw_number(
    pixels: np.ndarray, number: int, top_left: tuple[int, int], colour: Colour, scale: int = 1
) -> None:
    """Draw a number of any digits into uint8 pixels [H, W, 3]."""
    top, left = top_left
    for digit in str(number):
        for segment in _OF_DIGITS[int(digit)]:
            rows, columns = _SEGMENTS[segment]
            pixels[
                top + scale * rows.start : top + scale * rows.stop,
                left + scale * columns.start : left + scale * columns.stop,
            ] = colour
        left += scale * (WIDTH + GAP)


def number_width(number: int, scale: int = 1) -> int:
    """Pixels from the first column of a number to its last."""
    count = len(str(number))
    return scale * (count * WIDTH + (count - 1) * GAP)


def number_picture(number: int, side: int, colour: Colour, scale: int) -> np.ndarray:
    """A number in the middle of a black square: uint8 [side, side, 3]."""
    pixels = np.zeros((side, side, 3), np.uint8)
    place = (side - scale * HEIGHT) // 2, (side - number_width(number, scale)) // 2
    draw_number(pixels, number, place, colour, scale)
    return pixels
