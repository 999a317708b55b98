"""From levels of 0 to 255 to the numbers of a tower's input, the same in every engine.

The arithmetic is that of `transformers`, step by step: a level times the scale in float64, rounded
to float32, minus the mean, divided by the deviation in float32. There are 256 levels, so it is done
once for each, and pixels look their value up. The shorter (level - 255 mean) / (255 deviation)
differs in half of the levels by up to 2.4e-7.

    H, W, 3  rows, columns and channels
    P        patches of a picture
    L        the 256 levels
"""

from __future__ import annotations

import numpy as np


def level_values(mean: tuple[float, ...], deviation: tuple[float, ...], scale: float) -> np.ndarray:
    """The number that each level of each channel becomes: float32 [3, 256]."""
    levels_L = (np.arange(256, dtype=np.float64) * scale).astype(np.float32)
    mean_31, deviation_31 = (np.array(one, np.float32)[:, None] for one in (mean, deviation))
    return (levels_L - mean_31) / deviation_31


def patch_rows(
    pixels_HW3: np.ndarray, values_3L: np.ndarray, *, patch: int, merge: int, frames: int
) -> np.ndarray:
    """The patches of a picture as rows, float32 [P, 3 * frames * patch * patch].

    Patches that the tower merges, `merge` times `merge` of them, follow each other: by block row,
    block column, row and column in the block. Within a patch it is channel, frame, row, column; a
    picture is a film that stands still, `frames` times the same. `H` and `W` are multiples of
    patch * merge.
    """
    height, width, _ = pixels_HW3.shape
    blocks = pixels_HW3.reshape(
        height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, 3
    )
    levels = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch, patch)
    made = np.empty((len(levels), 3, frames, patch, patch), np.float32)
    for channel in range(3):
        made[:, channel] = values_3L[channel][levels[:, channel]][:, None]
    return made.reshape(len(levels), -1)
