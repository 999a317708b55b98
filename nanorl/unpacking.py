"""Decompresses what a store's file holds, up to a size that no rollout reaches.

A file may be somebody else's: 10 kB can stand for gigabytes. What says no size, or another than it
has, is refused as well.
Left out: compressing, which needs no bound.
"""

from __future__ import annotations

import zlib

import zstandard

MOST_BYTES = 128 << 20
"""Of one content: some ten million tokens with all that is stored of each."""


def unzstd(content: bytes) -> bytes:
    """`ValueError` for what is too large, or damaged."""
    try:
        size = zstandard.get_frame_parameters(content).content_size
        if size > MOST_BYTES:  # one that is not said is the largest number
            raise _too_large(len(content))
        return zstandard.decompress(content)
    except zstandard.ZstdError as error:
        raise ValueError(f"damaged content of {len(content)} bytes: {error}") from error


def unzlib(content: bytes) -> bytes:
    """`ValueError` for what is too large, or damaged."""
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(content, MOST_BYTES + 1)
    except zlib.error as error:
        raise ValueError(f"damaged content of {len(content)} bytes: {error}") from error
    if len(data) > MOST_BYTES:
        raise _too_large(len(content))
    if not stream.eof:
        raise ValueError(f"damaged content of {len(content)} bytes: it ends too early")
    return data


def _too_large(num_bytes: int) -> ValueError:
    return ValueError(
        f"{num_bytes} bytes stand for more than {MOST_BYTES >> 20} MiB, or do not say for how much"
    )
