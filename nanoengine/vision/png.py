"""Reads and writes PNG files with zlib and numpy alone, and trusts nothing that a file says.

All colour types, bit depths, filters and the Adam7 interlace of the standard
(https://www.w3.org/TR/png-3/). Sizes are read and held against the limits before anything is
decompressed, and not one byte more is decompressed than the header promises. A file that is
truncated, damaged or over a limit is one `ValueError`.
Left out: colour spaces and gamma, which models never see applied; texts; the frames of an animation
after its first; the one colour of a picture without alpha that a tRNS chunk calls transparent.
Next: pictures.py (any file to RGB).

    h, w  rows and columns of one pass of an interlaced picture, or of the whole
    C     channels: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha
    B     bytes in a row
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_FILE_BYTES = 20_000_000
MAX_PIXELS = 64_000_000
MAX_SIDE = 65_535  # JPEG's; a line of 64 million pixels is no picture
_MAX_BYTES = 4 * MAX_PIXELS  # when decompressed: pictures of 16 bits may have half of the pixels

_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type; 3 has indices of a palette
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_PALETTE = 3
_ADAM7 = (
    *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2)),
    (0, 1, 1, 2),
)  # first column, first row, and the steps to the next ones
_SUB, _UP, _AVERAGE, _PAETH = 1, 2, 3, 4
_STRIP_ROWS = 256


@dataclass(frozen=True, eq=False)
class PngPicture:
    """The content of a file: `pixels` [H, W, C] in uint8, or in uint16 of 16 bits a sample, and
    the bytes of its EXIF block, if there is one. Palettes are looked up, and samples of fewer than
    8 bits are spread over 0 to 255."""

    pixels: np.ndarray
    exif: bytes | None


def read_png(data: bytes) -> PngPicture:
    """Read the bytes of a file. `ValueError` says what is wrong with them."""
    check_file_size(data)
    found = _read_chunks(data)
    header = found.header
    raw = _decompress(found.compressed, header.num_bytes)
    samples_HWC = np.empty((header.height, header.width, header.num_channels), header.dtype)
    place = 0
    for one in header.passes():
        end = place + one.height * (1 + header.row_bytes(one.width))
        lines_hB = raw[place:end].reshape(one.height, -1)
        rows_hB = _undo_filters(lines_hB, header.pixel_bytes)
        samples_HWC[one.y :: one.dy, one.x :: one.dx] = _samples(rows_hB, one.width, header)
        place = end
    if header.color_type == _PALETTE:
        return PngPicture(_look_up(samples_HWC[..., 0], found), found.exif)
    if header.depth < 8:
        samples_HWC *= 255 // ((1 << header.depth) - 1)
    return PngPicture(samples_HWC, found.exif)


def write_png(pixels: np.ndarray) -> bytes:
    """The file of a picture, uint8 [H, W] in grey, [H, W, 3] in RGB or [H, W, 4] with alpha.

    The same pixels give the same bytes, from one version of zlib. `ValueError` for another shape
    or dtype.
    """
    grey = pixels.ndim == 2
    num_channels = 1 if grey else pixels.shape[-1]
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or 0 in pixels.shape:
        num_channels = 0
    if num_channels not in ((1,) if grey else (3, 4)):
        raise ValueError(
            f"pixels are {pixels.dtype} {list(pixels.shape)}: a PNG is written of uint8 [height, "
            "width], [height, width, 3] or [height, width, 4]"
        )
    height, width = pixels.shape[:2]
    check_sides(width, height)
    rows_HB = np.ascontiguousarray(pixels).reshape(height, -1)
    lines_HB = np.empty((height, 1 + rows_HB.shape[1]), np.uint8)
    lines_HB[:, 0] = _UP  # small for drawn pictures, and the fastest to undo
    lines_HB[0, 1:] = rows_HB[0]
    np.subtract(rows_HB[1:], rows_HB[:-1], out=lines_HB[1:, 1:])
    color_type = {1: 0, 3: 2, 4: 6}[num_channels]
    header = struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    body = zlib.compress(lines_HB.tobytes(), 6)
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return SIGNATURE + b"".join(_chunk(name, content) for name, content in chunks)


def check_file_size(data: bytes) -> None:
    """`ValueError` for a file that is too large to be read."""
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(
            f"a picture of {len(data):,} bytes: at most {MAX_FILE_BYTES:,} are read; make it "
            "smaller, or save it as JPEG"
        )


def check_sides(width: int, height: int) -> None:
    """`ValueError` for a picture without pixels, or with too many."""
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE) or width * height > MAX_PIXELS:
        raise ValueError(
            f"a picture of {width}x{height} pixels: sides must be 1 to {MAX_SIDE:,} and at most "
            f"{MAX_PIXELS:,} pixels in all; make it smaller"
        )


class _Pass(NamedTuple):
    """The pixels of a picture that lie `dx` and `dy` apart from (x, y) on."""

    x: int
    y: int
    dx: int
    dy: int
    width: int
    height: int


@dataclass(frozen=True)
class _Header:
    width: int
    height: int
    depth: int
    color_type: int
    is_interlaced: bool

    @property
    def num_channels(self) -> int:
        return _CHANNELS[self.color_type]

    @property
    def dtype(self) -> type[np.generic]:
        return np.uint16 if self.depth == 16 else np.uint8

    @property
    def pixel_bytes(self) -> int:
        """The distance at which the filters look back."""
        return max(self.num_channels * self.depth // 8, 1)

    def row_bytes(self, width: int) -> int:
        return (width * self.num_channels * self.depth + 7) // 8

    def passes(self) -> Iterator[_Pass]:
        for x, y, dx, dy in _ADAM7 if self.is_interlaced else ((0, 0, 1, 1),):
            width, height = -(-(self.width - x) // dx), -(-(self.height - y) // dy)
            if width > 0 and height > 0:
                yield _Pass(x, y, dx, dy, width, height)

    @property
    def num_bytes(self) -> int:
        """The size of all lines, each with the byte that names its filter."""
        return sum(one.height * (1 + self.row_bytes(one.width)) for one in self.passes())


@dataclass
class _Found:
    header: _Header
    compressed: list[bytes] = field(default_factory=list)
    palette: bytes | None = None
    alphas: bytes = b""
    exif: bytes | None = None


def _read_chunks(data: bytes) -> _Found:
    chunks = _chunks(data)
    name, body = next(chunks)
    if name != b"IHDR":
        raise _damaged(f"begins with the chunk {name!r}", "the first is IHDR")
    found = _Found(_read_header(body))
    previous = name
    for name, body in chunks:
        if name == b"IDAT":
            if found.compressed and previous != name:
                raise _damaged(
                    f"has {previous!r} between its IDAT chunks", "they follow each other"
                )
            found.compressed.append(body)
        elif name == b"PLTE":
            if found.palette is not None or found.compressed or not _is_palette(body):
                raise _damaged(
                    "has a bad PLTE chunk", "one stands before IDAT, of 1 to 256 colours"
                )
            found.palette = body
        elif name == b"tRNS":
            found.alphas = body
        elif name == b"eXIf":
            found.exif = body
        elif name != b"IEND" and not name[0] & 0x20:  # a capital: needed to read the picture
            raise _damaged(f"has the chunk {name!r}", "the standard has none of this name")
        previous = name
    return found


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Names and contents, down to IEND. What follows it belongs to nobody, and is not read."""
    if not data.startswith(SIGNATURE):
        raise _damaged(f"begins with {bytes(data[:8])!r}", f"it must be {SIGNATURE!r}")
    place, name = len(SIGNATURE), b""
    view = memoryview(data)
    while name != b"IEND":
        if place + 12 > len(data):
            raise _damaged(f"ends at byte {len(data)}", "the last chunk is IEND")
        size, name = struct.unpack_from(">I4s", data, place)
        end = place + 12 + size
        if end > len(data):
            raise _damaged(f"ends in its chunk {name!r}", f"which has {size} bytes")
        if zlib.crc32(view[place + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            raise _damaged(f"has another checksum than its chunk {name!r}", "both must agree")
        yield name, bytes(view[place + 8 : end - 4])
        place = end


def _read_header(body: bytes) -> _Header:
    if len(body) != 13:
        raise _damaged(f"has a header of {len(body)} bytes", "it has 13")
    width, height, depth, color_type, method, filters, interlace = struct.unpack(">IIBBBBB", body)
    if depth not in _DEPTHS.get(color_type, ()):
        raise _damaged(
            f"has {depth} bits of colour type {color_type}", "the standard has none such"
        )
    if method or filters or interlace > 1:
        raise _damaged(
            f"has compression {method}, filters {filters} and interlace {interlace}",
            "the standard has 0, 0 and 0 or 1",
        )
    check_sides(width, height)
    header = _Header(width, height, depth, color_type, bool(interlace))
    if header.num_bytes > _MAX_BYTES:
        raise ValueError(
            f"a PNG of {header.num_bytes:,} bytes when decompressed: at most {_MAX_BYTES:,} are "
            "read; save it with 8 bits a sample"
        )
    return header


def _is_palette(body: bytes) -> bool:
    return 0 < len(body) <= 3 * 256 and len(body) % 3 == 0


def _decompress(parts: list[bytes], num_bytes: int) -> np.ndarray:
    """The lines of all passes, uint8 [num_bytes]. It stops at the first byte too many."""
    engine = zlib.decompressobj()
    try:
        raw = engine.decompress(b"".join(parts), num_bytes + 1)
    except zlib.error as error:
        raise _damaged(
            f"cannot be decompressed ({error})", "its IDAT chunks hold a zlib stream"
        ) from error
    if len(raw) != num_bytes or not engine.eof:
        kind = "more" if len(raw) > num_bytes else "less"
        raise _damaged(f"holds {kind} than its header says", f"that is {num_bytes} bytes")
    return np.frombuffer(raw, np.uint8)


def _samples(rows_hB: np.ndarray, width: int, header: _Header) -> np.ndarray:
    """[h, w, C], as they lie in the file: neither spread nor looked up."""
    if header.depth == 16:
        rows_hB = rows_hB.view(">u2")
    elif header.depth < 8:
        shifts = np.arange(8 - header.depth, -1, -header.depth, dtype=np.uint8)
        mask = np.uint8((1 << header.depth) - 1)
        rows_hB = (rows_hB[..., None] >> shifts & mask).reshape(len(rows_hB), -1)[:, :width]
    return rows_hB.reshape(len(rows_hB), width, header.num_channels)


def _look_up(indices_HW: np.ndarray, found: _Found) -> np.ndarray:
    if found.palette is None:
        raise _damaged("has no palette", "colour type 3 needs a PLTE chunk")
    colors = np.frombuffer(found.palette, np.uint8).reshape(-1, 3)
    if indices_HW.max() >= len(colors):
        raise _damaged(f"names colour {indices_HW.max()}", f"its palette has {len(colors)}")
    if len(found.alphas) > len(colors):
        raise _damaged(f"has {len(found.alphas)} alphas", f"its palette has {len(colors)} colours")
    if found.alphas:
        alphas = np.frombuffer(found.alphas.ljust(len(colors), b"\xff"), np.uint8)
        colors = np.concatenate([colors, alphas[:, None]], axis=1)
    return colors[indices_HW]


def _undo_filters(lines_hB: np.ndarray, pixel_bytes: int) -> np.ndarray:
    """Bytes of pixels [h, B] from lines [h, 1 + B], which begin with the filter that made them."""
    filters_h = lines_hB[:, 0]
    if filters_h.max() > _PAETH:
        raise _damaged(f"has a line of filter {filters_h.max()}", "the standard has 0 to 4")
    rows_hB = lines_hB[:, 1:].copy()
    above_B = np.zeros_like(rows_hB[0])
    for start in range(0, len(rows_hB), _STRIP_ROWS):
        strip = slice(start, start + _STRIP_ROWS)
        is_simple = (filters_h[strip] < _AVERAGE).all()
        undo = _undo_simple if is_simple else _undo_by_diagonals
        undo(rows_hB[strip], filters_h[strip], above_B, pixel_bytes)
        above_B = rows_hB[strip][-1]
    return rows_hB


def _undo_simple(
    rows_hB: np.ndarray, filters_h: np.ndarray, above_B: np.ndarray, pixel_bytes: int
) -> None:
    """In place, of rows that have None, Sub and Up: sums along a row, or of two rows."""
    for row_B, kind in zip(rows_hB, filters_h.tolist(), strict=True):
        if kind == _SUB:
            pixels = row_B.reshape(-1, pixel_bytes)
            np.add.accumulate(pixels, axis=0, dtype=np.uint8, out=pixels)
        elif kind == _UP:
            row_B += above_B
        above_B = row_B


def _undo_by_diagonals(
    rows_hB: np.ndarray, filters_h: np.ndarray, above_B: np.ndarray, pixel_bytes: int
) -> None:
    """In place, of rows with any filter. A pixel needs the ones to its left, above and between, so
    all that lie on a diagonal, which falls to the left, can be undone at once.

    They are laid out in rows: pixel (i, j) is cell i + 1 of row i + j + 2. Column 0 has the row
    above; two rows and a diagonal of zeros stand for what lies to the left of the picture.
    """
    height, size = len(rows_hB), pixel_bytes
    width = rows_hB.shape[1] // size
    cells = np.zeros((height + width + 1, (height + 1) * size), np.int16)
    row_step, byte_step = cells.strides
    pixels_hwB = np.lib.stride_tricks.as_strided(
        cells[2:, size:],
        (height, width, size),
        (row_step + size * byte_step, row_step, byte_step),
    )
    pixels_hwB[...] = rows_hB.reshape(height, width, size)
    cells[1 : width + 1, :size] = above_B.reshape(width, size)
    filters = np.repeat(filters_h, size)
    # Without what they do not look at, None, Sub and Up are Paeth.
    has_left, has_above = (np.isin(filters, kinds) * np.int16(-1) for kinds in _NEIGHBOURS)
    has_both = has_left & has_above
    is_average = filters == _AVERAGE
    any_average, all_paeth = is_average.any(), (filters == _PAETH).all()
    for diagonal in range(height + width - 1):
        low, high = max(diagonal - width + 1, 0) * size, min(diagonal + 1, height) * size
        left = cells[diagonal + 1, low + size : high + size]
        above = cells[diagonal + 1, low:high]
        corner = cells[diagonal, low:high]
        if any_average:
            average = (left + above) >> 1
        if not all_paeth:
            left = left & has_left[low:high]
            above = above & has_above[low:high]
            corner = corner & has_both[low:high]
        guess = _paeth(left, above, corner)
        if any_average:
            np.copyto(guess, average, where=is_average[low:high])
        found = cells[diagonal + 2, low + size : high + size]
        found += guess
        found &= 255
    rows_hB[...] = pixels_hwB.reshape(height, -1)


_NEIGHBOURS = ((_SUB, _PAETH), (_UP, _PAETH))  # the filters that look to the left, and above


def _paeth(left: np.ndarray, above: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """The one of the three that is nearest to left + above - corner; the first of equals."""
    to_left, to_above = above - corner, left - corner
    to_corner = np.abs(to_left + to_above)
    to_left, to_above = np.abs(to_left), np.abs(to_above)
    is_left = (to_left <= to_above) & (to_left <= to_corner)
    return np.where(is_left, left, np.where(to_above <= to_corner, above, corner))


def _chunk(name: bytes, content: bytes) -> bytes:
    checked = name + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


def _damaged(what: str, rule: str) -> ValueError:
    return ValueError(f"this PNG {what}: {rule}; save or fetch the file again")
