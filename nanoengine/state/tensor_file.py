"""Safetensors files: the one place that knows their header and their names of dtypes.

    u64 size of the header | JSON {name: {dtype, shape, data_offsets}} | the tensors, end to end

Written tensor by tensor, because the library's own writer first copies everything in memory, and
flushed to the disk; or mapped as a file of zeros, so that writing to the tensors writes the file.

Left out: reading whole files at once, which the library does well (formats/hf.py).
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 22
MOST_HEADER_BYTES = 100_000_000
"""As the library's own limit."""

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file and the way on."""


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, as Hugging Face configs and our checkpoints spell it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TensorEntry:
    """The place of a tensor in a safetensors file: `begin:end` are bytes from the file's start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by name. `ValueError` for a header that says more than the file has:
    the file may be somebody else's."""
    try:
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            (size,) = struct.unpack("<Q", file.read(8))
            if size > min(MOST_HEADER_BYTES, num_bytes):
                raise ValueError(f"a header of {size} bytes")
            header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        return {name: _entry(one, 8 + size, num_bytes) for name, one in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ValueError(f"{path} is damaged or no safetensors file ({error})") from error


def _entry(fields: Mapping[str, Any], first: int, num_bytes: int) -> TensorEntry:
    """`first` is where the tensors begin in a file of `num_bytes`."""
    dtype, shape = _DTYPES[fields["dtype"]], tuple(fields["shape"])
    begin, end = (first + offset for offset in fields["data_offsets"])
    is_whole = first <= begin <= end <= num_bytes and all(one >= 0 for one in shape)
    if not is_whole or math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"a tensor {shape} at {begin} to {end} of {num_bytes} bytes")
    return TensorEntry(dtype, shape, begin, end)


def _make_header(
    kinds: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """(the bytes before the tensors, {name: its bytes begin:end in the file}, the file's size)."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset, spans = 0, {}
    for name, (dtype, shape) in kinds.items():
        spans[name] = (offset, offset + math.prod(shape) * dtype.itemsize)
        header[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": list(spans[name]),
        }
        offset = spans[name][1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    prefix = struct.pack("<Q", len(text)) + text
    first = len(prefix)
    moved = {name: (first + begin, first + end) for name, (begin, end) in spans.items()}
    return prefix, moved, first + offset


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Write safetensors and flush them to the disk. Returns bytes and CRC-32 of the file."""
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    prefix, _, size = _make_header(kinds, metadata)
    checksum = zlib.crc32(prefix)
    with open(path, "wb") as file:
        file.write(prefix)
        for tensor in tensors.values():
            for chunk in tensor_bytes(tensor):
                file.write(chunk)
                checksum = zlib.crc32(chunk, checksum)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "crc32": checksum}


def tensor_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, piece by piece. Copies each piece: a tensor whose memory NumPy has
    seen can never be resized again, and `AdamW.offload` resizes."""
    flat = tensor.detach().reshape(-1)
    for piece in flat.split(CHUNK_BYTES // flat.element_size()):
        yield piece.cpu().clone().view(torch.uint8).numpy().data


def read_tensor(file: BinaryIO, out: Tensor) -> None:
    """The inverse of writing `tensor_bytes`, into a contiguous tensor."""
    flat = out.detach().view(-1)
    for piece in flat.split(CHUNK_BYTES // flat.element_size()):
        staged = torch.empty_like(piece, device="cpu")
        view = staged.view(torch.uint8).numpy().data
        if file.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise CheckpointError(f"{file.name} is shorter than it was when it was written")
        piece.copy_(staged)


def map_safetensors(
    path: Path, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Make a safetensors file of zeros and return its tensors; writing to them writes the file."""
    kinds = {name: (dtype, shape) for name, shape in shapes.items()}
    prefix, spans, size = _make_header(kinds, {"format": "pt"})
    with open(path, "wb") as file:
        file.write(prefix)
        file.truncate(size)
    data = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    return {
        name: data[begin:end].view(dtype).view(*shapes[name])
        for name, (begin, end) in spans.items()
    }
