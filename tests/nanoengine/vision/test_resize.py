"""A resized picture is what integers worked out one by one say, and what Pillow 12 makes.

Pillow 13 passes over the columns first for some sizes. Asked for one side at a time it has no
choice, and gives what 12 gives; that is the reference here. It is asked for both at once, too.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from nanoengine.vision.resize import KERNELS, resample_rows, resize

RESAMPLE = {"lanczos": 1, "bilinear": 2, "bicubic": 3}
RADIUS = {"lanczos": 3, "bilinear": 1, "bicubic": 2}


def noise(height: int, width: int, seed: int, channels: int = 3) -> np.ndarray:
    """Full contrast: where kernels overshoot and every rounding shows."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, channels))
    return np.where(rng.random((height, 1, 1)) < 0.3, pixels // 200 * 255, pixels).astype(np.uint8)


def draw_sizes(count: int, seed: int) -> list[tuple[int, int, int, int]]:
    """From 8 to 2000 pixels a side, most of them small, to as many kinds of sizes."""
    rng = np.random.default_rng(seed)
    sides = np.exp(rng.uniform(np.log(8), np.log(400), (count, 4))).astype(int)
    sides[0, :2], sides[1, 2:], sides[2, 0] = 2000, 1000, 2000
    sides[3:6, 2] = sides[3:6, 0]  # one side stays
    sides[6:9, 3] = sides[6:9, 1]
    return [tuple(row) for row in sides.tolist()]


def kernel_at(name: str, x: float) -> float:
    x = abs(x)
    if name == "bilinear":
        return max(1 - x, 0.0)
    if name == "bicubic":
        if x < 1:
            return 1.5 * x**3 - 2.5 * x**2 + 1
        return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0
    sinc = lambda y: math.sin(math.pi * y) / (math.pi * y) if y else 1.0  # noqa: E731
    return sinc(x) * sinc(x / 3) if x < 3 else 0.0


def resized_line(line: list[int], size: int, name: str) -> list[int]:
    """One row of one channel, a pixel at a time, in Python's integers."""
    scale = len(line) / size
    stretch = max(scale, 1.0)
    made = []
    for index in range(size):
        centre = (index + 0.5) * scale
        low = max(int(centre - RADIUS[name] * stretch + 0.5), 0)
        high = min(int(centre + RADIUS[name] * stretch + 0.5), len(line))
        weights = [kernel_at(name, (at + 0.5 - centre) / stretch) for at in range(low, high)]
        total = sum(weights)
        whole = [math.floor(abs(w / total) * 2**22 + 0.5) * (1 if w > 0 else -1) for w in weights]
        level = sum(w * x for w, x in zip(whole, line[low:high], strict=True))
        made.append(min(max((level + 2**21) // 2**22, 0), 255))
    return made


def by_hand(pixels: np.ndarray, height: int, width: int, name: str) -> np.ndarray:
    rows = [[resized_line(c.tolist(), width, name) for c in row.T] for row in pixels]
    wide = np.array(rows).transpose(0, 2, 1)
    columns = [
        [resized_line(c.tolist(), height, name) for c in col.T] for col in wide.swapaxes(0, 1)
    ]
    return np.array(columns).transpose(2, 0, 1)


@pytest.mark.parametrize("name", KERNELS)
def test_pixels_are_those_of_integers_one_by_one(name: str) -> None:
    rng = np.random.default_rng(len(name))
    for seed in range(25):
        height, width, new_height, new_width = rng.integers(1, 24, 4).tolist()
        pixels = noise(height, width, seed, channels=1 + seed % 4)
        found = resize(pixels, new_height, new_width, name)
        assert found.dtype == np.uint8 and found.flags.c_contiguous
        assert np.array_equal(found, by_hand(pixels, new_height, new_width, name)), seed


def test_numbers_worked_out_on_paper() -> None:
    two = np.array([[[0], [255]]], np.uint8)
    assert resize(two, 1, 1, "bilinear").ravel().tolist() == [128]  # 127.5 goes up
    # Between two pixels, a quarter and three quarters of the way: 0.8671875 and 0.2265625 of the
    # near ones, which alone lie inside, so they are divided by their sum 1.09375.
    four = resize(np.array([[[0], [240]]], np.uint8), 1, 4, "bicubic").ravel().tolist()
    outer = 240 * -0.0703125 / (0.8671875 - 0.0703125)
    assert four == [max(round(outer), 0), round(240 * 0.2265625 / 1.09375), 190, 255]
    # A picture of one colour keeps it: weights sum to 1 within half a level.
    for name in KERNELS:
        for level in (0, 1, 127, 254, 255):
            flat = np.full((37, 53, 3), level, np.uint8)
            assert (resize(flat, 11, 90, name) == level).all()


@pytest.mark.parametrize("name", KERNELS)
def test_pillow_makes_the_same_when_asked_for_one_side_after_the_other(name: str) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for seed, (height, width, new_height, new_width) in enumerate(draw_sizes(20, seed=len(name))):
        pixels = noise(height, width, seed)
        picture = image.fromarray(pixels).resize((new_width, height), RESAMPLE[name])
        expected = np.array(picture.resize((new_width, new_height), RESAMPLE[name]))
        assert np.array_equal(resize(pixels, new_height, new_width, name), expected), seed


def test_pillow_makes_the_same_or_the_other_order_when_asked_at_once() -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    found = []
    for seed, (height, width, new_height, new_width) in enumerate(draw_sizes(40, seed=5)):
        pixels = noise(height, width, seed)
        theirs = np.array(image.fromarray(pixels).resize((new_width, new_height), 3))
        shorter = resample_rows(pixels, new_height, "bicubic")
        columns_first = resample_rows(shorter.swapaxes(0, 1), new_width, "bicubic").swapaxes(0, 1)
        is_ours = np.array_equal(theirs, resize(pixels, new_height, new_width))
        assert is_ours or np.array_equal(theirs, columns_first), seed
        if new_height >= height:
            assert is_ours, seed
        found.append(is_ours)
    assert sum(found) > 15


def test_the_result_is_a_copy_and_any_layout_goes_in() -> None:
    pixels = noise(9, 7, 0)
    same = resize(pixels, 9, 7)
    assert np.array_equal(same, pixels) and not np.shares_memory(same, pixels)
    assert np.array_equal(resize(np.asfortranarray(pixels), 4, 5), resize(pixels, 4, 5))
    flipped = pixels[:, ::-1]
    assert np.array_equal(resize(flipped, 4, 5), resize(flipped.copy(), 4, 5))


def test_parts_of_a_wide_picture_are_made_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = noise(64, 300, 1)
    whole = resize(pixels, 40, 200)
    monkeypatch.setattr("nanoengine.vision.resize._BLOCK_BYTES", 1)
    assert np.array_equal(resize(pixels, 40, 200), whole)


@pytest.mark.parametrize(
    ("pixels", "size", "name", "said"),
    [
        (np.zeros((2, 2, 3)), (1, 1), "bicubic", r"float64 \[2, 2, 3\]: must be uint8"),
        (np.zeros((2, 2), np.uint8), (1, 1), "bicubic", "must be uint8"),
        (np.zeros((0, 2, 3), np.uint8), (1, 1), "bicubic", "not empty"),
        (np.zeros((2, 2, 3), np.uint8), (0, 1), "bicubic", "size 0x1"),
        (np.zeros((2, 2, 3), np.uint8), (1, 1), "nearest", "must be one of bilinear, bicubic, lan"),
    ],
)
def test_what_cannot_be_resized_is_refused(
    pixels: np.ndarray, size: tuple[int, int], name: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        resize(pixels, *size, name)
