"""Checkpoints for tests: whole tensors with today's writer, and the bytes of the first format."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.state.checkpoint_writer import CheckpointWriter
from nanoengine.state.slices import make_piece


def save_checkpoint(
    root: Path | str,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    keep: int = 2,
) -> Path:
    """A process alone writes whole tensors."""
    writer = CheckpointWriter(root, keep=keep)
    writer.save(step, [(make_piece(name, t), t) for name, t in tensors.items()], meta)
    folder = writer.wait()
    assert folder is not None
    return folder


def write_format_1(
    root: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> Path:
    """One file of whole tensors under their own names, as versions before format 2 wrote it. By
    hand, byte by byte: nothing of today's writer is in it."""
    codes = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
    folder = root / f"step_{step:08d}"
    folder.mkdir(parents=True)
    header, body = {}, b""
    for name, tensor in tensors.items():
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(body), len(body) + len(data)]
        shape = list(tensor.shape)
        header[name] = {"dtype": codes[tensor.dtype], "shape": shape, "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = struct.pack("<Q", len(text)) + text + body
    (folder / "tensors.safetensors").write_bytes(file)
    record = {
        "format": 1,
        "serial": step,
        "step": step,
        "files": {"tensors.safetensors": {"bytes": len(file), "crc32": zlib.crc32(file)}},
        "meta": dict(meta),
    }
    inner = json.dumps(record)
    outer = {"crc32": zlib.crc32(inner.encode()), "body": inner}
    (folder / "meta.json").write_text(json.dumps(outer))
    (root / "latest").write_text(folder.name + "\n")
    return folder
