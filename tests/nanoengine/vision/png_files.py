"""Writes every kind of PNG that there is, slowly, pixel by pixel, as the standard puts it; chunks
that are wrong on purpose, too."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
PASSES = [
    *("16462646", "77777777", "56565656", "77777777"),
    *("36463646", "77777777", "56565656", "77777777"),
]
"""The pass in which each pixel of an 8x8 block comes, as the standard draws it."""


def encode_png(
    samples_HWC: np.ndarray,
    *,
    depth: int,
    color_type: int,
    filters: Sequence[int] = (0,),
    interlaced: bool = False,
    extra: Iterable[tuple[bytes, bytes]] = (),
    num_parts: int = 1,
) -> bytes:
    """A file of samples as they stand in it. `filters` are used in turn, by lines."""
    height, width, _ = samples_HWC.shape
    lines = b""
    for picture in passes_of(samples_HWC) if interlaced else [samples_HWC]:
        lines += filtered(picture, depth, filters)
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, interlaced)
    body = zlib.compress(lines)
    step = -(-len(body) // num_parts)
    parts = [body[place : place + step] for place in range(0, len(body), step)]
    data = [(b"IDAT", part) for part in parts]
    return join([(b"IHDR", header), *extra, *data, (b"IEND", b"")])


def split(data: bytes) -> list[tuple[bytes, bytes]]:
    """The chunks of a whole file."""
    place, found = len(SIGNATURE), []
    while place < len(data):
        size, name = struct.unpack_from(">I4s", data, place)
        found.append((name, data[place + 8 : place + 8 + size]))
        place += 12 + size
    return found


def join(chunks: Iterable[tuple[bytes, bytes]]) -> bytes:
    made = SIGNATURE
    for name, body in chunks:
        made += struct.pack(">I", len(body)) + name + body
        made += struct.pack(">I", zlib.crc32(name + body))
    return made


def passes_of(samples_HWC: np.ndarray) -> list[np.ndarray]:
    height, width, _ = samples_HWC.shape
    found = []
    for number in "1234567":
        rows = [
            [samples_HWC[y, x] for x in range(width) if PASSES[y % 8][x % 8] == number]
            for y in range(height)
        ]
        rows = [row for row in rows if row]
        if rows:
            found.append(np.array(rows))
    return found


def filtered(samples_hwC: np.ndarray, depth: int, filters: Sequence[int]) -> bytes:
    num_channels = samples_hwC.shape[2]
    back = max(num_channels * depth // 8, 1)
    above = b"\0" * len(packed(samples_hwC[0], depth))
    made = b""
    for index, row in enumerate(samples_hwC):
        kind = filters[index % len(filters)]
        line = packed(row, depth)
        made += bytes([kind])
        for place, value in enumerate(line):
            a = line[place - back] if place >= back else 0
            b = above[place]
            c = above[place - back] if place >= back else 0
            guess = (0, a, b, (a + b) // 2, paeth(a, b, c))[kind]
            made += bytes([(value - guess) % 256])
        above = line
    return made


def paeth(a: int, b: int, c: int) -> int:
    return min((a, b, c), key=lambda one: abs(a + b - c - one))  # the first of equals


def packed(row_wC: np.ndarray, depth: int) -> bytes:
    bits = "".join(f"{value:0{depth}b}" for value in row_wC.ravel().tolist())
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[place : place + 8], 2) for place in range(0, len(bits), 8))
