"""The first bytes of a picture's file: what it is, and how large it says that it will be.

    picture_header(data)      PictureHeader(kind="PNG", width=1920, height=1080)

Nothing is decoded, and no library asked: a server looks at all pictures of a request so before it
spends time or memory on one. A file that is damaged further back has a good header.
Left out: what comes behind (png.py, pictures.py), and other formats than those that are read.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from nanoengine.vision.png import SIGNATURE, check_file_size, check_sides

_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF markers; those are tables
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a length
_JPEG_ENDS = frozenset({0xD9, 0xDA})  # the end, and the begin of the data


class PictureHeader(NamedTuple):
    """The format of a file, as Pillow calls it, and the sides of its picture in pixels."""

    kind: str
    width: int
    height: int


def picture_header(data: bytes) -> PictureHeader:
    """Read the header of a PNG, JPEG, WebP or GIF. `ValueError` for other bytes, for a file that
    ends within its header, and for one over the limits of png.py."""
    kind = picture_kind(data)
    check_file_size(data)
    try:
        width, height = _SIDES[kind](data)
    except (struct.error, IndexError):
        raise ValueError(
            f"this {kind} cannot be read (it ends or is damaged within its header): it must be "
            "whole; save or fetch the file again"
        ) from None
    check_sides(width, height)
    return PictureHeader(kind, width, height)


def picture_kind(data: bytes) -> str:
    """Pillow's name for what the first bytes say. `ValueError` for what is not read here."""
    if data.startswith(SIGNATURE):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    raise ValueError(
        f"a picture that begins with {bytes(data[:8])!r}: PNG, JPEG, WebP and GIF are read; "
        "convert it to PNG"
    )


def _png_sides(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _gif_sides(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", data, 6)
    return width, height


def _webp_sides(data: bytes) -> tuple[int, int]:
    chunk = data[12:16]
    if chunk == b"VP8X":  # 24 bits each, less one
        low = struct.unpack_from("<HBHB", data, 24)
        return 1 + low[0] + (low[1] << 16), 1 + low[2] + (low[3] << 16)
    if chunk == b"VP8L":  # 14 bits each, less one, behind one byte of signature
        (bits,) = struct.unpack_from("<I", data, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", data, 26)  # of a frame of VP8; two bits are scaling
    return width & 0x3FFF, height & 0x3FFF


def _jpeg_sides(data: bytes) -> tuple[int, int]:
    place = 2
    while True:
        if data[place] != 0xFF:
            raise IndexError
        while data[place] == 0xFF:  # any number of them fills the space before a marker
            place += 1
        marker = data[place]
        place += 1
        if marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", data, place + 3)
            return width, height
        if marker in _JPEG_ENDS:
            raise IndexError
        if marker not in _JPEG_BARE:
            (size,) = struct.unpack_from(">H", data, place)
            place += max(size, 2)


_SIDES = {"PNG": _png_sides, "JPEG": _jpeg_sides, "WEBP": _webp_sides, "GIF": _gif_sides}
