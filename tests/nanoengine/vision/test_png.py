"""PNG files of every kind are read as their writer meant them, and broken ones are refused.

The writer is png_files.py, which does pixel by pixel what the standard says; Pillow is asked too.
"""

from __future__ import annotations

import io
import random
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from png_files import CHANNELS, SIGNATURE, encode_png, join, split

from nanoengine.vision.png import MAX_FILE_BYTES, read_png, write_png

KINDS = [
    *((0, depth) for depth in (1, 2, 4, 8, 16)),
    *((3, depth) for depth in (1, 2, 4, 8)),
    *((color_type, depth) for color_type in (2, 4, 6) for depth in (8, 16)),
]


def draw(color_type: int, depth: int, height: int, width: int, seed: int) -> np.ndarray:
    """Random samples; a part of them smooth, so that all branches of Paeth are taken."""
    rng = np.random.default_rng(seed)
    shape = (height, width, CHANNELS[color_type])
    noise = rng.integers(0, 1 << depth, shape)
    slope = np.add.outer(np.arange(height), np.arange(width) * 2)[..., None] % (1 << depth)
    return np.where(rng.random((height, 1, 1)) < 0.5, noise, slope + np.zeros(shape, int))


def header(width: int, height: int, *, depth: int = 8, color_type: int = 2) -> tuple[bytes, bytes]:
    return b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)


def as_pillow(data: bytes) -> np.ndarray:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pixels = np.array(image.open(io.BytesIO(data)))
    return pixels if pixels.ndim == 3 else pixels[..., None]


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("color_type", "depth"), KINDS)
def test_every_kind_of_file_is_read(color_type: int, depth: int, interlaced: bool) -> None:
    palette = np.random.default_rng(1).integers(0, 256, (1 << depth, 3)).astype(np.uint8)
    for seed, (height, width) in enumerate([(1, 1), (1, 9), (9, 1), (13, 11), (3, 2), (8, 16)]):
        samples = draw(color_type, depth, height, width, seed)
        extra = [(b"PLTE", palette.tobytes())] if color_type == 3 else []
        data = encode_png(
            samples,
            depth=depth,
            color_type=color_type,
            filters=(4, 1, 2, 3, 0),
            interlaced=interlaced,
            extra=extra,
            num_parts=1 + seed % 3,
        )
        found = read_png(data).pixels
        spread = {1: 255, 2: 85, 4: 17}.get(depth, 1)
        expected = palette[samples[..., 0]] if color_type == 3 else samples * spread
        assert found.dtype == (np.uint16 if depth == 16 else np.uint8)
        assert np.array_equal(found, expected), (height, width)


