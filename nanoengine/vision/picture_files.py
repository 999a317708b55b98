"""A picture's file by its hash, out of a folder that may be anybody's.

    data = picture_file("runs/theirs/pictures", sha256)
    media_type(data)                                    # "image/png"

A hash is a name of 64 hexadecimal digits, never a path, and what lies under it must have it.
Left out: pixels (pictures.py), and keeping files (picture_store.py).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from nanoengine.vision.picture_header import picture_header
from nanoengine.vision.png import MAX_FILE_BYTES

_HASH = re.compile(r"[0-9a-f]{64}")


def picture_file(folder: str | Path, sha256: str) -> bytes:
    """The file as it came. `KeyError` names a picture that is not there, or is damaged."""
    if not _HASH.fullmatch(sha256):
        raise KeyError(f"a picture {sha256[:64]!r}: its name must be 64 hexadecimal digits")
    file = Path(folder) / sha256
    try:
        # A pipe of that name would be waited for, and a large file would fill the memory.
        if not file.is_file():
            raise FileNotFoundError(file)
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError:
        raise KeyError(f"no picture {sha256[:12]} in {folder}") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise KeyError(f"the picture {sha256[:12]} in {folder} is damaged")
    return data


def media_type(data: bytes) -> str:
    """Name the type of a picture that a browser may be given: `image/png`, `image/jpeg`,
    `image/webp` or `image/gif`. `ValueError` for other bytes, and for a header that says it is
    larger than pictures may be; what else is wrong inside of it the browser finds."""
    return f"image/{picture_header(data).kind.lower()}"
