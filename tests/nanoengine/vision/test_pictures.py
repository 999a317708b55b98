"""Files become upright RGB as Pillow makes it, which is what `transformers` does with a file."""

from __future__ import annotations

import io
import struct
import sys
from typing import Any

import numpy as np
import pytest
from png_files import encode_png, join

from nanoengine.vision.pictures import exif_orientation, read_picture

# Pillow's, where alpha is dropped, as `transformers` has it do.
pytestmark = pytest.mark.filterwarnings("ignore:Palette images with Transparency")

image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
ImageOps = pytest.importorskip("PIL.ImageOps")


def as_transformers(data: bytes) -> np.ndarray:
    """What its `load_image` does with a file."""
    picture = image.open(io.BytesIO(data))
    return np.array(ImageOps.exif_transpose(picture).convert("RGB"))


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def saved(picture: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def exif(orientation: int, order: str = "<", kind: int = 3) -> bytes:
    mark = b"II*\0" if order == "<" else b"MM\0*"
    entries = [
        (0x010F, 2, 3, b"abc\0"),
        (0x0112, kind, 1, struct.pack(f"{order}HH", orientation, 0)),
    ]
    body = b"".join(struct.pack(f"{order}HHI", *entry[:3]) + entry[3] for entry in entries)
    return mark + struct.pack(f"{order}IH", 8, len(entries)) + body + bytes(4)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_pngs_of_every_mode_are_what_transformers_makes_of_them(mode: str) -> None:
    for seed, (height, width) in enumerate([(1, 1), (8, 13), (70, 40)]):
        if mode == "I;16":
            wide = np.random.default_rng(seed).integers(0, 1 << 16, (height, width))
            picture = image.fromarray((wide >> 12 * (wide % 2)).astype(np.uint16))
        else:
            picture = image.fromarray(noise((height, width, 4), seed)).convert(mode)
        data = saved(picture, "PNG")
        found = read_picture(data)
        assert found.dtype == np.uint8 and found.flags.c_contiguous
        assert np.array_equal(found, as_transformers(data))


@pytest.mark.parametrize(
    ("color_type", "depth"), [(0, 1), (0, 2), (0, 4), (0, 16), (2, 16), (4, 16), (6, 16), (3, 2)]
)
def test_depths_that_pillow_does_not_write_are_read_as_it_reads_them(
    color_type: int, depth: int
) -> None:
    num_channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color_type]
    samples = np.random.default_rng(depth).integers(0, 1 << depth, (9, 11, num_channels))
    samples[0] >>= depth // 2  # small numbers too, which 16 bits of grey keep
    chunks = [(b"PLTE", bytes(range(12))), (b"tRNS", b"\0\x80")] if color_type == 3 else []
    data = encode_png(samples, depth=depth, color_type=color_type, extra=chunks)
    assert np.array_equal(read_picture(data), as_transformers(data))


def test_what_alpha_hides_is_seen() -> None:
    hidden = np.zeros((1, 1, 4), np.uint8)
    hidden[0, 0, :3] = (10, 20, 30)
    assert read_picture(saved(image.fromarray(hidden), "PNG")).tolist() == [[[10, 20, 30]]]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(10))
def test_pictures_are_turned_upright(orientation: int, order: str) -> None:
    block = exif(orientation, order)
    data = encode_png(noise((3, 5, 3)), depth=8, color_type=2, extra=[(b"eXIf", block)])
    assert exif_orientation(block) == (orientation if 1 <= orientation <= 8 else 1)
    assert np.array_equal(read_picture(data), as_transformers(data))
    for kind in ("JPEG", "WEBP") if order == "<" else ():
        data = saved(image.fromarray(noise((30, 50, 3))), kind, exif=b"Exif\0\0" + block)
        found = read_picture(data)
        assert found.shape == ((50, 30, 3) if 5 <= orientation <= 8 else (30, 50, 3))
        assert np.array_equal(found, as_transformers(data))


def test_a_damaged_exif_block_does_not_cost_the_picture() -> None:
    whole = exif(6)
    assert exif_orientation(whole) == exif_orientation(b"Exif\0\0" + whole) == 6
    for block in (b"", b"II", b"XX" + whole[2:], exif(6, kind=4), whole[:8] + b"\xff\xff"):
        assert exif_orientation(block) == 1
    for end in range(len(whole) - 6):
        assert exif_orientation(whole[:end]) == 1


def test_the_first_frame_of_a_gif_is_read() -> None:
    frames = [image.fromarray(noise((6, 8), seed)) for seed in range(3)]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.array_equal(read_picture(data), as_transformers(data))
    assert np.array_equal(read_picture(data)[..., 0], np.array(frames[0]))


def test_other_files_are_refused_by_their_first_bytes() -> None:
    for data in (b"", b"%PDF-1.7", b"RIFF1234WAVE", b"BM" + bytes(100)):
        with pytest.raises(ValueError, match="PNG, JPEG, WebP and GIF are read"):
            read_picture(data)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_damaged_files_are_one_error(kind: str) -> None:
    data = saved(image.fromarray(noise((40, 40, 3))), kind)
    for end in (12, 30, len(data) // 2):
        with pytest.raises(ValueError, match=f"this {kind} cannot be read .*it must be whole"):
            read_picture(data[:end])


def test_sizes_are_held_against_the_limits_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", lambda *given, **more: pytest.fail("decoded"))
    wide = bytearray(saved(image.fromarray(noise((8, 8, 3))), "GIF"))
    for width, height, said in (
        (9_000, 8_000, "a picture of 9000x8000 pixels: sides must"),
        (60_000, 60_000, "a picture of 60000x60000 pixels: .*at most 64,000,000 pixels"),
    ):
        wide[6:10] = struct.pack("<HH", width, height)
        with pytest.raises(ValueError, match=said):
            read_picture(bytes(wide))
    with pytest.raises(ValueError, match="at most 20,000,000 are read"):
        read_picture(b"\xff\xd8\xff" + bytes(20_000_000))


def test_without_pillow_png_is_read_and_others_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {kind: saved(image.fromarray(noise((2, 3, 3))), kind) for kind in ("PNG", "JPEG")}
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert np.array_equal(read_picture(files["PNG"]), noise((2, 3, 3)))
    with pytest.raises(ValueError, match=r"a JPEG picture needs the package pillow.*\[vision\]"):
        read_picture(files["JPEG"])


def test_a_png_of_another_name_in_disguise_is_not_decoded_by_pillow() -> None:
    """The first bytes decide which reader is asked, and that one is asked for nothing else."""
    sides = struct.pack("<HH", 3, 2)
    disguised = b"GIF89a" + sides + saved(image.fromarray(noise((2, 3, 3))), "PNG")
    with pytest.raises(ValueError, match="this GIF cannot be read"):
        read_picture(disguised)
    with pytest.raises(ValueError, match="begins with"):
        read_picture(join([])[:4])
