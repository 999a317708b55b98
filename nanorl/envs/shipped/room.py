"""A room of squares as a picture, and what its squares are called.

    drawn(6, agent=(1, 2), ring=(4, 4))      uint8 pixels [48, 48, 3]
    named((1, 2))                            "b3"

A square is one patch of the tiny model. Left out: walls inside of it.
"""

from __future__ import annotations

import numpy as np

Place = tuple[int, int]  # row and column
SQUARE = 8  # pixels of a side
_FLOOR, _AGENT, _RING = (0, 0, 0), (255, 0, 0), (0, 255, 0)


def drawn(size: int, agent: Place | None = None, ring: Place | None = None) -> np.ndarray:
    """The room as uint8 pixels [8 · size, 8 · size, 3]: a red square where somebody is, a green
    ring around a door or a mark."""
    pixels = np.zeros((size * SQUARE, size * SQUARE, 3), np.uint8)
    if ring is not None:
        _fill(pixels, ring, 1, _RING)
        _fill(pixels, ring, 3, _FLOOR)
    if agent is not None:
        _fill(pixels, agent, 1, _AGENT)
    return pixels


def named(place: Place) -> str:
    """A square as a chess player writes it, from the top: "b3" is the second row's third."""
    return f"{chr(ord('a') + place[0])}{place[1] + 1}"


def _fill(pixels: np.ndarray, place: Place, margin: int, colour: tuple[int, int, int]) -> None:
    top, left = place[0] * SQUARE, place[1] * SQUARE
    end = SQUARE - margin
    pixels[top + margin : top + end, left + margin : left + end] = colour
