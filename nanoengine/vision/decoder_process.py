"""Decodes pictures of other formats than PNG, each in a confined process of its own, with Pillow.

    pixels = decode("JPEG", data)                        # uint8 RGB [H, W, 3]

Whoever writes a JPEG, WebP or GIF may aim at its decoder, so none runs in a process that has
anything to lose: the helper gets an empty environment, a limit of time, and what decoder_program.py
gives up before it looks. It costs about a tenth of a second a picture, once in each process that
sees it. PNG is read in this one (png.py): zlib and numpy, and sizes known before.
Left out: a helper that stays for the next picture.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from nanoengine.extras import missing
from nanoengine.vision.decoder_program import MISSING, SIDES
from nanoengine.vision.picture_header import picture_header
from nanoengine.vision.png import MAX_PIXELS

LIMIT_S = 60.0  # of a picture, on a machine that is busy
_PROGRAM = Path(__file__).with_name("decoder_program.py")
_LIBRARIES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_MORE_BYTES = 4096  # for the sides, or a text


def decode(kind: str, data: bytes, limit_s: float = LIMIT_S) -> np.ndarray:
    """The pixels of a file, upright by EXIF and without alpha: uint8 RGB [H, W, 3]. `ValueError`
    for one that is damaged, over the limits, or breaks its decoder, and without Pillow."""
    header = picture_header(data)
    num_bytes = 3 * header.width * header.height
    try:
        import PIL  # noqa: F401 (its door alone: no decoder is loaded here)
    except ImportError as error:
        raise missing(f"a {kind} picture", "pillow", extra="vision") from error
    command = [sys.executable, "-I", str(_PROGRAM), kind, str(num_bytes + _MORE_BYTES)]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(data)
        given.seek(0)
        try:
            ended = subprocess.run(
                command, stdin=given, stdout=said, stderr=subprocess.DEVNULL,
                env=_environment(), cwd="/", timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise _unreadable(kind, f"it took more than {limit_s:g} s") from None
        if ended.returncode == MISSING:
            raise missing(f"a {kind} picture", "pillow", extra="vision")
        said.seek(0)
        return _pixels(kind, said.read(num_bytes + _MORE_BYTES), num_bytes)


def _environment() -> dict[str, str]:
    """Nothing but where some Pythons find their own libraries."""
    return {name: os.environ[name] for name in _LIBRARIES if name in os.environ}


def _pixels(kind: str, said: bytes, num_bytes: int) -> np.ndarray:
    if len(said) < SIDES.size:
        raise _unreadable(kind, "it broke its decoder")
    (height, width), rows = SIDES.unpack_from(said), said[SIDES.size :]
    if not height:
        raise _unreadable(kind, rows.decode(errors="replace"))
    if 3 * height * width != len(rows) or len(rows) != num_bytes:
        raise _unreadable(kind, "its pixels are not as many as its header says")
    return np.frombuffer(rows, np.uint8).reshape(height, width, 3).copy()


def _unreadable(kind: str, why: str) -> ValueError:
    return ValueError(
        f"this {kind} cannot be read ({why}): it must be whole, and of at most {MAX_PIXELS:,} "
        "pixels; save or fetch the file again"
    )
