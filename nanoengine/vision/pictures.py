"""Any picture that arrives, as its bytes or its pixels, becomes uint8 RGB [H, W, 3] here, once.

PNG is read by png.py; JPEG, WebP and GIF (its first frame) by Pillow, an extra, in a confined
process (decoder_process.py). As `transformers` does with files: the picture is turned upright as
its EXIF block says, then alpha is dropped, and what was hidden under it shows. Grey of 16 bits
follows Pillow, which cuts at 255 instead of dividing; other samples of 16 bits lose their low byte.
Left out: orientation in XMP; anything read from an address.
Next: picture_header.py (what a file says of itself), processor.py (to the size that a model takes).
"""

from __future__ import annotations

import struct

import numpy as np

from nanoengine.vision.decoder_process import decode
from nanoengine.vision.picture_header import picture_header
from nanoengine.vision.png import read_png

BORDER_RULE = "upright by EXIF, alpha dropped, 16 bits: grey cut at 255, others divided"
"""Names what happens here, for fingerprints. It changes with the pixels that are read."""

_UPRIGHT = 1  # EXIF's value for a picture that needs no turning
_ORIENTATION = 0x0112
_SHORT = 3  # EXIF's number for 16 bits


def read_picture(data: bytes) -> np.ndarray:
    """The pixels of a file in PNG, JPEG, WebP or GIF: uint8 RGB [H, W, 3].

    `ValueError` for other bytes, for a damaged file, for one over the limits of png.py, which are
    checked before anything is decoded, and where Pillow is needed and not installed.
    """
    kind = picture_header(data).kind
    if kind == "PNG":
        picture = read_png(data)
        upright = turn_upright(picture.pixels, exif_orientation(picture.exif or b""))
        return np.ascontiguousarray(_as_rgb(upright))
    return decode(kind, data)


def turn_upright(pixels_HWC: np.ndarray, orientation: int) -> np.ndarray:
    """A view of a picture as its EXIF orientation, 1 to 8, wants it shown."""
    if orientation >= 5:  # rows are columns
        pixels_HWC = pixels_HWC.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels_HWC = pixels_HWC[::-1]
    if orientation in (2, 3, 6, 7):
        pixels_HWC = pixels_HWC[:, ::-1]
    return pixels_HWC


def exif_orientation(exif: bytes) -> int:
    """The orientation that an EXIF block names; 1, upright, where it names none that there is."""
    exif = exif.removeprefix(b"Exif\0\0")  # JPEG's mark, which some writers put into a PNG too
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return _UPRIGHT
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (num_entries,) = struct.unpack_from(f"{order}H", exif, start)
        for index in range(num_entries):
            place = start + 2 + 12 * index
            tag, kind, count, value = struct.unpack_from(f"{order}HHIH", exif, place)
            if (tag, kind, count) == (_ORIENTATION, _SHORT, 1):
                return value if 1 <= value <= 8 else _UPRIGHT
    except struct.error:  # what is said about a picture may be damaged; the picture is not
        pass
    return _UPRIGHT


def _as_rgb(pixels_HWC: np.ndarray) -> np.ndarray:
    num_channels = pixels_HWC.shape[2]
    if pixels_HWC.dtype == np.uint16:
        is_grey = num_channels == 1
        pixels_HWC = np.minimum(pixels_HWC, 255) if is_grey else pixels_HWC >> 8
        pixels_HWC = pixels_HWC.astype(np.uint8)
    if num_channels <= 2:
        return np.repeat(pixels_HWC[..., :1], 3, axis=2)
    return pixels_HWC[..., :3]
