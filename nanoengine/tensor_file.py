"""TODO tensor file"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 22


DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file and the way on."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Write safetensors and flush them to the disk: u64 header size, JSON header, the tensors.
    Returns bytes and CRC-32 of the file."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    prefix = struct.pack("<Q", len(text)) + text
    checksum = zlib.crc32(prefix)
    with open(path, "wb") as file:
        file.write(prefix)
        for tensor in tensors.values():
            for chunk in tensor_bytes(tensor):
                file.write(chunk)
                checksum = zlib.crc32(chunk, checksum)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(prefix) + offset, "crc32": checksum}


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
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    spans = {}
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        spans[name] = (offset, end)
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    data = torch.from_file(str(path), shared=True, size=8 + len(text) + offset, dtype=torch.uint8)
    data = data[8 + len(text) :]
    return {
        name: data[begin:end].view(dtype).view(*shapes[name])
        for name, (begin, end) in spans.items()
    }
