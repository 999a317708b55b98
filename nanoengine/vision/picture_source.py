"""A picture as people's programs and data name it: its bytes, a path, a data URL, pixels, a column.

    {"type": "image", "image": "plots/3.png"}                      relative to the file of the data
    {"type": "image", "image": {"bytes": b"...", "path": "3.png"}}   as `datasets` stores a column
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}      as OpenAI has it

All of them become the bytes of a file, as they came. Nothing is fetched from an address, and data
without a folder of its own, such as the hub's, opens no file.
Left out: whether the bytes are a picture, which pictures.py says.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoengine.vision.png import MAX_FILE_BYTES, check_file_size, write_png

_DATA = "data:"
_DATA_URL = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)
_MAX_CHARS = MAX_FILE_BYTES * 3 // 2  # in base64 it has 4/3, and line ends
SOURCES = "bytes, a path, a data URL, pixels, or {'bytes': ..., 'path': ...}"


def source_of(part: Mapping[str, Any]) -> Any:
    """The source that a part of a message names for its picture; None of a part of another kind,
    and of a picture that is named by its hash. `ValueError` for a picture without a source."""
    kind = part.get("type")
    if kind not in ("image", "image_url") or "sha256" in part:
        return None
    source = part.get(kind)
    if kind == "image_url" and isinstance(source, Mapping):
        source = source.get("url")
    if source is None:
        raise ValueError(f'a part of type {kind!r} names no picture: write {{"{kind}": ...}}')
    return source


def path_of(source: Any, folder: Path | None = None) -> Path | None:
    """The file that `source` names; None where it has the bytes itself. `ValueError` where no file
    may be read (`folder` is None), or there is none."""
    if isinstance(source, Mapping) and source.get("bytes") is None:
        source = source.get("path")
    if isinstance(source, str) and "://" in source and not source.startswith(_DATA):
        raise ValueError(f"the picture {source!r:.200}: addresses are not fetched; give its file")
    if not isinstance(source, str | Path) or str(source).startswith(_DATA):
        return None
    if folder is None:
        raise ValueError(
            f"the picture {str(source)!r}: these data may open no files; put its bytes in"
        )
    path = folder / source
    try:
        is_file = path.is_file()
    except OSError:  # longer than names may be
        is_file = False
    if not is_file:
        raise ValueError(
            f"the picture {path!s:.200} does not exist, or is no file; check the path, or begin a "
            f"text in base64 with {_DATA}image/png;base64,"
        )
    return path


def bytes_of(source: Any, folder: Path | None = None) -> bytes:
    """The bytes of the file that `source` names; relative paths are read from `folder`, and without
    one no path is. `ValueError` says what is wrong with it."""
    path = path_of(source, folder)
    if path is not None:
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ValueError(f"the picture {path} cannot be read: {error.strerror}") from error
        check_file_size(data)
        return data
    if isinstance(source, Mapping):
        source = source.get("bytes")
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str):
        return of_base64(data_url(source)[1])
    if hasattr(source, "dtype") and hasattr(source, "shape"):
        return write_png(source)
    raise ValueError(f"a picture that is {source!r:.100}: give {SOURCES}")


def data_url(url: str) -> tuple[str, str]:
    """The media type of a data URL, and its base64 text. `ValueError` for a URL of another kind."""
    head = _DATA_URL.match(url)
    if head is None:
        raise ValueError(f"{url.partition(':')[0][:20]!r} is no data URL")
    if ";base64" not in head[2].lower():
        raise ValueError("the data URL is not in base64")
    return head[1], url[head.end() :]


def of_base64(text: str) -> bytes:
    """The bytes of a base64 text, which some encoders break into lines. `ValueError` for one that
    is broken, empty, or longer than a picture's file may be, before it is decoded."""
    if len(text) > _MAX_CHARS:
        raise ValueError(
            f"a picture of more than {MAX_FILE_BYTES:,} bytes: make it smaller, or save it as JPEG"
        )
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the base64 text is broken ({error}); encode the file again") from None
    if not data:
        raise ValueError("there is nothing in it; send the picture itself, as base64")
    return data
