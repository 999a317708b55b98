"""One copy from pinned memory to a GPU for all tensors of a step: `kernels.memory.to_device`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; Triton compiles a kernel again for pointers that are not aligned so


def upload(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`; see `to_device`. A GPU gets them in one copy."""
    tensors = list(_tensors(value))
    is_gpu = device.type == "cuda"  # else the device of tensors without values
    moved = _upload(tensors, device) if is_gpu else [x.to(device) for x in tensors]
    return _rebuilt(value, iter(moved))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in _parts(value):
            yield from _tensors(part)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return []


def _rebuilt(value: Any, moved: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(moved)
    parts = [_rebuilt(part, moved) for part in _parts(value)]
    if not parts:
        return value
    if isinstance(value, dict):
        return dict(zip(value, parts, strict=True))
    names = [field.name for field in fields(value)]
    return replace(value, **dict(zip(names, parts, strict=True)))


def _upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Pinned memory comes from PyTorch's cache of it, which waits for the copy before it hands the
    same bytes out again."""
    starts, size = [], 0
    for x in tensors:
        starts.append(size)
        size += -(-x.numel() * x.element_size() // _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for x, start in zip(tensors, starts, strict=True):
        _piece(host, start, x).copy_(x)
    packed = host.to(device, non_blocking=True)
    return [_piece(packed, start, x) for x, start in zip(tensors, starts, strict=True)]


def _piece(packed: Tensor, start: int, like: Tensor) -> Tensor:
    end = start + like.numel() * like.element_size()
    return packed[start:end].view(like.dtype).view(like.shape)
