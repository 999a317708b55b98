"""The sides that a file says, against Pillow's; and the tokens that follow, against pictures."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from nanoengine.vision.picture_header import picture_header
from nanoengine.vision.processor import PictureProcessor, TiledPictures, WholePictures

image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

SIDES = [(1, 1), (2, 3), (300, 17), (255, 256), (257, 1)]
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "png": ("PNG", {}),
    "jpeg": ("JPEG", {"comment": b"\xff\xc0" * 40}),
    "progressive jpeg": ("JPEG", {"progressive": True, "exif": b"Exif\0\0II*\0"}),
    "webp, lossy": ("WEBP", {}),
    "webp, lossless": ("WEBP", {"lossless": True}),
    "webp, extended": ("WEBP", {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"}),
    "gif": ("GIF", {}),
}


def saved(width: int, height: int, kind: str, **options: Any) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    image.fromarray(noise).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("form", FORMS)
def test_the_sides_of_a_file_are_those_that_pillow_finds(form: str) -> None:
    kind, options = FORMS[form]
    for width, height in SIDES:
        data = saved(width, height, kind, **options)
        assert picture_header(data) == (kind, *image.open(io.BytesIO(data)).size)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_ends_within_its_header_is_one_error(form: str) -> None:
    kind, options = FORMS[form]
    data = saved(40, 40, kind, **options)
    for end in range(12, len(data)):
        try:
            found = picture_header(data[:end])
        except ValueError as error:
            assert f"this {kind} cannot be read" in str(error)
        else:
            assert found == (kind, 40, 40)


def test_tokens_are_known_before_a_picture_is_decoded() -> None:
    """As many as `process` makes, lying or standing: EXIF may turn the file."""
    shared: Any = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "rescale_factor": 1 / 255}
    processors: list[PictureProcessor] = [
        WholePictures(
            **{**shared, "kernel": "bicubic", "placeholder": "<p>", "patch": 8, "merge": 2},
            min_pixels=1024, max_pixels=9000, frames=2,
        ),
        *(
            TiledPictures(
                **{**shared, "kernel": "lanczos", "placeholder": "<p>", "around": "<a>"},
                whole="<w>", longest_edge=96, tile=32, is_split=is_split, tile_tokens=4,
                patch=8, merge=2,
            )
            for is_split in (True, False)
        ),
    ]  # fmt: skip
    for processor in processors:
        for height, width in ((1, 1), (40, 90), (90, 40), (33, 33), (300, 100), (7, 700)):
            made = processor.process(np.zeros((height, width, 3), np.uint8)).num_tokens
            assert processor.num_tokens(height, width) == made
            assert processor.num_tokens(width, height) == made