@pytest.mark.parametrize("filters", [(0,), (1,), (2,), (3,), (4,), (1, 2), (3, 4), (4, 0, 2, 1)])
@pytest.mark.parametrize("color_type", [0, 2, 4, 6])
def test_every_filter_is_undone_over_more_rows_than_a_strip(
    color_type: int, filters: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoengine.vision.png._STRIP_ROWS", 5)
    samples = draw(color_type, 8, 17, 6, len(filters))
    data = encode_png(samples, depth=8, color_type=color_type, filters=filters)
    assert np.array_equal(read_png(data).pixels, samples)
    if color_type != 4:  # Pillow's LA is two channels here, too
        assert np.array_equal(as_pillow(data), samples)


def test_what_pillow_writes_is_read() -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    rng = np.random.default_rng(0)
    for mode in ("L", "LA", "RGB", "RGBA"):
        for height, width in ((1, 1), (40, 30), (300, 7)):
            shape = (height, width, len(mode))
            pixels = (rng.integers(0, 256, shape) // (1, 40)[width % 2]).astype(np.uint8)
            file = io.BytesIO()
            image.fromarray(pixels[..., 0] if mode == "L" else pixels).save(file, "PNG")
            assert np.array_equal(read_png(file.getvalue()).pixels, pixels)


def test_alphas_of_a_palette_are_a_fourth_channel() -> None:
    samples = np.array([[[0], [1], [2]]])
    chunks = [(b"PLTE", bytes(range(9))), (b"tRNS", bytes([7, 0]))]
    data = encode_png(samples, depth=2, color_type=3, extra=chunks)
    assert read_png(data).pixels.tolist() == [[[0, 1, 2, 7], [3, 4, 5, 0], [6, 7, 8, 255]]]


def test_exif_is_handed_on_and_other_chunks_are_passed_over() -> None:
    extra = [(b"gAMA", bytes(4)), (b"eXIf", b"II*\0"), (b"tEXt", b"a\0b"), (b"tRNS", bytes(6))]
    data = encode_png(np.zeros((1, 1, 3), int), depth=8, color_type=2, extra=extra) + b"more"
    found = read_png(data)
    assert found.exif == b"II*\0" and found.pixels.tolist() == [[[0, 0, 0]]]


def test_a_file_cut_short_anywhere_is_refused() -> None:
    data = encode_png(draw(2, 8, 4, 5, 0), depth=8, color_type=2, num_parts=2)
    assert read_png(data).pixels.shape == (4, 5, 3)
    for end in range(len(data)):
        with pytest.raises(ValueError, match=r"this PNG .*; save or fetch the file again"):
            read_png(data[:end])


def test_a_flipped_bit_anywhere_is_refused() -> None:
    data = encode_png(draw(3, 2, 4, 5, 0), depth=2, color_type=3, extra=[(b"PLTE", bytes(12))])
    for place in range(len(data)):
        for bit in (0, 5):
            broken = bytearray(data)
            broken[place] ^= 1 << bit
            with pytest.raises(ValueError, match="PNG"):
                read_png(bytes(broken))


def spoil(chunks: list[tuple[bytes, bytes]], rng: random.Random) -> list[tuple[bytes, bytes]]:
    """One chunk is changed, cut, lengthened, left out, doubled or moved."""
    place = rng.randrange(len(chunks))
    name, body = chunks[place]
    at = rng.randrange(len(body) + 1)
    kinds = [
        [(name, body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :])],
        [(name, body[:at])],
        [(name, body + bytes(3))],
        [],
        [(name, body)] * 2,
    ]
    rest = chunks[:place] + chunks[place + 1 :]
    if rng.random() < 0.2:
        place = rng.randrange(len(chunks))
    return rest[:place] + rng.choice(kinds) + rest[place:]


def test_spoilt_files_with_the_right_checksums_are_read_or_refused_and_nothing_else() -> None:
    rng, num_refused = random.Random(0), 0
    for index in range(600):
        color_type, depth = KINDS[index % len(KINDS)]
        samples = draw(color_type, depth, 1 + index % 7, 1 + index % 5, index)
        extra = [(b"eXIf", b"II*\0"), (b"tRNS", bytes(2))]
        extra[1:1] = [(b"PLTE", bytes(3 << depth))] if color_type == 3 else []
        data = encode_png(
            samples,
            depth=depth,
            color_type=color_type,
            filters=(index % 5,),
            interlaced=index % 2 > 0,
            extra=extra,
        )
        try:
            read_png(join(spoil(split(data), rng)))
        except ValueError as error:
            assert "PNG" in str(error) or "a picture of" in str(error)
            num_refused += 1
    assert 200 < num_refused < 590


ONE = (b"IDAT", zlib.compress(b"\0abc"))
END = (b"IEND", b"")
COLORS = (b"PLTE", bytes(6))


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([ONE, header(1, 1), END], "begins with the chunk b'IDAT'"),
        ([(b"IHDR", b"123"), ONE, END], "a header of 3 bytes"),
        ([header(1, 1), END], "cannot be decompressed|holds less"),
        ([header(1, 1), (b"IDAT", b"abc"), END], "cannot be decompressed"),
        ([header(1, 1), (b"IDAT", zlib.compress(b"\0ab")), END], "holds less than its header"),
        ([header(1, 1), (b"IDAT", zlib.compress(b"\0abcd")), END], "holds more than its header"),
        (
            [header(1, 1), (b"IDAT", zlib.compress(b"\0abc")[:-2]), END],
            "holds less than its header",
        ),
        ([header(1, 1), (b"IDAT", zlib.compress(b"\5abc")), END], "a line of filter 5"),
        ([header(1, 1), header(1, 1), ONE, END], "has the chunk b'IHDR'"),
        ([header(1, 1), (b"IdAT", b""), ONE, END], "has the chunk b'IdAT'|IdAT"),
        ([header(1, 1), (b"ABCD", b""), ONE, END], "has the chunk b'ABCD'"),
        ([header(1, 1), ONE, (b"tEXt", b""), ONE, END], "between its IDAT chunks"),
        ([header(1, 1), ONE, COLORS, END], "bad PLTE"),
        ([header(1, 1), COLORS, COLORS, ONE, END], "bad PLTE"),
        ([header(1, 1), (b"PLTE", bytes(7)), ONE, END], "bad PLTE"),
        ([header(1, 1), (b"PLTE", b""), ONE, END], "bad PLTE"),
        ([header(1, 1, depth=3), ONE, END], "3 bits of colour type 2"),
        ([header(1, 1, depth=4), ONE, END], "4 bits of colour type 2"),
        ([header(1, 1, color_type=5), ONE, END], "colour type 5"),
        ([header(0, 1), ONE, END], "0x1 pixels"),
        ([header(1, 70_000), ONE, END], "1x70000 pixels"),
        ([header(60_000, 60_000), ONE, END], "at most 64,000,000 pixels"),
        ([header(60_000, 1_000, depth=16), ONE, END], "when decompressed"),
        ([header(1, 1, color_type=3), (b"IDAT", zlib.compress(b"\0a")), END], "has no palette"),
        ([header(1, 1, color_type=3), COLORS, (b"IDAT", zlib.compress(b"\0\2")), END], "colour 2"),
        (
            [
                *(header(1, 1, color_type=3), COLORS, (b"tRNS", bytes(3))),
                *((b"IDAT", zlib.compress(b"\0\1")), END),
            ],
            "3 alphas",
        ),
    ],
)
def test_files_against_the_standard_are_refused(
    chunks: list[tuple[bytes, bytes]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        read_png(join(chunks))


@pytest.mark.parametrize("place", [10, 11, 12])
def test_unknown_methods_are_refused(place: int) -> None:
    name, body = header(1, 1)
    body = body[:place] + b"\2" + body[place + 1 :]
    with pytest.raises(ValueError, match=r"compression \d, filters \d and interlace \d"):
        read_png(join([(name, body), ONE, END]))


def test_other_files_are_refused_by_their_first_bytes() -> None:
    with pytest.raises(ValueError, match=r"begins with b'\\xff\\xd8"):
        read_png(b"\xff\xd8\xff\xe0 a photograph")
    with pytest.raises(ValueError, match="begins with b''"):
        read_png(b"")


def test_a_file_over_the_limit_is_not_looked_at() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_FILE_BYTES:,}"):
        read_png(SIGNATURE + bytes(MAX_FILE_BYTES))


def test_a_bomb_costs_what_its_header_promises() -> None:
    """A hundred million zeros in a picture of 10x10 pixels."""
    engine = zlib.compressobj(9)
    body = b"".join(engine.compress(bytes(1_000_000)) for _ in range(100)) + engine.flush()
    data = join([header(10, 10), (b"IDAT", body), END])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="holds more than its header says: that is 310 bytes"):
            read_png(data)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(data) < 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [(1, 1), (5, 9), (4, 7, 3), (4, 7, 4), (300, 2, 3)])
def test_what_is_written_is_read_by_us_and_by_pillow(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    expected = pixels if len(shape) == 3 else pixels[..., None]
    for view in (pixels, pixels[::-1].copy()[::-1], np.asfortranarray(pixels)):
        data = write_png(view)
        assert data == write_png(pixels)
        assert np.array_equal(read_png(data).pixels, expected)
    assert np.array_equal(as_pillow(write_png(pixels)), expected)


def test_a_drawn_picture_is_a_small_file() -> None:
    pixels = np.zeros((480, 640, 3), np.uint8)
    pixels[100:200, 50:300] = (255, 0, 128)
    assert len(write_png(pixels)) < 5_000


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((2, 2)),
        np.zeros((2, 2, 1), np.uint8),
        np.zeros((2, 2, 5), np.uint8),
        np.zeros((2, 0), np.uint8),
        np.zeros(3, np.uint8),
        np.zeros((1, 2, 2, 3), np.uint8),
    ],
)
def test_other_arrays_are_not_written(pixels: np.ndarray) -> None:
    with pytest.raises(ValueError, match="a PNG is written of uint8"):
        write_png(pixels)
