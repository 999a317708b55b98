"""The definition of a resized picture, in integers.

Two passes, along the rows first and then along the columns. Each weighs the pixels under a kernel
(bilinear, bicubic with a = -0.5, Lanczos with three lobes), which is stretched where the picture
shrinks; its weights are worked out in double precision, made to sum to 1 and rounded to multiples
of 2^-22, and each pass rounds its sums to levels of 0 to 255. Pillow 12 computes the same, bit for
bit. This file is the definition and not Pillow, whose 13 passes over the columns first for some
sizes: a picture's numbers, and with them log-probs, must not change with a version of a library.

The sums are exact in float64 (31 bits at most), so they are the same in whichever order a matrix
product adds them, on every machine.
Next: processor.py (which sizes).

    H, W, C  rows, columns and channels of the picture
    R, N     rows that a pass makes, and numbers in a row
    K        pixels under the kernel
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

RESIZE_RULE = "separable, rows first, weights of 22 bits"
"""Names this definition, for fingerprints. It changes with the bits of what `resize` returns."""

_ONE = 1 << 22  # weights are multiples of its inverse
_BLOCK_ROWS = 16  # that one matrix product makes: more would multiply by more zeros
_BLOCK_BYTES = 1 << 20  # of float64 that one takes, to stay in the cache

Kernel = Callable[[np.ndarray], np.ndarray]


def resize(pixels_HWC: np.ndarray, height: int, width: int, kernel: str = "bicubic") -> np.ndarray:
    """A copy of a picture with `height` rows and `width` columns, uint8 [height, width, C].

    `kernel` is one of `KERNELS`. `ValueError` for pixels that are not uint8 [H, W, C], for an empty
    picture or size, and for another kernel.
    """
    check_pixels(pixels_HWC)
    if height < 1 or width < 1:
        raise ValueError(f"size {height}x{width}: a picture has at least one row and one column")
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r}: must be one of {', '.join(KERNELS)}")
    if width != pixels_HWC.shape[1]:
        columns = np.ascontiguousarray(pixels_HWC.swapaxes(0, 1))
        pixels_HWC = resample_rows(columns, width, kernel).swapaxes(0, 1)
    if height != pixels_HWC.shape[0]:
        pixels_HWC = resample_rows(pixels_HWC, height, kernel)
    return np.array(pixels_HWC, order="C")


def check_pixels(pixels_HWC: np.ndarray) -> None:
    """`ValueError` for anything but a picture: uint8 [H, W, C] with a pixel in it."""
    shape = pixels_HWC.shape
    if pixels_HWC.dtype != np.uint8 or len(shape) != 3 or 0 in shape:
        raise ValueError(
            f"pixels are {pixels_HWC.dtype} {list(shape)}: must be uint8 [height, width, channels] "
            "and not empty; read a file with read_picture"
        )


def resample_rows(pixels_HWC: np.ndarray, num_rows: int, kernel: str) -> np.ndarray:
    """One pass along the columns: uint8 [num_rows, W, C], each row a weighted sum of rows."""
    source_HN = np.ascontiguousarray(pixels_HWC).reshape(len(pixels_HWC), -1)
    first_R, weights_RK = _weights(len(pixels_HWC), num_rows, kernel)
    made_RN = np.empty((num_rows, source_HN.shape[1]), np.uint8)
    for start in range(0, num_rows, _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        _resample_block(source_HN, first_R[block], weights_RK[block], made_RN[block])
    return made_RN.reshape(num_rows, *pixels_HWC.shape[1:])


def _resample_block(
    source_HN: np.ndarray, first_R: np.ndarray, weights_RK: np.ndarray, made_RN: np.ndarray
) -> None:
    """Some rows of a pass, as the product of a band of weights and the rows that it covers."""
    num_taps = weights_RK.shape[1]
    low, high = first_R[0], min(first_R[-1] + num_taps, len(source_HN))
    band = np.zeros((len(first_R), first_R[-1] + num_taps - low))
    np.put_along_axis(band, first_R[:, None] - low + np.arange(num_taps), weights_RK, axis=1)
    band = band[:, : high - low]  # what lies behind the last row weighs nothing
    step = max(_BLOCK_BYTES // (8 * (high - low)), 64)
    for start in range(0, source_HN.shape[1], step):
        part = slice(start, start + step)
        sums = band @ source_HN[low:high, part].astype(np.float64)
        sums += 0.5
        np.clip(sums, 0.0, 255.0, out=sums)
        made_RN[:, part] = sums  # the cast drops the fraction


def _weights(num_in: int, num_out: int, kernel: str) -> tuple[np.ndarray, np.ndarray]:
    """The first row under the kernel [R] and the weights [R, K], of each row that is made."""
    shape, radius = KERNELS[kernel]
    scale = num_in / num_out
    stretch = max(scale, 1.0)
    radius *= stretch
    centre_R1 = ((np.arange(num_out) + 0.5) * scale)[:, None]
    first_R1 = np.maximum((centre_R1 - radius + 0.5).astype(np.int64), 0)
    end_R1 = np.minimum((centre_R1 + radius + 0.5).astype(np.int64), num_in)
    rows_RK = first_R1 + np.arange((end_R1 - first_R1).max())
    distance_RK = (rows_RK - centre_R1 + 0.5) * (1.0 / stretch)
    weights_RK = np.where(rows_RK < end_R1, shape(distance_RK), 0.0)
    # From left to right, as Pillow adds: `sum` adds in pairs, and rounds otherwise.
    weights_RK /= np.add.accumulate(weights_RK, axis=1)[:, -1:]
    # Half away from zero, as Pillow rounds.
    return first_R1[:, 0], np.trunc(weights_RK * _ONE + np.copysign(0.5, weights_RK)) / _ONE


def _bilinear(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    return np.where(x < 1.0, 1.0 - x, 0.0)


def _bicubic(x: np.ndarray) -> np.ndarray:
    a = -0.5
    x = np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where((x >= -3.0) & (x < 3.0), _sinc(x) * _sinc(x / 3), 0.0)


def _sinc(x: np.ndarray) -> np.ndarray:
    angle = x * math.pi
    # Not np.sin, whose last bit depends on the processor's vector units.
    sine = np.array([math.sin(one) for one in angle.ravel().tolist()]).reshape(angle.shape)
    return np.where(x == 0.0, 1.0, sine / np.where(x == 0.0, 1.0, angle))


KERNELS: dict[str, tuple[Kernel, float]] = {
    "bilinear": (_bilinear, 1.0),
    "bicubic": (_bicubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}
"""Kernels and their radii, in pixels of the larger of the two pictures."""
